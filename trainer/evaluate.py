# SPDX-License-Identifier: MIT
"""Evaluate a checkpoint: python -m trainer.evaluate CHECKPOINT --data PATH [--days A:B].

CHECKPOINT is a folder step-N, or a run's folder (its newest checkpoint). --days and --rows (shares
FROM:TO, of a log without days) choose; without them the run's test days count, or its share of test
rows of the same log, or all rows where it has neither; standard error says which. Metrics go to
standard output as JSON, a summary and everything else to standard error.
Runs alone or under torchrun, at any world size.

Exit codes: as trainer.train.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.ranking import Predictions
from trainer.build import build_training, open_loader
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import MANIFEST, RUN, read_manifest
from trainer.checkpoint.storage import Folder
from trainer.config.config import TrainConfig, config_from_dict
from trainer.data.files import LogFile, check_families, days_of
from trainer.data.loader import Loader
from trainer.data.splits import days_within, describe_days, parse_days, parse_rows
from trainer.distributed.parallelize import ParallelConfig
from trainer.distributed.train_pipeline import Pipeline
from trainer.evaluation.slices import Slices
from trainer.metrics.depth import LabelDepths
from trainer.metrics.metrics import Metrics, undefined
from trainer.runtime.atomic_files import json_ready
from trainer.runtime.exit_codes import exit_code
from trainer.runtime.memory import check_tables
from trainer.runtime.runtime import Runtime, start
from trainer.telemetry.summary_lines import evaluated_lines
from trainer.warm_start.policies import resolve


def evaluate(
    pipeline: Pipeline,
    loader: Loader,
    config: TrainConfig,
    keep: Callable[[Predictions], object] | None = None,
    depth: LabelDepths | None = None,
) -> dict[str, Any]:
    """Predict every row of `loader` once and return metrics over all ranks. Collective.

    keep: is given every batch's predictions, of which the first `num_examples` are no padding.
    depth: is given all rows, and finds its `values`.
    """
    metrics = Metrics(
        [label.name for label in config.schema.labels], grouped=bool(config.schema.user)
    )
    module = pipeline.parallel.module
    was_training = module.training
    module.eval()
    batches = iter(loader)
    try:
        with torch.no_grad():
            for predictions in _predict(pipeline, batches):
                rows = real_rows(predictions)
                metrics.update(*rows)
                if depth is not None:
                    depth.update(*rows)
                if keep is not None:
                    keep(predictions)
            found = metrics.compute()
            if depth is not None:
                depth.finish(metrics, found)
            return found
    finally:
        module.train(was_training)


def real_rows(predictions: Predictions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return probabilities, labels, weights and groups of the rows that are no padding."""
    rows = predictions.num_examples
    return (
        predictions.probabilities[:rows],
        predictions.labels[:rows],
        predictions.weights[:rows],
        predictions.groups[:rows],
    )


def _predict(pipeline: Pipeline, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield predictions until no batch is left."""
    while True:
        try:
            yield pipeline.progress(batches)
        except StopIteration:
            return


def choose_rows(config: TrainConfig, data: str, days: str) -> tuple[str, str, str]:
    """Return the days and the share of rows of `data` to evaluate, and a note on them, or none.

    days: as asked for; empty: the run's own test rows where `data` has such, else all.
    """
    own = config.data
    same = os.path.realpath(own.path) == os.path.realpath(data)
    if days:
        asked, trained = parse_days(days, "--days"), parse_days(own.train_days)
        shared = days_within(days_of(data), asked, trained) if same and trained else ()
        note = f"the model was trained on {describe_days(shared)}, so the metrics flatter it there"
        return days, "", note if shared else ""
    log_days = [day for day in days_of(data) if day]
    if own.test_days and log_days:
        return own.test_days, "", f"no --days, so the run's test days count: {own.test_days}"
    if own.test_rows and not own.test_path and same:
        return "", own.test_rows, f"the run's test rows of {data} count: {own.test_rows}"
    trained_on = own.train_days or f"rows {own.train_rows or '0:1'}"
    extent = f" ({describe_days(log_days)})" if log_days else ""
    return (
        *("", ""),
        f"no --days, so all rows of {data} count{extent}; the model was trained on {trained_on} of "
        f"{own.path}",
    )


class Opened(NamedTuple):
    """A checkpoint's model on this rank, and the rows of a log that it is to predict."""

    pipeline: Pipeline
    loader: Loader
    config: TrainConfig
    step: int


def read_config(path: Folder) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the configuration of the checkpoint at `path`, and its manifest.

    Raises:
        ValueError: no checkpoint there, or one of another version.
    """
    manifest = read_manifest(path, RUN)
    try:
        return config_from_dict(manifest["config"]), manifest
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST}: {error}; use the version that wrote it") from error


def open_checkpoint(path: Folder, data: str, chosen: tuple[str, str], runtime: Runtime) -> Opened:
    """Load the model of a checkpoint and open the rows of `data`. Collective.

    chosen: the days and the share of rows, as `choose_rows` returns them.

    Raises:
        ValueError: no checkpoint there, or data that does not fit its schema.
    """
    config, manifest = read_config(path)
    log = dataclasses.replace(
        config.data, path=data, test_path="", test_days=chosen[0], test_rows=chosen[1], schema=""
    )
    # Without optimizer states and gradients there is nothing to spread.
    sharding = ParallelConfig(sharding=config.parallel.sharding)
    config = dataclasses.replace(config, data=log, parallel=sharding)
    loader = open_loader(config, runtime, train=False)
    trained = LogFile(
        path="the training log", row_group_rows=(), families=tuple(manifest["families"].items())
    )
    check_families((trained, *loader.files))
    check_tables(config.schema.tables, config.sparse, runtime)
    training = build_training(config, runtime)
    parallel = training.parallel
    tensors: dict[str, Any] = {"model": parallel.module.state_dict()}
    dcp.load(tensors, path)
    parallel.module.load_state_dict(tensors["model"])
    return Opened(training.pipeline, loader, config, manifest["step"])


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What an evaluation says beside the metrics.

    deep: intervals, reliability and users by activity, of every label (`depth.py`). replicates: of
    the bootstrap. slice_by: columns, or `day` (`slices.py`).
    """

    deep: bool = False
    replicates: int = 100
    slice_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the number of replicates."""
        if self.replicates < 2:
            raise ValueError(f"--replicates: expected at least 2, got {self.replicates}")


def evaluate_checkpoint(
    path: Folder,
    data: str,
    days: str,
    runtime: Runtime,
    rows: str = "",
    detail: Detail | None = None,
) -> dict[str, Any]:
    """Return the metrics of a checkpoint's model on the rows of `data`. Collective.

    days, rows: as asked for; both empty: as `choose_rows` chooses.

    Raises:
        ValueError: as `open_checkpoint`.
    """
    note = ""
    if not rows:
        days, rows, note = choose_rows(read_config(path)[0], data, days)
    if note and runtime.is_first:
        print(f"note: {note}", file=sys.stderr, flush=True)
    opened = open_checkpoint(path, data, (days, rows), runtime)
    detail = detail or Detail()
    labels = [label.name for label in opened.config.schema.labels]
    depth = LabelDepths(labels, detail.replicates) if detail.deep else None
    slices = [
        Slices(column, opened.config, opened.loader.files, runtime) for column in detail.slice_by
    ]

    def keep(predictions: Predictions) -> None:
        for one in slices:
            one.update(*real_rows(predictions))

    metrics = evaluate(opened.pipeline, opened.loader, opened.config, keep, depth)
    found = dict(depth.values) if depth is not None else {}
    if slices:
        found["slices"] = {one.column: one.compute() for one in slices}
    opened.loader.close()
    if runtime.is_first:
        for line in undefined(metrics, labels):
            print(f"note: {line}", file=sys.stderr, flush=True)
    return {**metrics, **found, "world_size": runtime.world_size, "step": opened.step}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.evaluate",
        description="Evaluate a checkpoint; JSON on stdout, a summary on stderr.",
    )
    parser.add_argument("checkpoint", help="a folder step-N, or a run's folder; a URL, too")
    parser.add_argument("--data", required=True, help="the log's folder or file")
    parser.add_argument(
        "--days",
        default="",
        help="FIRST:LAST or DAY; default: the run's test days; all rows of a log without days",
    )
    parser.add_argument("--rows", default="", help="FROM:TO, shares of the rows: 0.8:1")
    deep = "add intervals, a reliability diagram and GAUC by users' activity"
    parser.add_argument("--deep", action="store_true", help=deep)
    replicates = "of the intervals' bootstrap (default: 100)"
    parser.add_argument("--replicates", type=int, default=100, help=replicates)
    by = "add metrics by a column's values, or by `day`; may be repeated"
    parser.add_argument("--slice-by", metavar="COLUMN", action="append", default=[], help=by)
    options = parser.parse_args(arguments)

    def work() -> None:
        parse_rows(options.rows, "--rows")
        detail = Detail(
            deep=options.deep, replicates=options.replicates, slice_by=tuple(options.slice_by)
        )
        path = resolve(options.checkpoint)
        runtime = start()
        data, days = options.data, options.days
        metrics = evaluate_checkpoint(path, data, days, runtime, options.rows, detail)
        if runtime.is_first:
            print(json.dumps(json_ready(metrics)), flush=True)
            lines = evaluated_lines(options.checkpoint, metrics)
            print(*lines, sep="\n", file=sys.stderr, flush=True)
        runtime.stop()

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Evaluation of a model: choose the rows, open the checkpoint, predict, compute metrics.

Training evaluates its model by `evaluate`; the commands `trainer.evaluate` and `trainer.compare`
open a checkpoint first.

Shapes: B examples per rank, K labels.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.ranking import Predictions
from trainer.build import Training, build_training, open_loader
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import MANIFEST, RUN, read_manifest
from trainer.checkpoint.storage import Folder
from trainer.config.config import TrainConfig, config_from_dict
from trainer.data.files import LogFile, check_families, days_of
from trainer.data.loader import Loader, LoaderConfig
from trainer.data.splits import days_within, describe_days, parse_days
from trainer.distributed.parallelize import ParallelConfig
from trainer.distributed.train_pipeline import Pipeline
from trainer.evaluation.slices import Slices
from trainer.metrics.details import Details
from trainer.metrics.metrics import Metrics, undefined
from trainer.metrics.validity import ADVICE, all_doubts
from trainer.runtime.memory import check_tables
from trainer.runtime.printable import printable
from trainer.runtime.runtime import RunError, Runtime


def evaluate(
    pipeline: Pipeline,
    loader: Loader,
    config: TrainConfig,
    keep: Callable[[Predictions], object] | None = None,
    details: Details | None = None,
) -> dict[str, Any]:
    """Predict every row of `loader` once and return metrics over all ranks. Collective.

    Args:
        pipeline: Of the model.
        loader: Of the test rows.
        config: Of the run.
        keep: Is given every batch's predictions, of which the first `num_examples` are no padding.
        details: Is given all rows, and finds its `values`.
    """
    metrics = Metrics(
        [label.name for label in config.schema.labels], grouped=bool(config.schema.user)
    )
    after = AfterClick(config)
    if details is not None:
        details.begin(metrics)
    module = pipeline.parallel.module
    was_training = module.training
    module.eval()
    batches = iter(loader)
    try:
        with torch.no_grad():
            for predictions in _predict(pipeline, batches):
                rows = real_rows(predictions)
                metrics.update(*rows)
                after.update(*rows)
                if details is not None:
                    details.update(*rows)
                if keep is not None:
                    keep(predictions)
            found = metrics.compute()
            if details is not None:
                details.finish(found)
            return found | after.compute()
    finally:
        module.train(was_training)


class AfterClick:
    """Metrics of a conversion among the clicked rows, where the head predicts it as a product.

    With ESMM the second label's own metrics are those of click and conversion over all rows. These
    are of the conversion after a click, pCTCVR / pCTR, over the rows whose first label is 1. Their
    keys are `SECOND_after_FIRST_METRIC`.

    Args:
        config: of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        labels = [label.name for label in config.schema.labels]
        self._metrics = None
        if config.model.head.kind == "esmm":
            self._name = f"{labels[1]}_after_{labels[0]}"
            self._metrics = Metrics([self._name], grouped=bool(config.schema.user))

    def update(self, scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Add a batch: scores, labels and weights (B, 2), groups (B,)."""
        if self._metrics is None:
            return
        clicked = (labels[:, 0] > 0) & (weights[:, 0] > 0)
        # A click of probability 0 has no conversion after it that could be told.
        rates = (scores[:, 1] / scores[:, 0].clamp(min=torch.finfo(torch.float32).tiny)).clamp(
            max=1
        )
        rows = (rates[:, None], labels[:, 1:], torch.where(clicked, weights[:, 1], 0.0)[:, None])
        self._metrics.update(*rows, groups)

    def compute(self) -> dict[str, float]:
        """Return the metrics over all ranks; empty for other heads. Collective."""
        if self._metrics is None:
            return {}
        found = self._metrics.compute_labels()[0]
        return {f"{self._name}_{key}": value for key, value in found.items()}


def real_rows(predictions: Predictions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return probabilities, labels, weights and groups of the rows that are no padding."""
    rows = predictions.num_examples
    return (
        predictions.probabilities[:rows],
        predictions.labels[:rows],
        predictions.weights[:rows],
        predictions.groups[:rows],
    )


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Check that every row of an evaluation got a finite prediction.

    Raises:
        RunError: one did not.
    """
    if metrics["nonfinite_predictions"]:
        bad = f"{metrics['nonfinite_predictions']:,.0f} of {metrics['rows']:,.0f}"
        raise RunError(
            f"evaluation: {bad} rows got no finite prediction: training diverged; lower "
            "dense.learning_rate or sparse.learning_rate, or set precision.max_norm"
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

    Args:
        config: Of the run.
        data: The log.
        days: The requested days. Empty: the run's own test rows where `data` has such, else all.
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


def open_checkpoint(
    path: Folder,
    data: str,
    chosen: tuple[str, str],
    runtime: Runtime,
    reading: LoaderConfig | None = None,
) -> Opened:
    """Load the model of a checkpoint and open the rows of `data`. Collective.

    Args:
        path: The checkpoint.
        data: The log.
        chosen: The days and the share of rows, as `choose_rows` returns them.
        runtime: This process among the others.
        reading: Settings of the loader in place of the checkpoint's own: the order of the rows on a
            rank depends on them.

    Raises:
        ValueError: no checkpoint there, or data that does not fit its schema.
    """
    config, manifest = read_config(path)
    log = dataclasses.replace(
        config.data, path=data, test_path="", test_days=chosen[0], test_rows=chosen[1], schema=""
    )
    # Without optimizer states and gradients there is nothing to spread.
    sharding = ParallelConfig(sharding=config.parallel.sharding)
    config = dataclasses.replace(
        config, data=log, parallel=sharding, loader=reading or config.loader
    )
    loader = open_loader(config, runtime, train=False)
    trained = LogFile(
        path="the training log", row_group_rows=(), families=tuple(manifest["families"].items())
    )
    check_families((trained, *loader.files))
    return Opened(load_model(path, config, runtime).pipeline, loader, config, manifest["step"])


def load_model(path: Folder, config: TrainConfig, runtime: Runtime) -> Training:
    """Return the model of a checkpoint, its tables sharded over the ranks. Collective.

    Raises:
        ValueError: it does not hold what `config` names, or is damaged.
    """
    check_tables(config.schema.tables, config.sparse, runtime)
    training = build_training(config, runtime)
    module = training.parallel.module
    tensors: dict[str, Any] = {"model": module.state_dict()}
    dcp.load(tensors, path, runtime=runtime)
    module.load_state_dict(tensors["model"])
    return training


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What an evaluation reports beside the metrics.

    Args:
        deep: Whether to find intervals, reliability and users by activity, of every label.
        replicates: Of the bootstrap.
        slice_by: Columns, or `day` (`slices.py`).
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

    Args:
        path: The checkpoint.
        data: The log.
        days: The requested days.
        runtime: This process among the others.
        rows: The requested share of rows. If days and rows are empty, `choose_rows` chooses.
        detail: What to report beside the metrics.

    Raises:
        ValueError: as `open_checkpoint`.
    """
    note = ""
    if not rows:
        days, rows, note = choose_rows(read_config(path)[0], data, days)
    if note and runtime.is_first:
        print(f"note: {printable(note)}", file=sys.stderr, flush=True)
    opened = open_checkpoint(path, data, (days, rows), runtime)
    detail = detail or Detail()
    labels = [label.name for label in opened.config.schema.labels]
    details = Details(detail.replicates) if detail.deep else None
    slices = [
        Slices(column, opened.config, opened.loader.files, runtime) for column in detail.slice_by
    ]

    def keep(predictions: Predictions) -> None:
        for one in slices:
            one.update(*real_rows(predictions))

    metrics = evaluate(opened.pipeline, opened.loader, opened.config, keep, details)
    found = dict(details.values) if details is not None else {}
    if slices:
        found["slices"] = {one.column: one.compute() for one in slices}
    opened.loader.close()
    if runtime.is_first:
        for line in undefined(metrics, labels):
            print(f"note: {line}", file=sys.stderr, flush=True)
    doubtful = all_doubts(metrics, found)
    if runtime.is_first:
        for name, text in doubtful.items():
            print(f"ALERT {name}: {text}. {ADVICE[name]}", file=sys.stderr, flush=True)
    found["alerts"] = sorted(doubtful)
    return {**metrics, **found, "world_size": runtime.world_size, "step": opened.step}

# SPDX-License-Identifier: MIT
"""Scores of a log: Parquet in, Parquet out, day by day, on any number of ranks.

  OUTPUT/scores.json            what was scored by what
  OUTPUT/dt=DATE/part-R.parquet the rows that rank R scored of a day, in the log's order

A day's folder is complete or absent: ranks write beside it, and one rename puts it in its place.
The same command goes on with the days that are missing. Rows of a log without days are one folder,
`rows`. Tables are sharded over the ranks as in training, so a model that needs several ranks to
train is scored on several. Memory holds a loader's window and one row group of the output.

Shapes: B examples, K tasks, D width of a vector.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.ranking import Predictions
from trainer.build import Training, open_loader
from trainer.checkpoint.storage import Folder, address
from trainer.config.config import TrainConfig
from trainer.data.files import LogFile, check_families, days_of, discover, fingerprint_of
from trainer.data.loader import Loader
from trainer.data.splits import days_within, parse_days
from trainer.distributed.parallelize import ParallelConfig
from trainer.evaluation.evaluate import load_model, read_config
from trainer.runtime.atomic_files import read_json, sync_folder, write_json
from trainer.runtime.dict_diff import differences
from trainer.runtime.printable import printable
from trainer.runtime.runtime import Runtime
from trainer.serving.model import model_version, representation_of, side_columns
from trainer.serving.scored_files import ScoredFile, default_columns, scored_rows
from trainer.serving.scorer import check_vectors
from trainer.telemetry.console import Console

NOTE = "scores.json"
_WITHOUT_DAY = "rows"


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """What to score.

    Args:
        data: the log's folder or file; labels may be missing.
        output: the folder of the scores.
        days: FIRST:LAST or DAY; empty for all.
        columns: passed through; None for those of single ids.
        vectors: to write beside the probabilities (`scorer.VECTORS`).
        batch_size: rows per rank and step; 0 for the run's.
    """

    data: str
    output: Path
    days: str = ""
    columns: tuple[str, ...] | None = None
    vectors: tuple[str, ...] = ()
    batch_size: int = 0


def score(
    path: Folder, request: ScoreRequest, runtime: Runtime, console: Console
) -> dict[str, Any]:
    """Score the days of a log that are not scored yet. Collective.

    Args:
        path: the checkpoint.
        request: which rows, and what to write.
        runtime: this process among the ranks.
        console: shows progress on rank 0.

    Returns:
        Rows and days that were scored, days that were there already and how many of them were
        scored from other rows than the log has now, the model's version.

    Raises:
        ValueError: no checkpoint, a log that does not fit it, or an output of something else.
    """
    config, manifest = read_config(path)
    check_vectors(request.vectors, config)
    config = _config(config, request)
    wanted = parse_days(request.days, "--days")
    days = [*days_within(days_of(request.data), wanted)] if wanted else days_of(request.data)
    if wanted and not days:
        open_loader(_of_day(config, request.days), runtime, train=False)  # says which there are
    if "" in days:  # files outside of any day: one log without days
        days = [""]
    trained = LogFile(
        path="the training log", row_group_rows=(), families=tuple(manifest["families"].items())
    )
    version = model_version(manifest)
    _claim(request, config, version, address(path), runtime)
    left = [day for day in days if not _on_first(runtime, _folder(request.output, day).is_dir())]
    found = {"model": version, "rows": 0, "days": 0, "there": len(days) - len(left)}
    changed = _changed(config, request, [day for day in days if day not in left], runtime)
    found["changed"] = changed
    if not left:
        return found
    training = load_model(path, config, runtime)
    for day in left:
        loader = open_loader(_of_day(config, day), runtime, train=False)
        check_families((trained, *loader.files))
        job = _Day(day, request, config, version, runtime)
        job.write(training, loader, console)
        loader.close()
        found["rows"] += loader.num_rows
        found["days"] += 1
    return found


def _config(config: TrainConfig, request: ScoreRequest) -> TrainConfig:
    """Return the configuration by which rows are read and the model is built."""
    loader = config.loader
    if request.batch_size:
        loader = dataclasses.replace(loader, batch_size=request.batch_size, global_batch_size=0)
    log = dataclasses.replace(
        config.data, path=request.data, test_path="", test_days="", test_rows="", schema=""
    )
    return dataclasses.replace(
        config,
        schema=config.schema.without_labels(),
        data=log,
        parallel=ParallelConfig(sharding=config.parallel.sharding),
        loader=loader,
    )


def _of_day(config: TrainConfig, days: str) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, test_days=days))


def _folder(output: Path, day: str) -> Path:
    return output / (f"dt={day}" if day else _WITHOUT_DAY)


def _changed(
    config: TrainConfig, request: ScoreRequest, days: Sequence[str], runtime: Runtime
) -> int:
    """Say which scored days the log now has other rows of, and return how many. Collective."""
    changed = []
    for day in days if runtime.is_first else ():
        folder = _folder(request.output, day)
        try:
            files = discover(request.data, parse_days(day), config.schema)
            same = scored_rows(folder) == fingerprint_of(files)
        except (OSError, ValueError):
            same = False
        if not same:
            changed.append(folder.name)
    if changed:
        print(
            f"note: {request.output}: scored from other rows than the log has now: "
            f"{', '.join(changed[:5])}{', ...' if len(changed) > 5 else ''}; remove these folders "
            "to score them again",
            file=sys.stderr,
            flush=True,
        )
    return _on_first(runtime, len(changed))


def _on_first(runtime: Runtime, value: Any) -> Any:
    """Return rank 0's value on all ranks. Collective."""
    answer = [value]
    dist.broadcast_object_list(answer, group=runtime.patient, group_src=0)
    return answer[0]


def _claim(
    request: ScoreRequest, config: TrainConfig, version: str, path: str, runtime: Runtime
) -> None:
    """Note what is scored by what, or check that the folder holds scores of the same. Collective.

    Raises:
        ValueError: it holds something else, raised on all ranks.
    """
    columns = request.columns
    note = {
        "model": version,
        "tasks": [label.name for label in config.schema.labels],
        "columns": None if columns is None else list(columns),
        "embeddings": list(request.vectors),
    }
    problem = ""
    if runtime.is_first:
        problem = _refusal(request.output, note)
        if not problem:
            request.output.mkdir(parents=True, exist_ok=True)
            write_json(request.output / NOTE, {**note, "checkpoint": printable(path)})
    problem = _on_first(runtime, problem)
    if problem:
        raise ValueError(problem)


def _refusal(output: Path, note: dict[str, Any]) -> str:
    """Return why scores cannot be written into `output`; empty if they can."""
    place, way_out = output / NOTE, "choose another --output, or remove the folder"
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return ""
    if not place.is_file():
        return f"{output}: expected a new or empty folder or scores, got something else; {way_out}"
    try:
        before = read_json(place)
        before.pop("checkpoint", None)
    except (OSError, ValueError, AttributeError) as error:
        return f"{place}: damaged ({error}); {way_out}"
    changed = [
        f"{one.path}: {one.old!r:.80}, now {one.new!r:.80}" for one in differences(before, note)
    ]
    if not changed:
        return ""
    return f"{output}: holds scores of another request ({'; '.join(changed)}); {way_out}"


class _Day:
    """The scores of one day on this rank."""

    def __init__(
        self, day: str, request: ScoreRequest, config: TrainConfig, version: str, runtime: Runtime
    ) -> None:
        self._runtime, self._request, self._config = runtime, request, config
        self._target = _folder(request.output, day)
        self._draft = request.output / f".{self._target.name}.partial"
        self._version = version

    def write(self, training: Training, loader: Loader, console: Console) -> None:
        """Score the rows of `loader` and put the day in its place. Collective."""
        runtime, request = self._runtime, self._request
        if runtime.is_first:
            shutil.rmtree(self._draft, ignore_errors=True)
            self._draft.mkdir()
        dist.barrier(group=runtime.patient)
        begun = time.perf_counter()
        columns = request.columns
        if columns is None:
            columns = default_columns(self._config.schema, loader.files)
        console.start(0, len(loader))
        with (
            ScoredFile(
                self._draft / f"part-{runtime.rank:05d}.parquet",
                loader,
                columns,
                [label.name for label in self._config.schema.labels],
                self._version,
            ) as file,
            captured(training, request.vectors, self._config) as vectors,
        ):
            for step, predictions in enumerate(_predict(training, loader), 1):
                rows = predictions.num_examples
                found = {name: one[:rows].cpu().numpy() for name, one in vectors().items()}
                file.add(predictions.probabilities[:rows].float().cpu().numpy(), found)
                console.step(step)
        dist.barrier(group=runtime.patient)
        if runtime.is_first:
            sync_folder(self._draft)
            self._draft.rename(self._target)
            sync_folder(self._target.parent)
            seconds = time.perf_counter() - begun
            name, rows = self._target.name, loader.num_rows
            console.say(f"{name}: {rows:,} rows scored, {rows / seconds:,.0f} rows/s")
        dist.barrier(group=runtime.patient)


def _predict(training: Training, loader: Loader) -> Iterator[Predictions]:
    """Yield the predictions of every batch. Collective."""
    training.parallel.module.eval()
    batches = iter(loader)
    with torch.no_grad():
        while True:
            try:
                yield training.pipeline.progress(batches)
            except StopIteration:
                return


@contextmanager
def captured(training: Training, names: Sequence[str], config: TrainConfig) -> Iterator[Any]:
    """Give a function that returns the vectors of the latest batch, (B, D) by name."""
    model, held, handles = training.parallel.model, dict[str, torch.Tensor](), []
    sides = side_columns(config)

    def keep_representation(_: Any, __: Any, outputs: Any) -> None:
        held["representation"] = representation_of(outputs)

    def keep_pooled(_: Any, inputs: Any, __: Any) -> None:
        pooled = inputs[0].pooled.detach().float()
        for name in set(names) - {"representation"}:
            held[name] = pooled[:, torch.tensor(sides[name], device=pooled.device)]

    if "representation" in names:
        handles.append(model.get_submodule("tower").register_forward_hook(keep_representation))
    if set(names) - {"representation"}:
        handles.append(model.get_submodule("tokenizer").register_forward_hook(keep_pooled))
    try:
        yield lambda: {name: held[name] for name in names}
    finally:
        for handle in handles:
            handle.remove()

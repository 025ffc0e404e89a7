# SPDX-License-Identifier: MIT
"""Predictions of test days in a run's folder: written by its ranks, read in the log's order.

`predictions/DAY/` has one Parquet file of each rank, whose rows follow each other as in the log,
and `day.json`, which is written last: without it the day is incomplete.

Shapes: B rows, K labels.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from models.ranking import Predictions
from trainer.evaluation.evaluate import real_rows
from trainer.metrics.metrics import communication_device
from trainer.runtime.atomic_files import open_atomic, read_json, write_json
from trainer.runtime.printable import printable
from trainer.runtime.runtime import Runtime

FOLDER = "predictions"
_DAY = "day.json"
_CHUNK_ROWS = 65_536
_MAX_RANKS = 100_000
_MAX_LABELS = 1_000
_MAX_DAYS = 10_000
# Values of a row and label, each a column `PART:LABEL` of float32.
_PARTS = ("score", "label", "weight")


class Rows(NamedTuple):
    """Predicted rows: scores, labels and weights (B, K) float32, users (B,) int64."""

    scores: Tensor
    labels: Tensor
    weights: Tensor
    users: Tensor


class Day(NamedTuple):
    """What a complete day holds beside its rows."""

    name: str
    folder: Path
    labels: tuple[str, ...]
    metrics: dict[str, Any]
    num_ranks: int


class DayWriter:
    """Collects a rank's predictions of one day, then writes them. 4 bytes a value in memory.

    Args:
        folder: of the run.
        day: the day.
        labels: the labels' names.
        runtime: this process among the ranks.
    """

    def __init__(self, folder: Path, day: str, labels: Sequence[str], runtime: Runtime) -> None:
        self._folder, self._day = folder / FOLDER / day, day
        self._labels, self._runtime = tuple(labels), runtime
        self._parts: list[Rows] = []

    def keep(self, predictions: Predictions) -> None:
        """Take a batch; padding is left out."""
        scores, labels, weights, users = (one.detach().cpu() for one in real_rows(predictions))
        self._parts.append(Rows(scores.float(), labels.float(), weights.float(), users.clone()))

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write the rows, and `metrics` of them as the day's. Collective."""
        world, rank = self._runtime.world_size, self._runtime.rank
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / _file_name(rank, world)
        if self._runtime.is_first:
            (self._folder / _DAY).unlink(missing_ok=True)
        _barrier(self._runtime)
        with open_atomic(path) as file:
            pq.write_table(self._table(), file, compression="zstd", row_group_size=_CHUNK_ROWS)
        self._parts = []
        _barrier(self._runtime)
        if self._runtime.is_first:
            own = {_file_name(one, world) for one in range(world)}
            for other in self._folder.glob("rank-*.parquet"):  # of another number of ranks
                if other.name not in own:
                    other.unlink()
            found = {"day": self._day, "labels": list(self._labels), "ranks": world}
            write_json(self._folder / _DAY, {**found, "metrics": metrics})
        _barrier(self._runtime)

    def _table(self) -> pa.Table:
        columns: dict[str, NDArray] = {}
        for part in _PARTS:
            every = [getattr(one, part + "s").numpy() for one in self._parts]
            # (rows, K)
            whole = np.concatenate([np.empty((0, len(self._labels)), np.float32), *every])
            columns |= {f"{part}:{name}": whole[:, k] for k, name in enumerate(self._labels)}
        users = [one.users.numpy() for one in self._parts]
        columns["user"] = np.concatenate([np.empty(0, np.int64), *users])
        return pa.table(columns)


def read_days(folder: Path) -> list[Day]:
    """Return the complete days that the run in `folder` has predicted, in order.

    Raises:
        ValueError: day.json is damaged.
    """
    found = []
    place = folder / FOLDER
    names = []
    if place.is_dir():
        with os.scandir(place) as entries:
            names = [one.name for one in entries if re.fullmatch(r"\d{4}-\d{2}-\d{2}", one.name)]
    if len(names) > _MAX_DAYS:
        raise ValueError(f"{printable(str(place))}: expected at most {_MAX_DAYS:,} days")
    for name in sorted(names):
        path = place / name / _DAY
        if not path.exists():
            continue
        said = read_json(path, follow=False)
        good = isinstance(said, dict) and isinstance(said.get("metrics"), dict)
        labels, ranks = (said.get("labels"), said.get("ranks")) if good else (None, None)
        if not (
            isinstance(labels, list)
            and 0 < len(labels) <= _MAX_LABELS
            and all(isinstance(one, str) for one in labels)
            and type(ranks) is int
            and 0 < ranks <= _MAX_RANKS
        ):
            raise ValueError(
                f"{printable(str(path))}: expected an object with labels, ranks and metrics; the "
                "file is damaged, evaluate the run again"
            )
        found.append(Day(name, place / name, tuple(labels), said["metrics"], ranks))
    return found


def read_rows(day: Day) -> Iterator[Rows]:
    """Yield the rows of a day in the log's order, in parts of 65,536 but the last.

    Raises:
        ValueError: a file is missing, damaged, or not a plain file.
    """
    rest: list[Rows] = []
    held = 0
    for rank in range(day.num_ranks):
        for part in _read_file(day.folder / _file_name(rank, day.num_ranks), day.labels):
            rest.append(part)
            held += len(part.users)
            while held >= _CHUNK_ROWS:
                whole = _joined(rest)
                yield Rows(*(one[:_CHUNK_ROWS] for one in whole))
                rest = [Rows(*(one[_CHUNK_ROWS:] for one in whole))]
                held -= _CHUNK_ROWS
    if held:
        yield _joined(rest)


def equal_parts(
    parts: Iterator[tuple[Any, ...]], empty: tuple[Any, ...], runtime: Runtime
) -> Iterator[tuple[Any, ...]]:
    """Yield a rank's parts, then `empty` as often as the rank with most parts needs. Collective.

    Reductions of what is streamed expect as many calls of every rank.
    """
    while True:
        part = next(parts, None)
        more = torch.tensor(int(part is not None))
        device = communication_device(runtime.group)
        if device is not None:
            more = more.to(device)
            dist.all_reduce(more, op=dist.ReduceOp.MAX, group=runtime.group)
        if not more:
            return
        yield empty if part is None else part


def no_rows(num_labels: int) -> Rows:
    """Return no rows of `num_labels` labels."""
    none = torch.empty(0, num_labels)
    return Rows(none, none, none, torch.empty(0, dtype=torch.int64))


def _read_file(path: Path, labels: Sequence[str]) -> Iterator[Rows]:
    """Yield a file's rows."""
    shown = printable(str(path))
    names = [f"{part}:{label}" for part in _PARTS for label in labels]
    try:
        # Neither a link nor a pipe that a stranger has put there.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as raw:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ValueError("expected a plain file")
            file = pq.ParquetFile(raw)
            expected = [*((name, pa.float32()) for name in names), ("user", pa.int64())]
            if list(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True)) != expected:
                raise ValueError(f"expected the columns {[one for one, _ in expected]}")
            for batch in file.iter_batches(batch_size=_CHUNK_ROWS):
                if any(column.null_count for column in batch.columns):
                    raise ValueError("expected no nulls")
                *values, users = (column.to_numpy() for column in batch.columns)
                # (K, rows) each -> (rows, K)
                scores, targets, weights = (
                    torch.from_numpy(np.ascontiguousarray(one.T))
                    for one in np.split(np.stack(values), len(_PARTS))
                )
                for part, one in zip(_PARTS, (scores, targets, weights), strict=True):
                    # A score that is not finite is one that the model did not give.
                    high = torch.inf if part == "weight" else 1.0
                    known = ~one.isfinite() if part == "score" else torch.zeros_like(one).bool()
                    if not bool((known | (one.isfinite() & (one >= 0) & (one <= high))).all()):
                        raise ValueError(f"a {part} is out of its range")
                yield Rows(scores, targets, weights, torch.from_numpy(users.copy()))
    except (OSError, pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"{shown}: cannot be read as predictions ({printable(str(error))}); evaluate the run "
            "again"
        ) from error


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(torch.cat(list(one)) for one in zip(*parts, strict=True)))


def _file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.parquet"


def _barrier(runtime: Runtime) -> None:
    if runtime.world_size > 1:
        dist.barrier(group=runtime.group)

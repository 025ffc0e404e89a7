# SPDX-License-Identifier: MIT
"""Metrics by the value of any column of the log, whether the schema reads it or not, and by day.

The column is read beside the test rows by a loader of its own, which has the same rows in the same
order: the model is given nothing more. First one rank counts the column's values: the most frequent
ones become slices and the others one more; numbers that are not ids are cut into bins of about
equal rows. Memory: a slice's metrics, whose bins are fewer than those of the whole (`max_bins`).

Shapes: B examples, V values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from embeddings.schema.features import Transform
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import DenseFeature, Schema, SparseFeature, Table
from trainer.build import open_loader
from trainer.config.config import TrainConfig
from trainer.data.columns import Values
from trainer.data.files import LogFile, RowInterval
from trainer.data.loader import Loader
from trainer.data.order import EpochOrder, Leg
from trainer.data.reader import LogReader
from trainer.data.transforms import to_days
from trainer.evaluation.slicing import DAY, Slicing, find_days, find_slices, has_column
from trainer.metrics.metrics import Metrics
from trainer.metrics.spec import METRICS
from trainer.runtime.runtime import Runtime

Found = TypeVar("Found")
_MAX_BINS = 2**16
_MAX_USER_ROWS = 1_000_000
# Of `spec.CONTEXT`, what a slice shows beside the metrics.
_CONTEXT = (
    *("rows", "weight", "positive_rows", "auc_standard_error"),
    *("gauc_users", "prediction_mean", "label_mean"),
)


class SliceCodes:
    """Which slice each test row is in, in the rows' order: `of` with every batch. Collective.

    Days come from the folders dt=YYYY-MM-DD, else from a column of that name, else from the
    schema's time.

    Attributes:
        names: Of the slices, in order.
    """

    def __init__(self, column: str, config: TrainConfig, files: Sequence[LogFile], at: Runtime):
        self.column = column
        self.names: tuple[str, ...]
        self._loader: Loader | None = None
        dated = any(file.day for file in files)
        if column == DAY and dated:
            self.names, self._codes = _days(files, config, at)
        elif column == DAY and config.schema.timestamp and not has_column(DAY, files):
            self.names, self._codes = _times(files, config, at)
        else:
            slicing = _agree(lambda: find_slices(column, files, config.schema), at)
            self.names = slicing.names
            side = dataclasses.replace(
                config,
                schema=_side_schema(slicing, config.schema),
                loader=dataclasses.replace(config.loader, num_workers=0),
            )
            self._loader = open_loader(side, at, train=False)
            self._codes = _of_loader(self._loader, slicing)

    def of(self, rows: int) -> NDArray[np.int64]:
        """Return the slices, as positions in `names`, of the next batch's `rows` rows."""
        return self._codes.send(rows)

    def close(self) -> None:
        """Close the files."""
        if self._loader is not None:
            self._loader.close()


class Slices:
    """Metrics of one column's slices: `update` with every batch, `compute` once. Collective."""

    def __init__(self, column: str, config: TrainConfig, files: Sequence[LogFile], at: Runtime):
        self.column = column
        self._labels = [label.name for label in config.schema.labels]
        self._grouped = bool(config.schema.user)
        self._codes = SliceCodes(column, config, files, at)
        self._metrics = {name: self._new() for name in self._codes.names}

    def update(self, *rows: Tensor) -> None:
        """Add the next batch: probabilities, labels, weights (B, K) and groups (B,)."""
        codes = self._codes.of(len(rows[0]))
        for code in np.unique(codes):
            chosen = np.flatnonzero(codes == code)
            metrics = self._metrics[self._codes.names[code]]
            metrics.update(*(one.cpu()[chosen] for one in rows))

    def compute(self) -> list[dict[str, Any]]:
        """Return the metrics of the slices that have rows, in order. Collective.

        With several labels each has its own as well (`<label>_auc`).
        """
        names = reported(self._labels)
        found = []
        for name, metrics in self._metrics.items():
            values = metrics.compute()
            if values["rows"]:
                kept = {key: values[key] for key in names if key in values}
                found.append({"slice": name, **kept})
        self._codes.close()
        return found

    def _new(self) -> Metrics:
        return Metrics(
            self._labels, max_user_rows=_MAX_USER_ROWS, max_bins=_MAX_BINS, grouped=self._grouped
        )


def reported(labels: Sequence[str]) -> list[str]:
    """Return the keys of a slice's metrics; of several labels each has its own as well."""
    prefixes = ["", *(f"{name}_" for name in labels if len(labels) > 1)]
    return [f"{prefix}{key}" for prefix in prefixes for key in (*METRICS, *_CONTEXT)]


def _primed(codes: Iterator[Any]) -> Any:
    next(codes)
    return codes


def _of_loader(loader: Loader, slicing: Slicing) -> Any:
    """Return what is sent the rows of each batch in turn and answers with their slices."""

    def answers() -> Any:
        rows = yield np.empty(0, np.int64)
        for batch in loader:
            rows = yield slicing.of(batch)[:rows]
        raise RuntimeError(f"slice {slicing.column!r}: more batches than the test rows have")

    return _primed(answers())


def _intervals(files: Sequence[LogFile], config: TrainConfig, at: Runtime) -> list[RowInterval]:
    """Return which rows this rank tests, in order."""
    order = EpochOrder(files, "none", 0, 0)
    loader = config.loader.on(at.world_size)
    leg = Leg(at.world_size, loader.batch_size, loader.window_rows, 0)
    return [one for piece in order.share([leg], at.rank) for one in order.intervals(piece)]


def _days(
    files: Sequence[LogFile], config: TrainConfig, at: Runtime
) -> tuple[tuple[str, ...], Any]:
    """Return the days of the test rows, and what answers with the day of each row in turn."""
    days = sorted({file.day for file in files})
    day_of = {file.path: days.index(file.day) for file in files}
    intervals = _intervals(files, config, at)
    ends = np.cumsum([one.stop - one.start for one in intervals], dtype=np.int64)
    of_interval = np.array([day_of[one.path] for one in intervals], np.int64)

    def answers() -> Any:
        rows, position = (yield np.empty(0, np.int64)), 0
        while True:
            places = np.searchsorted(ends, position + np.arange(rows), side="right")
            position += rows
            rows = yield of_interval[places]

    return tuple(days), _primed(answers())


def _times(
    files: Sequence[LogFile], config: TrainConfig, at: Runtime
) -> tuple[tuple[str, ...], Any]:
    """As `_days`, by the schema's time: the column is read beside the model, in the same order."""
    column = config.schema.timestamp
    days = _agree(lambda: find_days(column, files), at)
    hour = SparseFeature(name=DAY, table=DAY, column=column, transform="hour_of_day")
    table = Table(name=DAY, num_embeddings=25, embedding_dim=4)
    reader = LogReader(Schema(tables=(table,), sparse=(hour,), labels=config.schema.labels))

    def answers() -> Any:
        rows, rest = (yield np.empty(0, np.int64)), np.empty(0, np.int64)
        for interval in _intervals(files, config, at):
            for batch in reader.read(interval):
                rest = np.concatenate([rest, np.searchsorted(days, to_days(Values(batch[column])))])
                while len(rest) >= rows:
                    now, rest = rest[:rows], rest[rows:]
                    rows = yield now
        reader.close()
        while True:
            now, rest = rest[:rows], rest[rows:]
            rows = yield now

    names = np.datetime_as_string(days.astype("datetime64[D]")).tolist()
    return tuple(names), _primed(answers())


def _side_schema(slicing: Slicing, schema: Schema) -> Schema:
    """Return the schema of a loader that reads the column and the labels."""
    numbers = slicing.edges is not None
    # A dynamic table is given ids as they are, nulls too.
    ids = None if numbers else DynamicConfig()
    transform: Transform = "log_quarter" if numbers else "hash"
    return Schema(
        tables=(Table(name=DAY, num_embeddings=1_024, embedding_dim=4, dynamic=ids),),
        sparse=(SparseFeature(name=DAY, table=DAY, column=slicing.column, transform=transform),),
        dense=(DenseFeature(name="number", column=slicing.column),) if numbers else (),
        labels=schema.labels,
    )


def _agree(find: Callable[[], Found], at: Runtime) -> Found:
    """Return what the first rank finds. Collective.

    Raises:
        ValueError: as `find`.
    """
    answer: list[Any] = [None]
    if at.is_first:
        try:
            answer = [find()]
        except ValueError as error:
            answer = [error]
    if dist.is_initialized() and at.world_size > 1:
        dist.broadcast_object_list(answer, src=0, group=at.group)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    return answer[0]

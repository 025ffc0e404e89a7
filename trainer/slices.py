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
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from embeddings.lifetime import DynamicConfig
from embeddings.schema import DenseFeature, Schema, SparseFeature, Table, Transform
from trainer.build import open_loader
from trainer.config import TrainConfig
from trainer.data.loader import Loader
from trainer.data.order import EpochOrder, Leg
from trainer.data.parquet import LogFile
from trainer.data.slicing import DAY, Slicing, find_slices
from trainer.metrics import Metrics
from trainer.runtime import Runtime

_MAX_BINS = 2**16
_MAX_USER_ROWS = 1_000_000
_REPORTED = ("rows", "weight", "auc", "auc_standard_error", "gauc", "gauc_users", "logloss", "ne")
_MEANS = ("calibration", "prediction_mean", "label_mean")


class Slices:
    """Metrics of one column's slices: `update` with every batch, `compute` once. Collective."""

    def __init__(self, column: str, config: TrainConfig, files: Sequence[LogFile], at: Runtime):
        self.column = column
        self._labels = [label.name for label in config.schema.labels]
        self._grouped = bool(config.schema.user)
        self._loader: Loader | None = None
        if column == DAY and any(file.day for file in files):
            names, self._codes = _days(files, config, at)
        else:
            slicing = _agree(column, files, config.schema, at)
            names = slicing.names
            side = dataclasses.replace(
                config,
                schema=_side_schema(slicing, config.schema),
                loader=dataclasses.replace(config.loader, num_workers=0),
            )
            self._loader = open_loader(side, at, train=False)
            self._codes = _of_loader(self._loader, slicing)
        self._metrics = {name: self._new() for name in names}

    def update(self, *rows: Tensor) -> None:
        """Add the next batch: probabilities, labels, weights (B, K) and groups (B,)."""
        codes = self._codes.send(len(rows[0]))
        for code in np.unique(codes):
            chosen = np.flatnonzero(codes == code)
            metrics = self._metrics[list(self._metrics)[code]]
            metrics.update(*(one.cpu()[chosen] for one in rows))

    def compute(self) -> list[dict[str, Any]]:
        """Return the metrics of the slices that have rows, in order. Collective."""
        found = []
        for name, metrics in self._metrics.items():
            values = metrics.compute()
            if values["rows"]:
                kept = {key: values[key] for key in (*_REPORTED, *_MEANS) if key in values}
                found.append({"slice": name, **kept})
        if self._loader is not None:
            self._loader.close()
        return found

    def _new(self) -> Metrics:
        return Metrics(
            self._labels, max_user_rows=_MAX_USER_ROWS, max_bins=_MAX_BINS, grouped=self._grouped
        )


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


def _days(files: Sequence[LogFile], config: TrainConfig, at: Runtime) -> tuple[list[str], Any]:
    """Return the days of the test rows, and what answers with the day of each row in turn."""
    days = sorted({file.day for file in files})
    day_of = {file.path: days.index(file.day) for file in files}
    order = EpochOrder(files, "none", 0, 0)
    leg = Leg(at.world_size, config.loader.batch_size, config.loader.window_rows, 0)
    intervals = [one for piece in order.share([leg], at.rank) for one in order.intervals(piece)]
    ends = np.cumsum([one.stop - one.start for one in intervals], dtype=np.int64)
    of_interval = np.array([day_of[one.path] for one in intervals], np.int64)

    def answers() -> Any:
        rows, position = (yield np.empty(0, np.int64)), 0
        while True:
            places = np.searchsorted(ends, position + np.arange(rows), side="right")
            position += rows
            rows = yield of_interval[places]

    return days, _primed(answers())


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


def _agree(column: str, files: Sequence[LogFile], schema: Schema, at: Runtime) -> Slicing:
    """Return the slices of a column, found on the first rank. Collective.

    Raises:
        ValueError: there is no such column, or it has no single value a row.
    """
    answer: list[Any] = [None]
    if at.is_first:
        try:
            answer = [find_slices(column, files, schema)]
        except ValueError as error:
            answer = [error]
    if dist.is_initialized() and at.world_size > 1:
        dist.broadcast_object_list(answer, src=0, group=at.group)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    return answer[0]

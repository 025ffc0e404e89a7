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
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from embeddings.lifetime import MISSING_ID, DynamicConfig
from embeddings.plain import suggest
from embeddings.schema import DenseFeature, Schema, SparseFeature, Table, Transform
from models.batch import Batch
from trainer.build import open_loader
from trainer.config import TrainConfig
from trainer.data.columns import kind_of, to_floats, to_integers
from trainer.data.loader import Loader
from trainer.data.order import EpochOrder, Leg
from trainer.data.parquet import LogFile
from trainer.metrics import Metrics
from trainer.runtime import Runtime

DAY = "day"
_TOP = 20
_BINS = 10
_MAX_BINS = 2**16
_MAX_USER_ROWS = 1_000_000
_MAX_VALUES = 1_000_000
_REPORTED = ("rows", "weight", "auc", "auc_standard_error", "gauc", "gauc_users", "logloss", "ne")
_MEANS = ("calibration", "prediction_mean", "label_mean")
_IDS = ("text", "date")


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How a column's values are slices.

    names: of the slices, in order; the last one is of nulls. keys: ids in ascending order, and
    `codes` their slices (others: the last but one); or edges: between bins of numbers.
    """

    column: str
    names: tuple[str, ...]
    keys: NDArray[np.int64]
    codes: NDArray[np.int64]
    edges: NDArray[np.float64] | None = None

    def of(self, batch: Batch) -> NDArray[np.int64]:
        """Return the slice (B,) of each row of a batch of the column's own loader."""
        null = len(self.names) - 1
        if self.edges is not None:
            values = batch.dense[:, 0].double().numpy()
            return np.where(np.isnan(values), null, np.searchsorted(self.edges, values, "right"))
        values = batch.sparse.values().numpy()
        place = np.minimum(np.searchsorted(self.keys, values), len(self.keys) - 1)
        found = np.where(self.keys[place] == values, self.codes[place], null - 1)
        return np.where(values == MISSING_ID, null, found)


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


def find_slices(column: str, files: Sequence[LogFile], schema: Schema) -> Slicing:
    """Count a column's values in the test files and choose the slices.

    Raises:
        ValueError: there is no such column, or it has no single value a row.
    """
    for file in files:
        columns = pq.read_schema(file.path)
        if column not in columns.names:
            days = " (`day` slices logs in dt=YYYY-MM-DD folders)" if column == DAY else ""
            raise ValueError(
                f"--slice-by {column}: {file.path} has no such column"
                f"{suggest(column, columns.names)}{days}; columns: {columns.names}"
            )
        kind = kind_of(columns.field(column).type)
        if kind not in ("integer", "float", "decimal", "null", *_IDS):
            raise ValueError(
                f"--slice-by {column}: expected a column of ids or numbers, one a row, got "
                f"{columns.field(column).type} in {file.path}; choose another"
            )
    used = {one.column for one in schema.sparse if one.transform in ("hash", "identity")}
    kind = kind_of(pq.read_schema(files[0].path).field(column).type)
    as_ids = kind in _IDS or (kind == "integer" and column in {*used, schema.user})
    values, counts = _count(column, files, as_ids)
    if not as_ids and len(values) > _TOP:
        steps = np.interp(
            np.linspace(0, 1, _BINS + 1)[1:-1], np.cumsum(counts) / counts.sum(), values
        )
        edges = np.unique(steps.astype(np.float32)).astype(np.float64)
        ends = [f"{value:g}" for value in edges]
        names = [f"below {ends[0]}", *(f"{a} to {b}" for a, b in itertools.pairwise(ends))]
        empty = np.empty(0, np.int64)
        names += [f"from {ends[-1]}", "null"]
        return Slicing(column=column, names=tuple(names), keys=empty, codes=empty, edges=edges)
    top = np.argsort(-counts, kind="stable")[:_TOP]
    ids = values[top].astype(np.int64)
    labels = [f"{value:g}" if kind == "float" else str(value) for value in values[top].tolist()]
    if kind in _IDS:
        labels = _names(column, files, ids)
    order = np.argsort(ids)
    return Slicing(
        column=column,
        names=(*labels, "others", "null"),
        keys=ids[order] if len(ids) else np.array([MISSING_ID]),
        codes=order if len(ids) else np.zeros(1, np.int64),
    )


def _chunks(column: str, files: Sequence[LogFile]) -> Iterator[pa.Array]:
    for file in files:
        with pq.ParquetFile(file.path) as source:
            for batch in source.iter_batches(columns=[column]):
                yield batch.column(0)


def _count(column: str, files: Sequence[LogFile], as_ids: bool) -> tuple[NDArray, NDArray]:
    """Return the distinct values of a column, ascending, and how many rows have each.

    Beyond a million values the rarer half is given up: they are no slices of their own.
    """
    values, counts = np.empty(0, np.int64 if as_ids else np.float64), np.empty(0, np.int64)
    for chunk in _chunks(column, files):
        present = chunk.drop_null()
        found = to_integers(present, column)[0] if as_ids else to_floats(present)
        found = found if as_ids else found[np.isfinite(found)]
        new, times = np.unique(found, return_counts=True)
        values, place = np.unique(np.concatenate([values, new]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, times])).astype(np.int64)
        if len(values) > _MAX_VALUES:
            kept = np.sort(np.argsort(-counts, kind="stable")[: _MAX_VALUES // 2])
            values, counts = values[kept], counts[kept]
    return values, counts


def _names(column: str, files: Sequence[LogFile], ids: NDArray[np.int64]) -> list[str]:
    """Return the texts (or dates) that have these ids."""
    names: dict[int, str] = {}
    for chunk in _chunks(column, files):
        present = chunk.drop_null()
        found, first = np.unique(to_integers(present, column)[0], return_index=True)
        wanted = np.isin(found, ids)
        texts = present.take(pa.array(first[wanted])).to_pylist()
        names |= dict(zip(found[wanted].tolist(), map(str, texts), strict=True))
        if len(names) == len(ids):
            break
    return [names[one] for one in ids.tolist()]

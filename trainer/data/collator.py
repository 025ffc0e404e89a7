# SPDX-License-Identifier: MIT
"""Arrow records -> rows of tables and NumPy arrays; runs in a loader's worker, without TorchRec.

All arithmetic works on whole columns. The only Python loops run over the columns of the schema.
What several features need of one column (its hashes, its lists) is worked out once.

Shapes: B rows, F sparse features, C dense features, K labels, N values of all lists, E table rows.
"""

from __future__ import annotations

import collections
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from embeddings.schema.lifetime import MISSING_ID
from embeddings.schema.schema import Schema, SparseFeature
from trainer.data.block import BatchArrays
from trainer.data.columns import Lists, RowError, Values, check_columns, read_lists
from trainer.data.hashing import mix64
from trainer.data.rows import ACTIONS, LayoutKey, Part, Rows, cut, layout_of
from trainer.data.transforms import (
    HOURS_OF,
    dense_matrix,
    dynamic_ids,
    id_factors,
    label_matrices,
    table_rows,
    to_days,
)

# More batches than any pipeline takes ahead.
_AHEAD = 64


class Collator:
    """Converts records to arrays by one schema.

    Args:
        schema: which columns become which features. Without `labelled` all weights are 0.

    Raises:
        ValueError: a table is too small for its transform, or the sequences of one history differ
            in `max_length`.
    """

    def __init__(self, schema: Schema):
        self.schema = schema
        self._checked: pa.Schema | None = None
        self._names, self._histories = schema.columns, schema.histories
        self._sizes = {table.name: table.num_embeddings for table in schema.tables}
        self._dynamic = {table.name for table in schema.tables if table.dynamic}
        for feature in schema.sparse:
            needed = HOURS_OF.get(feature.transform, 0) + 1
            if self._sizes[feature.table] < needed:
                raise ValueError(
                    f"sparse feature {feature.name!r}: transform {feature.transform!r} needs a "
                    f"table of at least {needed} rows, got {self._sizes[feature.table]} in table "
                    f"{feature.table!r}"
                )
        for history, features in self._histories.items():
            if len({feature.max_length for feature in features}) > 1:
                limits = {feature.name: feature.max_length for feature in features}
                raise ValueError(
                    f"history {history!r}: its sequences are aligned, so expected one max_length, "
                    f"got {limits}"
                )

    def __call__(
        self, records: pa.RecordBatch | pa.Table, counts: Counter[str] | None = None
    ) -> BatchArrays:
        """Convert B rows to the arrays of one batch, as `to_batch` does."""
        rows = Rows.empty(self.schema, records.num_rows)
        self.convert(records, rows)
        block = cut(rows, None, max(records.num_rows, 1))
        if counts is not None:
            counts.update(block.counts[0])
        return block.arrays()[0]

    def convert(self, records: pa.RecordBatch | pa.Table, rows: Rows) -> None:
        """Convert records to the next of `rows`.

        Raises:
            ValueError: a column is missing or has a wrong type.
            RowError: as `to_batch` says; `row` is a position in `records`.
        """
        schema = self.schema
        if self._checked is None or not self._checked.equals(records.schema):
            check_columns(records.schema, schema, "records")
            self._checked = records.schema
        columns = {name: Values(_one_array(records.column(name))) for name in self._names}
        for name, what in ((schema.user, "user"), (schema.timestamp, "timestamp")):
            if name and columns[name].array.null_count:
                nulls = columns[name].array.is_null().to_numpy(zero_copy_only=False)
                message = f"column {name!r} ({what}): expected no nulls, got a null"
                raise RowError(message, int(np.argmax(nulls)))
        here = slice(rows.filled, rows.filled + records.num_rows)
        lists = _ListColumns(columns)
        self._convert_lists(lists, rows)
        ids = (feature for feature in schema.sparse if feature.kind == "id")
        for out, feature in zip(rows.ids, ids, strict=True):
            out[here] = self._id_rows(feature, columns, lists, rows)
        if schema.labelled:
            label_matrices(schema.labels, columns, rows.labels[here], rows.weights[here])
        dense_matrix(schema.dense, columns, rows.dense[here])
        if schema.user:
            rows.groups[here] = mix64(columns[schema.user].integers("user")[0]).view(np.int64)
        if schema.timestamp:
            rows.days[here] = to_days(columns[schema.timestamp])
        rows.filled += records.num_rows

    def _convert_lists(self, lists: _ListColumns, rows: Rows) -> None:
        """Convert the features that are lists, and past actions."""
        schema, first = self.schema, dict[LayoutKey, Lists]()
        for feature in schema.sparse:
            if feature.kind == "id":
                continue
            full, key = lists.full(feature.column), layout_of(feature)
            if key not in first:
                first[key] = full
                newest = lists.newest(feature.column, feature.max_length)
                rows.lengths.setdefault(key, []).append(newest[0].lengths)
            _check_aligned(feature.history, feature.column, full, first[key])
            factors = None
            if schema.has_weights:
                weights = lists.full(feature.weights) if feature.weights else None
                factors = id_factors(feature, full, weights)
            values = self._list_rows(feature, lists, rows)
            rows.lists.setdefault(feature.name, []).append(Part(values, factors))
        for history, features in self._histories.items():
            if column := schema.history_actions.get(history):
                _check_aligned(history, column, lists.full(column), first[history, 0])
                actions = self._past_actions(history, column, lists, features[0].max_length)
                rows.lists.setdefault(ACTIONS, []).append(Part(actions))
                return  # of the first history that has any

    def _list_rows(self, feature: SparseFeature, lists: _ListColumns, rows: Rows) -> np.ndarray:
        """Return the table rows of a feature's newest values."""
        source = self._source(feature)
        known = lists.rows.get(source)
        if known is not None and known.max_length == feature.max_length:
            return known.rows
        newest, values = lists.newest(feature.column, feature.max_length)
        outside: list[np.ndarray] = []
        try:
            found = self._rows_of(feature, values, outside)
        except RowError as error:
            raise RowError(error.message, newest.row_of(error.row)) from error
        rows.outside += [(feature.name, rows.filled + newest.rows_of(places)) for places in outside]
        if feature.transform != "identity":
            lists.rows[source] = _Known(found, newest.lengths, feature.max_length)
        return found

    def _id_rows(
        self,
        feature: SparseFeature,
        columns: dict[str, Values],
        lists: _ListColumns,
        rows: Rows,
    ) -> np.ndarray:
        """Return the (B,) table rows of a feature of kind `id`."""
        if feature.transform == "length":
            lengths = lists.full(feature.column).lengths
            return np.minimum(lengths, self._sizes[feature.table] - 2) + 1
        values = columns[feature.column]
        if feature.position:
            known = lists.rows.get(self._source(feature))
            if known is not None and -feature.position <= known.max_length:
                return known.at(
                    feature.position, MISSING_ID if feature.table in self._dynamic else 0
                )
            values = Values(lists.full(feature.column).at(feature.position))
        outside: list[np.ndarray] = []
        found = self._rows_of(feature, values, outside)
        rows.outside += [(feature.name, rows.filled + places) for places in outside]
        return found

    def _rows_of(
        self, feature: SparseFeature, values: Values, outside: list[np.ndarray]
    ) -> np.ndarray:
        """Return the table rows of values; `outside` gains positions that are to be counted."""
        if feature.table in self._dynamic:
            return dynamic_ids(feature, values)
        return table_rows(feature, values, self._sizes[feature.table], outside)

    def _source(self, feature: SparseFeature) -> _Source:
        """Return all that table rows depend on, beside values and policy."""
        dynamic = feature.table in self._dynamic
        size = 0 if dynamic else self._sizes[feature.table]
        return (feature.column, feature.transform, size)

    def _past_actions(
        self, history: str, column: str, lists: _ListColumns, max_length: int
    ) -> np.ndarray:
        """Return the int64 past actions of a history; null becomes 0."""
        newest, values = lists.newest(column, max_length)
        actions, _ = values.integers(f"actions of history {history!r}")
        bad = (actions < 0) | (actions >= 1 << len(self.schema.labels))
        if bad.any():
            raise RowError(
                f"column {column!r}: expected actions in [0, {(1 << len(self.schema.labels)) - 1}] "
                f"(one bit a label), got {actions[bad][0]}",
                newest.row_of(int(np.argmax(bad))),
            )
        return actions


# A column, a transform and the rows of a table (0 if it is dynamic).
_Source = tuple[str, str, int]


class _Known(NamedTuple):
    """Table rows (N,) of the newest `max_length` values of lists, and the lists' lengths (B,)."""

    rows: np.ndarray
    lengths: np.ndarray
    max_length: int

    def at(self, position: int, missing: int) -> np.ndarray:
        """Return the (B,) table rows at `position` (-1 the newest); `missing` in shorter lists."""
        present = self.lengths >= -position
        if not len(self.rows):
            return np.full(len(present), missing)
        places = np.cumsum(self.lengths) + position
        return np.where(present, self.rows.take(places, mode="clip"), missing)


class _ListColumns:
    """The list columns of some records; each is read once.

    Attributes:
        rows: table rows that are known, by what they depend on.
    """

    def __init__(self, columns: dict[str, Values]):
        self.rows: dict[_Source, _Known] = {}
        self._columns = columns
        self._full: dict[str, Lists] = {}
        self._newest: dict[tuple[str, int], tuple[Lists, Values]] = {}

    def full(self, column: str) -> Lists:
        """Return the lists of a column."""
        if column not in self._full:
            self._full[column] = read_lists(self._columns[column].array)
        return self._full[column]

    def newest(self, column: str, max_length: int) -> tuple[Lists, Values]:
        """Return lists of the last `max_length` values, and those values end to end."""
        key = (column, max_length)
        if key not in self._newest:
            lists = self.full(column).newest(max_length)
            self._newest[key] = (lists, Values(lists.values()))
        return self._newest[key]


def _check_aligned(history: str, column: str, lists: Lists, first: Lists) -> None:
    """Check that the lists of a column are as long as the first ones of their history."""
    unequal = first.lengths != lists.lengths
    if unequal.any():
        row = int(np.argmax(unequal))
        raise RowError(
            f"column {column!r}: expected {first.lengths[row]} values, as the other lists "
            f"of history {history!r} have, got {lists.lengths[row]}",
            row,
        )


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column of a batch or a table as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


class Counted:
    """Sums the counts of batches, up to the batch that was trained last.

    A pipeline takes batches ahead of training. A run that continues from a checkpoint counts those
    batches again, so the checkpoint's sums leave them out.
    """

    def __init__(self) -> None:
        self._sum: Counter[str] = Counter()
        self._latest: collections.deque[tuple[int, Counter[str]]] = collections.deque()

    def add(self, step: int, counts: Counter[str]) -> None:
        """Add the counts of batch `step` of the epoch."""
        if any(counts.values()):
            self._latest.append((step, counts))
            if len(self._latest) > _AHEAD:
                self._sum += self._latest.popleft()[1]

    def end_epoch(self) -> None:
        """Treat all batches so far as trained."""
        while self._latest:
            self._sum += self._latest.popleft()[1]

    def total(self, step: int) -> Counter[str]:
        """Return the sums up to batch `step` of the epoch, at most `_AHEAD` batches back."""
        return sum((counts for at, counts in self._latest if at <= step), self._sum.copy())

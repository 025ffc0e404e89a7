# SPDX-License-Identifier: MIT
"""Arrow records -> NumPy arrays of a batch; runs in a loader's worker, without TorchRec.

All arithmetic works on whole columns. The only Python loops run over the columns of the schema. The
values of a batch are concatenated once. `Collator` precomputes what follows from the schema.

Shapes: B rows, F sparse features, C dense features, K labels, N values of all lists, E table rows.
"""

from __future__ import annotations

import collections
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from embeddings.schema.schema import Schema, SparseFeature
from trainer.data.columns import (
    Lists,
    RowError,
    check_columns,
    read_lists,
    to_integers,
)
from trainer.data.hashing import mix64
from trainer.data.transforms import (
    HOURS_OF,
    dense_matrix,
    dynamic_ids,
    id_factors,
    label_matrices,
    middle_day,
    table_rows,
)

# More batches than any pipeline takes ahead.
_AHEAD = 64


@dataclass(frozen=True, kw_only=True)
class BatchArrays:
    """A batch as NumPy arrays: the fields of `Batch`, with `sparse` as its values and lengths.

    Attributes:
        values: (N,) int64 table rows (ids where the table is dynamic), feature by feature.
        factors: (N,) float32 factors of the vectors; (0,) if no feature has weights.
        lengths: (F, B) int32.
        dense: (B, C) float32; null is NaN.
        labels: (B, K) float32 in {0, 1}.
        weights: (B, K) float32; 0 where a label is null.
        groups: (B,) int64 mixed user ids; zeros if the schema names no user.
        actions: int64 past actions, one per item of the history that has them; (0,) if none has.
        day: (1,) int64 days since the epoch.
    """

    values: np.ndarray
    factors: np.ndarray
    lengths: np.ndarray
    dense: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    actions: np.ndarray
    day: np.ndarray

    def fields(self) -> tuple[np.ndarray, ...]:
        """Return the arrays in the order of their declaration."""
        return (
            *(self.values, self.factors, self.lengths, self.dense, self.labels),
            *(self.weights, self.groups, self.actions, self.day),
        )


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
        self._rows = {table.name: table.num_embeddings for table in schema.tables}
        self._dynamic = {table.name for table in schema.tables if table.dynamic}
        hashed = [
            f
            for f in schema.sparse
            if f.kind == "id"
            and f.transform == "hash"
            and not f.position
            and f.table not in self._dynamic
        ]
        self._hashed = {feature.name: i for i, feature in enumerate(hashed)}
        divisors = [self._rows[feature.table] - 1 for feature in hashed]
        self._divisors = np.array(divisors, np.uint64).reshape(-1, 1)  # (F', 1)
        self._hashed_features = hashed
        self._actions = next(
            (
                (h, schema.history_actions[h])
                for h in schema.histories
                if h in schema.history_actions
            ),
            None,
        )
        for feature in schema.sparse:
            needed = HOURS_OF.get(feature.transform, 0) + 1
            if self._rows[feature.table] < needed:
                raise ValueError(
                    f"sparse feature {feature.name!r}: transform {feature.transform!r} needs a "
                    f"table of at least {needed} rows, got {self._rows[feature.table]} in table "
                    f"{feature.table!r}"
                )
        for history, features in schema.histories.items():
            if len({feature.max_length for feature in features}) > 1:
                limits = {feature.name: feature.max_length for feature in features}
                raise ValueError(
                    f"history {history!r}: its sequences are aligned, so expected one max_length, "
                    f"got {limits}"
                )

    def __call__(
        self,
        records: pa.RecordBatch | pa.Table,
        counts: Counter[str] | None = None,
        day: int = 0,
    ) -> BatchArrays:
        """Convert B rows to arrays, as `to_batch` does; `day` is used if there is no timestamp."""
        schema, num_rows = self.schema, records.num_rows
        if self._checked is None or not self._checked.equals(records.schema):
            check_columns(records.schema, schema, "records")
            self._checked = records.schema
        columns = {name: _one_array(records.column(name)) for name in schema.columns}
        for name in (schema.user, schema.timestamp):
            if name and columns[name].null_count:
                row = int(np.argmax(columns[name].is_null().to_numpy(zero_copy_only=False)))
                what = "user" if name == schema.user else "timestamp"
                raise RowError(f"column {name!r} ({what}): expected no nulls, got a null", row)
        values: list[np.ndarray] = [np.empty(0, np.int64)]
        lengths = np.ones((len(schema.sparse), num_rows), np.int32)  # (F, B)
        hashed = self._hash_ids(columns, num_rows)  # (F', B)
        lists: dict[str, Lists] = {}
        for i, feature in enumerate(schema.sparse):
            if feature.name in self._hashed:
                values.append(hashed[self._hashed[feature.name]])
                continue
            if feature.kind == "id":
                size, column = self._rows[feature.table], columns[feature.column]
                if feature.transform == "length":
                    values.append(np.minimum(read_lists(column).lengths, size - 2) + 1)
                    continue
                if feature.position:
                    column = read_lists(column).at(feature.position)
                values.append(
                    dynamic_ids(feature, column)
                    if feature.table in self._dynamic
                    else table_rows(feature, column, size, counts)
                )
                continue
            full = read_lists(columns[feature.column])
            self._check_history(feature.history, feature.column, full, lists)
            newest = full.newest(feature.max_length)
            values.append(self._list_rows(feature, newest, counts))
            lengths[i] = newest.lengths  # (B,)
        read = schema.labels if schema.labelled else ()
        labels, weights = label_matrices(read, columns, num_rows)
        if not schema.labelled:
            labels = weights = np.zeros((num_rows, len(schema.labels)), np.float32)
        return BatchArrays(
            values=np.concatenate(values),
            factors=id_factors(schema, columns, lengths)
            if schema.has_weights
            else np.empty(0, np.float32),
            lengths=lengths,
            dense=dense_matrix(schema.dense, columns, num_rows),
            labels=labels,
            weights=weights,
            groups=self._groups(columns, num_rows),
            actions=self._read_actions(columns, lists),
            day=np.array([middle_day(columns[schema.timestamp]) if schema.timestamp else day]),
        )

    def _hash_ids(self, columns: dict[str, pa.Array], num_rows: int) -> np.ndarray:
        """Return the (F', B) table rows of the F' hashed `id` features, mixed all at once."""
        ids = np.empty((len(self._hashed_features), num_rows), np.int64)
        missing = []
        for i, feature in enumerate(self._hashed_features):
            ids[i], nulls = to_integers(columns[feature.column], f"sparse feature {feature.name!r}")
            if nulls is not None:
                missing.append((i, nulls))
        rows = mix64(ids)  # (F', B) uint64
        rows %= self._divisors
        rows += np.uint64(1)
        for i, nulls in missing:
            rows[i, nulls] = 0
        return rows.view(np.int64)

    def _list_rows(
        self, feature: SparseFeature, lists: Lists, counts: Counter[str] | None
    ) -> np.ndarray:
        """Return the table rows of the values of `lists`."""
        try:
            if feature.table in self._dynamic:
                return dynamic_ids(feature, lists.values())
            return table_rows(feature, lists.values(), self._rows[feature.table], counts)
        except RowError as error:
            raise RowError(error.message, lists.row_of(error.row)) from error

    def _check_history(
        self, history: str, column: str, lists: Lists, seen: dict[str, Lists]
    ) -> None:
        """Check that the lists of one history have equal lengths.

        Args:
            history: name of the history; empty for a list outside any.
            column: name of the column, for the message.
            lists: its lists.
            seen: the first lists of each history, filled here.
        """
        first = seen.setdefault(history, lists)
        unequal = first.lengths != lists.lengths
        if history and unequal.any():
            row = int(np.argmax(unequal))
            raise RowError(
                f"column {column!r}: expected {first.lengths[row]} values, as the other lists "
                f"of history {history!r} have, got {lists.lengths[row]}",
                row,
            )

    def _groups(self, columns: dict[str, pa.Array], num_rows: int) -> np.ndarray:
        """Return the (B,) mixed user ids."""
        if not self.schema.user:
            return np.zeros(num_rows, np.int64)
        return mix64(to_integers(columns[self.schema.user], "user")[0]).view(np.int64)

    def _read_actions(self, columns: dict[str, pa.Array], seen: dict[str, Lists]) -> np.ndarray:
        """Return the int64 past actions of the first history that has any; null becomes 0."""
        if self._actions is None:
            return np.empty(0, np.int64)
        history, column = self._actions
        lists = read_lists(columns[column])
        self._check_history(history, column, lists, seen)
        lists = lists.newest(self.schema.histories[history][0].max_length)
        actions, _ = to_integers(lists.values(), f"actions of history {history!r}")
        bad = (actions < 0) | (actions >= 1 << len(self.schema.labels))
        if bad.any():
            raise RowError(
                f"column {column!r}: expected actions in [0, {(1 << len(self.schema.labels)) - 1}] "
                f"(one bit a label), got {actions[bad][0]}",
                lists.row_of(int(np.argmax(bad))),
            )
        return np.array(actions)  # a copy: Arrow's memory is read-only


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

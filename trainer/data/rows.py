# SPDX-License-Identifier: MIT
"""Rows that have been converted, before they are in order and cut into batches.

A window of a log is converted as it is read, a few thousand rows at a time, column by column. What
every row has one of lies in arrays made once for the whole window. Lists lie end to end. `cut` then
puts the window in order, feature by feature, and writes batches into their block. So the work for a
batch is a few copies.

Shapes: W rows, I features of kind `id`, F sparse features, C dense features, K labels, N values of
all lists, B rows of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from embeddings.schema.schema import Schema, SparseFeature
from trainer.data.block import BatchArrays, Block, Shape

# What the lists of several features have in common: a history's name, or a column and how many.
LayoutKey = tuple[str, int]
ACTIONS = ""  # among names of list features, that of past actions


def layout_of(feature: SparseFeature) -> LayoutKey:
    """Return what features with lists of equal lengths have in common."""
    return (feature.history, 0) if feature.history else (feature.column, feature.max_length)


class Part(NamedTuple):
    """Values of a list feature: (N,) int64, and their (N,) float32 factors if it has any."""

    values: np.ndarray
    factors: np.ndarray | None = None


class Run(NamedTuple):
    """Neighbouring features of a schema: those of kind `id` [first, last), or one list feature."""

    first: int
    last: int
    name: str = ""
    layout: LayoutKey = ("", 0)


@dataclass(kw_only=True)
class Rows:
    """W rows, filled from the first on.

    Attributes:
        schema: theirs.
        filled: rows so far.
        ids: (I, W) int64 table rows.
        dense: (W, C) float32; null is NaN.
        labels: (W, K) float32 in {0, 1}.
        weights: (W, K) float32; 0 where a label is null.
        groups: (W,) int64 mixed user ids.
        days: (W,) int64 days since the epoch; (0,) if the schema has no timestamp.
        lengths: per layout, lengths of lists, int64, part by part.
        lists: per list feature, and for past actions, its values, part by part.
        outside: features, and the rows of each of their values out of range that is to be counted.
    """

    schema: Schema
    filled: int = 0
    ids: np.ndarray
    dense: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    days: np.ndarray
    lengths: dict[LayoutKey, list[np.ndarray]] = field(default_factory=dict)
    lists: dict[str, list[Part]] = field(default_factory=dict)
    outside: list[tuple[str, np.ndarray]] = field(default_factory=list)

    @classmethod
    def empty(cls, schema: Schema, num_rows: int) -> Rows:
        """Return room for `num_rows` rows."""
        num_ids = sum(feature.kind == "id" for feature in schema.sparse)
        num_labels = len(schema.labels)
        return cls(
            schema=schema,
            ids=np.empty((num_ids, num_rows), np.int64),
            dense=np.empty((num_rows, len(schema.dense)), np.float32),
            labels=np.zeros((num_rows, num_labels), np.float32),
            weights=np.zeros((num_rows, num_labels), np.float32),
            groups=np.zeros(num_rows, np.int64),
            days=np.zeros(num_rows if schema.timestamp else 0, np.int64),
        )

    def runs(self) -> list[Run]:
        """Return the features in order, those of kind `id` that lie side by side as one run."""
        found, at = [], 0
        for is_id, group in groupby(self.schema.sparse, key=lambda feature: feature.kind == "id"):
            features = list(group)
            if is_id:
                found.append(Run(at, at + len(features)))
                at += len(features)
            else:
                found += [Run(0, 0, feature.name, layout_of(feature)) for feature in features]
        return found


class _Cut:
    """Batches of rows that are in order; what does not depend on the batch is worked out once."""

    def __init__(self, rows: Rows, batch_size: int):
        schema, num_rows = rows.schema, rows.filled
        bounds = np.append(np.arange(0, max(num_rows, 1), batch_size), num_rows)
        self._rows, self._runs = rows, rows.runs()
        self._lengths = {key: _chain(parts) for key, parts in rows.lengths.items()}
        self._lists = {name: _joined(parts) for name, parts in rows.lists.items()}
        self._bounds = {  # of each layout, the first value of each batch
            key: np.concatenate(([0], np.cumsum(lengths)))[bounds].tolist()
            for key, lengths in self._lengths.items()
        }
        self._actions = _actions_of(schema)
        self.bounds: list[int] = bounds.tolist()

    def shapes(self, number: int) -> tuple[Shape, ...]:
        """Return the shapes of a batch's arrays."""
        schema, num_rows = self._rows.schema, self.bounds[number + 1] - self.bounds[number]
        num_values = num_actions = 0
        for run in self._runs:
            first, last = self._values(run.layout, number) if run.name else (run.first, run.last)
            num_values += (last - first) * (1 if run.name else num_rows)
        if self._actions:
            first, last = self._values(self._actions, number)
            num_actions = last - first
        labels = (num_rows, len(schema.labels))
        return (
            *((num_values,), (num_values if schema.has_weights else 0,)),
            *((len(schema.sparse), num_rows), (num_rows, len(schema.dense)), labels, labels),
            *((num_rows,), (num_actions,), (1,)),
        )

    def fill(self, batch: BatchArrays, number: int, day: int) -> None:
        """Write a batch into its arrays."""
        rows, first, last = self._rows, self.bounds[number], self.bounds[number + 1]
        batch.dense[...] = rows.dense[first:last]
        batch.labels[...] = rows.labels[first:last]
        batch.weights[...] = rows.weights[first:last]
        batch.groups[...] = rows.groups[first:last]
        batch.day[0] = _middle(rows.days[first:last]) if len(rows.days) else day
        batch.lengths.fill(1)
        batch.factors.fill(1)
        value = feature = 0
        for run in self._runs:
            if run.name:
                value = self._fill_list(batch, run, number, value)
                batch.lengths[feature] = self._lengths[run.layout][first:last]
                feature += 1
                continue
            count = run.last - run.first  # features
            out = batch.values[value : value + count * (last - first)]
            out.reshape(count, last - first)[...] = rows.ids[run.first : run.last, first:last]
            value += out.size
            feature += count
        if self._actions:
            first, last = self._values(self._actions, number)
            batch.actions[...] = self._lists[ACTIONS].values[first:last]

    def _fill_list(self, batch: BatchArrays, run: Run, number: int, value: int) -> int:
        """Write the values of a list feature from `value` on; return where they end."""
        first, last = self._values(run.layout, number)
        end = value + last - first
        values, factors = self._lists[run.name]
        batch.values[value:end] = values[first:last]
        if factors is not None:
            batch.factors[value:end] = factors[first:last]
        return end

    def _values(self, layout: LayoutKey, number: int) -> tuple[int, int]:
        """Return the first and the last value of a batch."""
        bounds = self._bounds[layout]
        return bounds[number], bounds[number + 1]


def cut(rows: Rows, order: np.ndarray | None, batch_size: int, day: int = 0) -> Block:
    """Put rows in order and cut them into batches; no rows make one batch of none.

    Args:
        rows: W rows, all of them filled.
        order: positions of the rows of the result; None takes all as they are.
        batch_size: rows of a batch; the last may have fewer.
        day: of batches, if the schema has no timestamp.
    """
    made = _Cut(rows if order is None else _ordered(rows, order), batch_size)
    numbers = range(len(made.bounds) - 1)
    block = Block.reserve([made.shapes(number) for number in numbers])
    for number, batch in zip(numbers, block.arrays(), strict=True):
        made.fill(batch, number, day)
    block.counts = _counts(rows, order, made.bounds)
    return block


def _ordered(rows: Rows, order: np.ndarray) -> Rows:
    """Return rows in another order.

    The whole window is gathered feature by feature, so what is read at random stays in the cache.
    """
    lengths, index = {}, {}
    for key, parts in rows.lengths.items():
        before = _chain(parts)
        starts = (np.cumsum(before) - before)[order]
        here = before[order]
        # (N,): from a value's place in order to its place as it was read.
        index[key] = np.repeat(starts - (np.cumsum(here) - here), here)
        index[key] += np.arange(len(index[key]))
        lengths[key] = [here]
    keys = {feature.name: layout_of(feature) for feature in rows.schema.sparse}
    if actions := _actions_of(rows.schema):
        keys[ACTIONS] = actions
    lists = {}
    for name, parts in rows.lists.items():
        values, factors = _joined(parts)
        places = index[keys[name]]
        factors = factors if factors is None else _take(factors, places)
        lists[name] = [Part(_take(values, places), factors)]
    return Rows(
        schema=rows.schema,
        filled=len(order),
        ids=rows.ids.take(order, 1, mode="clip"),
        dense=_take(rows.dense, order),
        labels=_take(rows.labels, order),
        weights=_take(rows.weights, order),
        groups=_take(rows.groups, order),
        days=_take(rows.days, order) if len(rows.days) else rows.days,
        lengths=lengths,
        lists=lists,
    )


def _actions_of(schema: Schema) -> LayoutKey | None:
    """Return the layout of the first history that has past actions."""
    return next(((name, 0) for name in schema.histories if name in schema.history_actions), None)


def _take(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return rows of an array; `clip` spares a check, since all places exist."""
    return array.take(places, 0, mode="clip") if len(places) else array[:0]


def _chain(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _joined(parts: Sequence[Part]) -> Part:
    """Return the values of all rows, one after the other."""
    if len(parts) == 1:
        return parts[0]
    factors = [part.factors for part in parts if part.factors is not None]
    values = np.concatenate([part.values for part in parts])
    return Part(values, np.concatenate(factors) if factors else None)


def _middle(days: np.ndarray) -> int:
    """Return the median of days: one row with a wrong date does not move the clock of a table."""
    if not len(days):
        return 0
    middle = (len(days) - 1) // 2
    return int(np.partition(days, middle)[middle])


def _counts(rows: Rows, order: np.ndarray | None, bounds: Sequence[int]) -> list[Counter[str]]:
    """Return how many values of each batch are out of range, by feature."""
    counts: list[Counter[str]] = [Counter() for _ in bounds[1:]]
    for name, places in rows.outside:
        found = np.bincount(places, minlength=rows.filled)  # (W,)
        found = found if order is None else found[order]
        for number, count in enumerate(counts):
            if here := int(found[bounds[number] : bounds[number + 1]].sum()):
                count[name] += here
    return counts

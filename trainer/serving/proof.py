# SPDX-License-Identifier: MIT
"""Fixed rows, made of a schema alone, whose scores prove that a loaded model is the exported one.

They go the whole way: from columns over hashing, tables and dense weights to probabilities. So a
loader notices another way of hashing, another order of columns or another kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from embeddings.schema.schema import Schema
from trainer.data.columns import uses
from trainer.data.hashing import hash_strings, mix64

ROWS = 64
# Of probabilities, by the number format of the run.
TOLERANCES = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2}
_LONGEST = 4
_FIRST_TIME = 1_767_225_600_000  # 2026-01-01, in milliseconds
_STEP = 86_399_000


def proof_rows(schema: Schema, families: dict[str, str]) -> pa.Table:
    """Return rows with every column of `schema`, the same at every call.

    Args:
        schema: without labels.
        families: of the training log: which columns are text.
    """
    draws = np.random.default_rng(0)
    lists = {use.column for use in uses(schema) if use.is_list}
    together = {one.column: one.history for one in schema.sparse if one.history}
    together |= {column: history for history, column in schema.history_actions.items()}
    for one in schema.sparse:
        if one.weights:
            group = together.setdefault(one.column, f"column {one.column}")
            together[one.weights] = group
    lengths: dict[str, np.ndarray] = {}
    columns = {}
    for name in schema.columns:
        if name not in lists:
            columns[name] = _values(name, schema, families.get(name, ""), ROWS, draws)
            continue
        group = together.get(name, f"column {name}")
        if group not in lengths:
            lengths[group] = draws.integers(0, _LONGEST + 1, ROWS)
        offsets = np.concatenate(([0], np.cumsum(lengths[group]))).astype(np.int32)
        values = _values(name, schema, families.get(name, ""), int(offsets[-1]), draws)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), values)
    return pa.table(columns)


def _values(
    name: str, schema: Schema, family: str, count: int, draws: np.random.Generator
) -> pa.Array:
    """Return `count` values of a column that every feature of it accepts."""
    numbers = draws.integers(0, 1000, count)
    if family == "text":
        return pa.array([f"value {number}" for number in numbers])
    if family == "date":
        return pa.array(numbers.astype(np.int32)).cast(pa.date32())
    if name in schema.history_actions.values():
        return pa.array(numbers % (1 << len(schema.labels)))
    features = [one for one in schema.sparse if one.column == name]
    if any(one.transform in ("hour_of_day", "hour_of_week") for one in features):
        return pa.array(_FIRST_TIME + numbers * _STEP)
    limits = [
        schema.table(one.table).num_embeddings - 1
        for one in features
        if one.transform == "identity"
    ]
    return pa.array(numbers % min(limits, default=1000))


def hash_proof() -> list[int]:
    """Return what this version makes of an integer and of a text."""
    text = hash_strings(pa.array(["fullrank"]))[0].as_py()
    return [int(mix64(np.array([20260101]))[0] >> np.uint64(1)), int(text)]


def scores_of(found: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return scores as JSON holds them."""
    return {name: [float(one) for one in values] for name, values in found.items()}


def difference(expected: Any, found: dict[str, np.ndarray]) -> float:
    """Return the largest difference of scores from `scores_of`; infinite where they do not fit."""
    if not isinstance(expected, dict) or expected.keys() != found.keys():
        return float("inf")
    worst = 0.0
    for name, values in found.items():
        one = expected[name]
        numbers = isinstance(one, list) and all(type(value) is float for value in one)
        if not numbers or len(one) != len(values):
            return float("inf")
        gap = float(np.abs(np.array(one) - values).max(initial=0.0))
        worst = max(worst, gap if np.isfinite(gap) else float("inf"))
    return worst

# SPDX-License-Identifier: MIT
"""Profile of a column of a sample: number and kind of values, and information about the label.

The number of distinct values of the whole log is estimated from those of the sample by the
guaranteed-error estimator (Charikar et al., "Towards Estimation Error Guarantees for Distinct
Values", 2000): sqrt(N / n) times the values seen once, plus those seen more often.

Shapes: n values in the sample, N in the log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from trainer.data.columns import is_list, kind_of, read_lists, to_floats, to_integers
from trainer.data.hashing import hash_strings

pc: Any = pyarrow.compute
_BINS = 64
_SHOWN = 3
_DATE = r"^\d{4}-\d{2}-\d{2}"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A column of the sample.

    Args:
        kind: `integer` (floats that are whole too), `float`, `text`, `date`, `timestamp` or
            `decimal`, of the entries if `is_list`.
        rows: rows of the column.
        nulls: rows that are null.
        values: entries of the column; those of all lists together if `is_list`.
        distinct: distinct values in the sample.
        cardinality: estimated distinct values of the whole log.
        low: smallest number.
        high: largest number.
        middle: median number.
        lengths: lengths of lists: the mean, the 99th percentile of non-empty ones, the largest.
        hashes: the distinct values as sorted int64.
        told: share of the label's entropy that the value explains; NaN where too few rows share a
            value.
    """

    name: str
    kind: str
    is_list: bool
    rows: int
    nulls: int
    values: int
    distinct: int
    cardinality: int
    low: float
    high: float
    middle: float
    finite: bool
    lengths: tuple[float, int, int]
    text_length: float
    is_date_text: bool
    hashes: NDArray[np.int64]
    examples: tuple[str, ...]

    @property
    def is_number(self) -> bool:
        """Whether values have a size."""
        return self.kind in ("integer", "float", "decimal")

    @property
    def is_binary(self) -> bool:
        """Whether every value is 0 or 1, and both are there."""
        return (
            self.is_number
            and not self.is_list
            and (self.low, self.high) == (0, 1)
            and (self.distinct == 2)
        )

    @property
    def coverage(self) -> float:
        """Share of the whole numbers between the smallest and the largest that are there."""
        return self.distinct / (self.high - self.low + 1) if self.is_number else 0.0


def profile(name: str, column: pa.Array, scale: float) -> Profile:
    """Return what the sample's column `name` says of the log, which has `scale` times its rows."""
    listed = is_list(column.type)
    lists = read_lists(column) if listed else None
    values = lists.values() if lists is not None else column
    kind = kind_of(values.type)
    present = values.drop_null()
    if kind == "float":
        present = present.filter(pc.invert(pc.is_nan(present)))
    numbers = to_floats(present) if kind in ("integer", "float", "decimal") else np.empty(0)
    finite = bool(np.isfinite(numbers).all())
    whole = kind == "float" and finite and bool(len(numbers)) and _is_whole(numbers)
    if kind in ("integer", "text", "date") or whole:
        hashes, counts = np.unique(to_integers(present, name)[0], return_counts=True)
    else:
        if kind == "decimal":  # as floats, neighbours above 2^53 are one
            keys = np.asarray(hash_strings(present.cast(pa.string())))
        else:
            keys = numbers if len(numbers) else np.asarray(present.cast(pa.int64()))
        found, counts = np.unique(keys, return_counts=True)
        hashes = found.view(np.int64)
    once = int((counts == 1).sum())
    cardinality = round(math.sqrt(scale) * once + len(counts) - once)
    lengths = lists.lengths if lists is not None else np.zeros(1, np.int64)
    filled = lengths[lengths > 0] if lengths.any() else lengths  # most rows may have no history
    is_text = kind == "text" and bool(len(present))
    return Profile(
        name=name,
        kind="integer" if whole else kind,
        is_list=listed,
        rows=len(column),
        nulls=column.null_count + (0 if listed else len(values.drop_null()) - len(present)),
        values=len(present),
        distinct=len(counts),
        cardinality=min(cardinality, max(round(len(present) * scale), 1)),
        low=float(numbers.min()) if len(numbers) else math.nan,
        high=float(numbers.max()) if len(numbers) else math.nan,
        middle=float(np.median(numbers)) if len(numbers) else math.nan,
        finite=finite,
        lengths=(float(lengths.mean()), int(np.quantile(filled, 0.99)), int(lengths.max())),
        text_length=_mean_length(present) if is_text else 0.0,
        is_date_text=is_text and _are_dates(present),
        hashes=hashes,
        examples=tuple(str(value) for value in present.slice(0, 64).unique().to_pylist()[:_SHOWN]),
    )


def told(column: pa.Array, label: pa.Array) -> float:
    """Return the share of a 0/1 label's entropy that a column's value explains, in [0, 1].

    Numbers with many values are cut into quantile bins. The result is NaN if a value has fewer than
    20 rows on average, because the estimate would be too high.
    """
    rows = min(len(column), len(label))
    targets = to_floats(label.slice(0, rows))
    column = column.slice(0, rows)
    kind = kind_of(column.type)
    if kind in ("float", "decimal", "integer"):
        values = np.nan_to_num(to_floats(column), nan=-1e30, posinf=1e30, neginf=-1e30)
        codes = np.unique(values, return_inverse=True)[1]
        if codes.max(initial=0) >= _BINS * 4:
            edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1]))
            codes = np.searchsorted(edges, values, side="right")
    elif kind in ("text", "date"):
        ids, missing = to_integers(column, "")
        ids = ids if missing is None else np.where(missing, -1, ids)
        codes = np.unique(ids, return_inverse=True)[1]
    else:
        return math.nan
    known = ~np.isnan(targets)
    codes, targets = codes[known], targets[known]
    groups = int(codes.max(initial=0)) + 1
    if len(codes) < 20 * groups:
        return math.nan
    counts = np.bincount(codes, minlength=groups)
    rates = np.bincount(codes, targets, groups) / np.maximum(counts, 1)
    whole = _entropy(np.array([targets.mean()]))[0]
    left = float((counts * _entropy(rates)).sum() / counts.sum())
    return 1 - left / whole if whole else math.nan


def aligned(first: pa.Array, second: pa.Array) -> bool:
    """Return whether two list columns have equally long lists in every row."""
    rows = min(len(first), len(second))
    return np.array_equal(read_lists(first).lengths[:rows], read_lists(second).lengths[:rows])


def overlap(part: Profile, whole: Profile) -> float:
    """Return the share of the distinct values of `part` that `whole` has too."""
    common = np.intersect1d(part.hashes, whole.hashes, assume_unique=True)
    return len(common) / max(len(part.hashes), 1)


def _is_bytes(text: pa.Array) -> bool:
    return pa.types.is_binary(text.type) or pa.types.is_large_binary(text.type)


def _mean_length(text: pa.Array) -> float:
    lengths = pc.binary_length(text) if _is_bytes(text) else pc.utf8_length(text)
    return float(pc.mean(lengths).as_py())


def _are_dates(text: pa.Array) -> bool:
    return not _is_bytes(text) and bool(pc.all(pc.match_substring_regex(text, _DATE)).as_py())


def _is_whole(numbers: NDArray[np.float64]) -> bool:
    return bool(((numbers == np.floor(numbers)) & (np.abs(numbers) < 2.0**53)).all())


def _entropy(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(rates, 1e-12, 1 - 1e-12)
    return np.where(
        (rates <= 0) | (rates >= 1), 0, -inside * np.log(inside) - (1 - inside) * np.log1p(-inside)
    )

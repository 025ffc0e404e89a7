# SPDX-License-Identifier: MIT
"""Statistics of every column and day, in one pass and bounded memory, and their drift.

Cardinality is estimated from the k smallest hashes of the distinct values (KMV, Bar-Yossef et al.,
"Counting Distinct Elements in a Data Stream", 2002). It is exact below k = 1,024, with an error of
about 3 % above. Most values of a batch are above the k-th smallest and cost one comparison.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.ingestion.partition import STATISTICS
from trainer.data.hashing import mix64

_KEPT = 1_024
_HEAD = 16_384
_FEW = 100  # with fewer rows the standard deviation of a day is unreliable


@dataclass
class _Column:
    """Sums of one column on one day. A list counts once in `rows` and by its elements elsewhere."""

    rows: int = 0
    null_rows: int = 0
    values: int = 0
    total: float = 0.0
    squares: float = 0.0
    smallest: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    is_list: bool = False

    def add(self, column: pa.ChunkedArray) -> None:
        """Add a column of int8, int64 or float values, or lists of them."""
        for chunk in column.chunks:
            self.rows += len(chunk)
            self.null_rows += chunk.null_count
            self.is_list = isinstance(chunk, pa.ListArray)
            values = chunk.flatten() if self.is_list else chunk
            self._add_values(values.drop_null().to_numpy(zero_copy_only=False))

    def _add_values(self, values: NDArray[np.generic]) -> None:
        if not len(values):
            return
        self.values += len(values)
        numbers = values.astype(np.float64)
        self.total += float(numbers.sum())
        self.squares += float(np.square(numbers).sum())
        if values.dtype.kind == "f":
            values = numbers.view(np.int64)
        hashes = mix64(values.astype(np.int64, copy=False))
        for first in (0, _HEAD):  # the head of a batch tightens the bound for the rest of it
            part = hashes[first : _HEAD if first == 0 else None]
            if len(self.smallest) == _KEPT:
                part = part[part < self.smallest[-1]]
            if len(part):
                # Sorting beats np.unique, whose hash table is slow on 64-bit hashes.
                both = np.sort(np.concatenate([self.smallest, part]))
                self.smallest = both[np.diff(both, prepend=~both[:1]) != 0][:_KEPT]

    def summary(self, *, has_mean: bool) -> dict[str, Any]:
        """Return the statistics as JSON data. Means of ids are meaningless and left out."""
        out: dict[str, Any] = {"count": self.rows, "nulls": self.null_rows}
        out["cardinality"] = len(self.smallest)
        if len(self.smallest) == _KEPT:
            out["cardinality"] = round((_KEPT - 1) / (float(self.smallest[-1]) / 2.0**64))
        if self.is_list:
            out["mean_length"] = self.values / max(self.rows, 1)
        if has_mean and self.values:
            mean = self.total / self.values
            out["mean"] = mean
            out["std"] = math.sqrt(max(self.squares / self.values - mean**2, 0.0))
        return out


class Texts:
    """The texts and hashes of low-cardinality columns, so that people can read the hashes.

    Args:
        limit: largest number of texts of a column. A column with more, such as users or items, is
            left out.
    """

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self._found: dict[str, dict[str, int]] = {}

    def is_open(self, name: str) -> bool:
        """Return whether the column `name` may still have few texts."""
        return len(self._found.get(name, ())) <= self.limit

    def add(self, name: str, texts: pa.Array, hashes: pa.Array) -> None:
        """Add texts of the column and their hashes; nulls are left out."""
        pairs = zip(texts.to_pylist(), hashes.to_pylist(), strict=True)
        kept = {text: number for text, number in pairs if number is not None}
        self._found.setdefault(name, {}).update(kept)

    def columns(self) -> dict[str, dict[str, int]]:
        """Return the hash of each text by column, in order, of columns with few of them."""
        found = self._found.items()
        return {name: dict(sorted(one.items())) for name, one in found if self.is_open(name)}


class Statistics:
    """Statistics by day and column.

    Args:
        numbers: names of the columns whose mean is meaningful.
    """

    def __init__(self, numbers: set[str]) -> None:
        self.numbers = numbers
        self._days: dict[str, dict[str, _Column]] = {}

    def add(self, day: str, table: pa.Table) -> None:
        """Add rows of `day`; columns that are neither numbers nor lists of them are skipped."""
        columns = self._days.setdefault(day, {})
        for name in table.column_names:
            kind = table.schema.field(name).type
            kind = kind.value_type if pa.types.is_list(kind) else kind
            if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                columns.setdefault(name, _Column()).add(table.column(name))

    def columns(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each column by day."""
        return {
            day: {name: one.summary(has_mean=name in self.numbers) for name, one in found.items()}
            for day, found in sorted(self._days.items())
        }

    def days(self, output: str | Path) -> dict[str, dict[str, Any]]:
        """Return {day: {"columns": ..., "drift": ...}}; drift is against the day before.

        The day before is one of the collected days or, if it is not among them, `output`'s.
        """
        columns, result = self.columns(), {}
        for day, found in columns.items():
            eve = (date.fromisoformat(day) - timedelta(days=1)).isoformat()
            before = columns.get(eve) or _read_columns(Path(output) / f"dt={eve}" / STATISTICS)
            drift = {
                name: _drift(before[name], now) for name, now in found.items() if name in before
            }
            result[day] = {"columns": found, "drift": drift}
        return result


def largest_drifts(days: dict[str, dict[str, Any]], count: int = 3) -> list[str]:
    """Return readable lines for the largest changes of null share and mean, largest first."""
    lines = []
    for day, found in days.items():
        for name, change in found["drift"].items():
            nulls, mean = change["null_share"], change.get("mean", 0.0)
            if abs(nulls) >= 0.01:
                lines.append((abs(nulls) * 10, f"{day} {name}: null share {nulls:+.1%}"))
            # A change within five standard errors, of small days, is noise.
            if abs(mean) >= max(0.1, 5 * change.get("mean_error", 0.0)):
                lines.append((abs(mean), f"{day} {name}: mean {mean:+.2f} standard deviations"))
    return [text for _, text in sorted(lines, reverse=True)[:count]]


def _drift(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """Differences of null share and mean, ratio of cardinalities.

    The difference of means is in standard deviations of the day before. If that day has few rows,
    it is in standard deviations within both days. `mean_error` is its standard error.
    """
    change = {
        "null_share": now["nulls"] / max(now["count"], 1)
        - before["nulls"] / max(before["count"], 1),
        "cardinality": now["cardinality"] / max(before["cardinality"], 1),
    }
    if "mean" in now and "mean" in before:
        values = [max(one["count"] - one["nulls"], 1) for one in (before, now)]
        squares = values[0] * before["std"] ** 2 + values[1] * now["std"] ** 2
        both = math.sqrt(squares / sum(values))
        scale = before["std"] if values[0] >= _FEW else both
        change["mean"] = (now["mean"] - before["mean"]) / (scale or both or 1.0)
        change["mean_error"] = math.sqrt(1 / values[0] + 1 / values[1])
    return change


def _read_columns(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8")).get("columns", {})

# SPDX-License-Identifier: MIT
"""Which days must not be trained on: columns that broke, rows that are missing.

A day is compared with the days before it that were good themselves, up to a week of them: its rows
with those of the same weekday a week ago, or with their median where that day is not known; its
columns with their medians. Thresholds are wide enough for weekends, and
narrow enough for a broken producer; what stays within them is left to the gates, which see what
the candidate predicts.

Statistics are those of `pipelines/ingestion/column_stats.py`, read from beside the day or taken
from its files.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.schema.schema import Schema
from pipelines.ingestion.column_stats import Statistics
from pipelines.ingestion.readiness import files_of
from pipelines.orchestration.fingerprints import of_path
from pipelines.orchestration.threshold_options import threshold
from trainer.data.hashing import hash_strings, is_text
from trainer.runtime.atomic_files import read_json, write_json

_WEEK = 7
_LEAST_DAYS = 2
_BATCH = 65_536


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    """Thresholds of a day, options --drift-NAME; the help of each is its documentation."""

    min_rows_share: float = threshold(
        0.55, "least rows, as a share of those a week ago or of the median of days before; 0: any"
    )
    max_null_gain: float = threshold(0.3, "growth of a column's share of nulls; 0: any")
    max_mean_shift: float = threshold(
        3.0, "change of a number's or label's mean, in standard deviations; 0: any"
    )
    max_cardinality_factor: float = threshold(
        20.0, "growth or fall of a column's number of values, where it had ten or more; 0: any"
    )
    allow_constant: bool = threshold(False, "take columns with one value that had several")

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, top in (("min_rows_share", 1.0), ("max_null_gain", 1.0)):
            if not 0 <= getattr(self, name) <= top:
                value = getattr(self, name)
                raise ValueError(f"--drift-{_dashed(name)}: expected 0 to {top:g}, got {value}")
        for name in ("max_mean_shift", "max_cardinality_factor"):
            if getattr(self, name) < 0:
                value = getattr(self, name)
                raise ValueError(f"--drift-{_dashed(name)}: expected a number >= 0, got {value}")

    def reasons(self, day: str, found: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
        """Return why `day` must not be trained on; nothing if it may, or has nothing before it.

        Args:
            found: its statistics.
            before: those of earlier good days by day.
        """
        if not before:
            return []
        reasons = self._rows(day, found, before)
        for name, now in found["columns"].items():
            known = [one["columns"][name] for one in before.values() if name in one["columns"]]
            if known:
                reasons += [f"column {name!r}: {why}" for why in self._column(now, known)]
        return reasons

    def _rows(self, day: str, found: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
        date = datetime.date.fromisoformat(day)
        eve = (date - datetime.timedelta(days=_WEEK)).isoformat()
        if eve in before:
            expected, which = before[eve]["rows"], f"of {eve}, a week before"
        elif len(before) < _LEAST_DAYS:
            return []  # one day may be the odd one
        else:
            expected = statistics.median(one["rows"] for one in before.values())
            which = f"that the {len(before)} days before have (median)"
        share = found["rows"] / max(expected, 1)
        if share >= self.min_rows_share:
            return []
        return [
            f"{found['rows']:,} rows are {share:.0%} of the {expected:,.0f} {which}, below "
            f"--drift-min-rows-share {self.min_rows_share:g}"
        ]

    def _column(self, now: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> list[str]:
        reasons = []
        different = statistics.median(one["cardinality"] for one in known)
        values = now["count"] - now["nulls"]
        if not self.allow_constant and now["cardinality"] <= 1 < different and values > 1:
            reasons.append(
                f"constant, where it had {different:,.0f} values (--drift-allow-constant)"
            )
        elif self.max_cardinality_factor and different >= 10 and now["cardinality"]:
            factor = now["cardinality"] / different
            if not 1 / self.max_cardinality_factor <= factor <= self.max_cardinality_factor:
                reasons.append(
                    f"{now['cardinality']:,} different values, where it had {different:,.0f}, "
                    f"beyond --drift-max-cardinality-factor {self.max_cardinality_factor:g}"
                )
        nulls = now["nulls"] / max(now["count"], 1)
        usual = statistics.median(one["nulls"] / max(one["count"], 1) for one in known)
        if self.max_null_gain and nulls - usual > self.max_null_gain:
            reasons.append(
                f"{nulls:.0%} nulls, where it had {usual:.0%}, beyond --drift-max-null-gain "
                f"{self.max_null_gain:g}"
            )
        means = [one["mean"] for one in known if "mean" in one]
        if self.max_mean_shift and "mean" in now and means:
            spread = statistics.median(one["std"] for one in known if "std" in one) or now["std"]
            shift = (now["mean"] - statistics.median(means)) / (spread or 1.0)
            if abs(shift) > self.max_mean_shift:
                reasons.append(
                    f"mean {now['mean']:.4g}, where it had {statistics.median(means):.4g}: "
                    f"{shift:+.2f} standard deviations, beyond --drift-max-mean-shift "
                    f"{self.max_mean_shift:g}"
                )
        return reasons


def refused_days(
    days: Sequence[str], known: Sequence[str], read: Any, config: DriftConfig
) -> dict[str, list[str]]:
    """Return the days of `days` that must not be trained on, with every reason.

    Args:
        known: all days that are there.
        read: returns a day's statistics.
    """
    refused: dict[str, list[str]] = {}
    for day in sorted(days):
        earlier = [one for one in known if one < day and one not in refused][-_WEEK:]
        reasons = config.reasons(day, read(day), {one: read(one) for one in earlier})
        if reasons:
            refused[day] = reasons
    return refused


@dataclass(frozen=True, kw_only=True)
class DayStatistics:
    """Reads the statistics of days of a log, and keeps in `cache` those it had to take itself."""

    log: Path
    schema: Schema
    cache: Path

    def read(self, day: str) -> dict[str, Any]:
        """Return {"rows": ..., "columns": ...} of a day."""
        folder, kept = self.log / f"dt={day}", self.cache / f"{day}.json"
        made_from = [of_path(folder), self.schema.fingerprint()]
        try:
            found = read_json(kept)
        except (OSError, ValueError):
            found = None  # not taken yet, or damaged: computed again
        if _is_whole(found) and found["made_from"] == made_from:
            return found
        found = {"made_from": made_from, **self._take(folder, day)}
        self.cache.mkdir(parents=True, exist_ok=True)
        write_json(kept, found)
        return found

    def _take(self, folder: Path, day: str) -> dict[str, Any]:
        numbers = {label.column for label in self.schema.labels}
        numbers |= {feature.weights for feature in self.schema.sparse}
        taken = Statistics(numbers | {dense.column for dense in self.schema.dense})
        rows, names = 0, list(dict.fromkeys(self.schema.columns))
        for path in files_of(folder):
            with pq.ParquetFile(str(path)) as file:
                for batch in file.iter_batches(_BATCH, columns=names):
                    rows += batch.num_rows
                    columns = {name: _numbers(batch.column(name)) for name in names}
                    taken.add(day, pa.table(columns))
        return {"rows": rows, "columns": taken.columns().get(day, {})}


def _is_whole(found: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether something read has what the statistics of a day have."""
    if not isinstance(found, dict) or not isinstance(found.get("columns"), dict):
        return False
    if not isinstance(found.get("rows"), int) or "made_from" not in found:
        return False
    for one in found["columns"].values():
        if not isinstance(one, dict) or not {"count", "nulls", "cardinality"} <= one.keys():
            return False
        # A mean comes with its deviation.
        if ("mean" in one) != ("std" in one):
            return False
        if not all(isinstance(value, int | float) for value in one.values()):
            return False
    return True


def _numbers(column: pa.Array) -> pa.Array:
    """Return text as the hashes that it is trained by, booleans as 0 and 1, the rest as it is."""
    if is_text(column.type):
        return hash_strings(column)
    return column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column


def _dashed(name: str) -> str:
    return name.replace("_", "-")

# SPDX-License-Identifier: MIT
"""Settings of a dynamic table: which ids get a row, and when they lose it.

Free of torch, so that a schema can be read anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Stands for a null among the ids of a dynamic table, and for no id in its map. The one real id of
# this value is read as a null.
MISSING_ID = -(2**63)
# An id lies in one of two sets of this many rows.
WAYS = 8
_MIN_ROWS = 16
_MAX_OCCURRENCES = 1_000_000
# Ten years, and more steps than any run takes.
_MAX_DAYS, _MAX_STEPS = 3_650, 10**9


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Rows that follow the ids: `num_embeddings` is the limit, ids are 64 bits and unbounded.

    Args:
        admission: which ids get a row. `occurrences`: an id gets one at its `min_occurrences`-th
          occurrence. `probability`: at each occurrence with this probability.
        min_occurrences: 1 admits at once. Occurrences are counted for at most as many ids without a
          row as the table has rows; the longest unseen are forgotten first.
        probability: between 0 and 1, for admission `probability`.
        eviction: which id loses its row. `lru`: where a new id finds no room, the longest unseen.
          `lfu`: there, the one with the fewest occurrences since it got its row. `ttl`: any id that
          was not seen for more than `ttl_days` or `ttl_steps`; where there is still no room, the
          longest unseen. `none`: no id.
        ttl_days: days of the log. With `lfu` it evicts ids that were frequent long ago.
        ttl_steps: training steps, in place of ttl_days.
        initial_rows: rows in use at the start; 0 for all. Where a new id finds no room, an eighth
          of the limit is added; ids are evicted only at the limit. Rounded up to an eighth, at
          least two. Rows that are not in use yet take no main memory.
    """

    admission: Literal["occurrences", "probability"] = "occurrences"
    min_occurrences: int = 1
    probability: float = 1.0
    eviction: Literal["lru", "lfu", "ttl", "none"] = "lru"
    ttl_days: int = 0
    ttl_steps: int = 0
    initial_rows: int = 0

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        if self.admission not in ("occurrences", "probability"):
            raise ValueError(
                f"dynamic.admission: expected 'occurrences' or 'probability', got "
                f"{self.admission!r}"
            )
        if self.eviction not in ("lru", "lfu", "ttl", "none"):
            raise ValueError(
                f"dynamic.eviction: expected 'lru', 'lfu', 'ttl' or 'none', got {self.eviction!r}"
            )
        by_chance = self.admission == "probability"
        if by_chance and not 0 < self.probability < 1:
            raise ValueError(
                "dynamic.probability: expected a number between 0 and 1, both left out, got "
                f"{self.probability}; to admit every id use admission 'occurrences'"
            )
        if not by_chance and self.probability != 1:
            raise ValueError(
                "dynamic.probability: has no effect on admission 'occurrences', got "
                f"{self.probability}; remove it, or set admission to 'probability'"
            )
        if by_chance and self.min_occurrences != 1:
            raise ValueError(
                "dynamic.min_occurrences: has no effect on admission 'probability', got "
                f"{self.min_occurrences}; remove it, or set admission to 'occurrences'"
            )
        if not 1 <= self.min_occurrences <= _MAX_OCCURRENCES:
            raise ValueError(
                f"dynamic.min_occurrences: expected an integer in [1, {_MAX_OCCURRENCES}], got "
                f"{self.min_occurrences}"
            )
        if self.initial_rows < 0:
            raise ValueError(f"dynamic.initial_rows: expected at least 0, got {self.initial_rows}")
        self._check_ttl()

    def _check_ttl(self) -> None:
        """Check how long ids stay unseen."""
        for name, value, most in (
            ("ttl_days", self.ttl_days, _MAX_DAYS),
            ("ttl_steps", self.ttl_steps, _MAX_STEPS),
        ):
            if not 0 <= value <= most:
                raise ValueError(
                    f"dynamic.{name}: expected an integer in [0, {most:,}], got {value:,}; to keep "
                    "ids for as long as there is room use eviction 'lru'"
                )
            if value and self.eviction not in ("ttl", "lfu"):
                raise ValueError(
                    f"dynamic.{name}: has no effect on eviction {self.eviction!r}, got {value}; "
                    "remove it, or set eviction to 'ttl' or 'lfu'"
                )
        if (self.ttl_days and self.ttl_steps) or (
            self.eviction == "ttl" and not self.ttl_days and not self.ttl_steps
        ):
            raise ValueError(
                f"dynamic.ttl_days: eviction {self.eviction!r} goes by ttl_days (of the log) or "
                f"ttl_steps, one of the two, got {self.ttl_days} and {self.ttl_steps}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes that the map of ids takes per row."""
        return 20 if self.min_occurrences == 1 else 40

    def check_rows(self, table: str, num_embeddings: int) -> None:
        """Check the settings against the limit of `table`.

        Raises:
            ValueError: the table is too small, or begins with more rows than it may have.
        """
        if num_embeddings < _MIN_ROWS:
            raise ValueError(
                f"table {table!r}: a dynamic table needs num_embeddings of at least {_MIN_ROWS}, "
                f"got {num_embeddings}"
            )
        if self.initial_rows >= num_embeddings:
            raise ValueError(
                f"table {table!r}: dynamic.initial_rows: expected less than num_embeddings "
                f"({num_embeddings}), got {self.initial_rows}; leave it out to begin with all rows"
            )

    def initial_ways(self, num_embeddings: int) -> int:
        """Return how many rows of each set are in use at the start, 2 to `WAYS`."""
        if not self.initial_rows:
            return WAYS
        return max(2, -(-WAYS * self.initial_rows // num_embeddings))

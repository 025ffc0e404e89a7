# SPDX-License-Identifier: MIT
"""Counts of a loader's batches, up to the one that was trained last.

A pipeline takes batches ahead of training. What those held is counted again by the run that goes on
from a checkpoint, so it must not be in that checkpoint's numbers.
"""

from __future__ import annotations

import collections
from collections import Counter

# More batches than any pipeline takes ahead.
_AHEAD = 64


class Counted:
    """Sums what batches count, and tells it up to any of the latest batches."""

    def __init__(self) -> None:
        self._sum: Counter[str] = Counter()
        self._latest: collections.deque[tuple[int, Counter[str]]] = collections.deque()

    def add(self, step: int, counts: Counter[str]) -> None:
        """Add what the batch `step` of the epoch counts."""
        if any(counts.values()):
            self._latest.append((step, counts))
            if len(self._latest) > _AHEAD:
                self._sum += self._latest.popleft()[1]

    def end_epoch(self) -> None:
        """Take all batches so far for trained."""
        while self._latest:
            self._sum += self._latest.popleft()[1]

    def total(self, step: int) -> Counter[str]:
        """Return the sums up to the batch `step` of the epoch, of the latest `_AHEAD`."""
        return sum((counts for at, counts in self._latest if at <= step), self._sum.copy())

# SPDX-License-Identifier: MIT
"""Which id lies in which row of a bounded table: found, touched, placed, let go of.

Everything is arithmetic on whole tensors; the loop of `place` runs over rounds, in each of which
every id takes the best row it may and the first of those that want the same one gets it.

Shapes: U ids, W rows that an id may take (`embeddings/buckets.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embeddings.buckets import Layout, Places
from embeddings.lifetime import MISSING_ID, WAYS

# `seen` of a row holds two numbers: the log's day above, the step below.
STEP_BITS = 40
_STEP_MASK = (1 << STEP_BITS) - 1
_MAX_HITS = (1 << 22) - 1
_NEVER = 2**63 - 1
# In how many turns `fill` gives rows.
_TURNS = 32
# Of the W rows an id may take, which of its set each is.
_WAY = torch.arange(WAYS).repeat(2)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The ids of a shard's rows, when they were last seen, and how often.

    ids: (rows,) int64, `MISSING_ID` for a free row. seen: (rows,) int64, 2^40 * day + step. hits:
    (rows,) int32, occurrences since the id came.
    """

    ids: Tensor
    seen: Tensor
    hits: Tensor

    def clear(self) -> None:
        """Free every row."""
        self.ids.fill_(MISSING_ID)
        self.seen.zero_()
        self.hits.zero_()

    def free(self, rows: Tensor) -> None:
        """Free `rows`."""
        self.ids[rows] = MISSING_ID
        self.seen[rows] = 0
        self.hits[rows] = 0

    def find(self, ids: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return (U,) whether an id has a row, and the row (its default row if not)."""
        match = (self.ids[places.rows] == ids[:, None]) & places.usable
        has = match.any(1)
        position = match.to(torch.uint8).argmax(1, keepdim=True)
        return has, torch.where(has, places.rows.gather(1, position)[:, 0], places.default)

    def touch(self, rows: Tensor, now: int, counts: Tensor) -> None:
        """Note that the ids in `rows`, each once, were seen `counts` times."""
        self.seen[rows] = now
        self.hits[rows] = (self.hits[rows].long() + counts).clamp(max=2**31 - 1).int()

    def place(
        self,
        ids: Tensor,
        places: Places,
        now: int,
        *,
        eviction: str = "lru",
        ways: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Give U new ids, sorted and each once, a row.

        Ids that were seen `now` keep theirs. Which rows are given does not depend on what happens
        in other buckets.

        Args:
            ids: (U,) int64.
            places: of the ids.
            now: 2^40 * day + step; the new ids count as seen now.
            eviction: which id goes where no row is free: `lru`, `lfu`, `none`.
            ways: (rows,) int64 or None; at a bucket's default row, how many rows of each set are in
              use. Where an id finds none, one is added.

        Returns:
            (U,) rows, -1 for ids that found none, and (U,) bool, whether another id had to leave.
        """
        given = torch.full_like(ids, -1)
        evicted = torch.zeros_like(ids, dtype=torch.bool)
        pending = torch.arange(len(ids), device=ids.device)
        growing = ways is not None and bool((ways[places.default] < WAYS).any())
        while len(pending):
            rows, usable = places.rows[pending], places.usable[pending]
            default = places.default[pending]
            if growing and ways is not None:
                usable = usable & (_WAY.to(ids.device) < ways[default][:, None])
            free = (self.ids[rows] == MISSING_ID) & usable
            if growing and ways is not None:
                grow = ~free.any(1) & (ways[default] < WAYS)
                if grow.any():
                    ways[default[grow].unique()] += 1
                    continue
            best, position = self._values(rows, usable, free, now, eviction).min(1)
            able = best != _NEVER
            chosen = rows.gather(1, position[:, None])[able, 0]
            pending, best = pending[able], best[able]
            row, winners = _first_of_each(chosen)
            won = pending[winners]
            given[won] = row
            evicted[won] = best[winners] >= 0
            self.ids[row] = ids[won]
            self.seen[row] = now
            self.hits[row] = 0
            lost = torch.ones_like(pending, dtype=torch.bool)
            lost[winners] = False
            pending = pending[lost]
        return given, evicted

    def fill(self, ids: Tensor, layout: Layout, ways: Tensor) -> Tensor:
        """Give U new ids, each once, rows while there is room; return (U,) rows, -1 for none.

        Those that come first get theirs first. ways: as for `place`.
        """
        given = torch.full_like(ids, -1)
        for turn in torch.arange(len(ids), device=ids.device).tensor_split(_TURNS):
            chosen, sorting = torch.sort(ids[turn])
            rows, _ = self.place(chosen, layout.places(chosen), 0, eviction="none", ways=ways)
            given[turn[sorting]] = rows
        return given

    def _values(
        self, rows: Tensor, usable: Tensor, free: Tensor, now: int, eviction: str
    ) -> Tensor:
        """Return (U, W) how much `rows` are worth as they are; an id takes that of the least."""
        score = torch.full_like(rows, _NEVER)
        if eviction != "none":
            # Steps alone: days go back where a run is repeated on an earlier log.
            seen = self.seen[rows]
            worth = seen & _STEP_MASK
            if eviction == "lfu":
                worth = worth + (self.hits[rows].long().clamp(max=_MAX_HITS) << STEP_BITS)
            score = torch.where(usable & (seen != now), worth, score)
        # Among free rows one of the emptier set, and there the first.
        room = free.view(-1, 2, WAYS).sum(2).repeat_interleave(WAYS, dim=1)
        return torch.where(free, _WAY.to(rows.device) - WAYS * (room + 1), score)


def _first_of_each(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different `rows`, sorted, and where each of them comes first."""
    order = torch.sort(rows, stable=True)
    first = torch.ones_like(order.values, dtype=torch.bool)
    first[1:] = order.values[1:] != order.values[:-1]
    return order.values[first], order.indices[first]

# SPDX-License-Identifier: MIT
"""Which id lies in which row of a bounded table: found, touched, placed, let go of.

Everything is arithmetic on whole tensors; the loop of `place` runs over rounds, in each of which
every id takes the best row it may and the first of those that want the same one gets it. This is
what a dynamic table costs beside another one, so which of the rows of a set are free, or hold the
id that is looked for, is worked on as a byte a set; and one-dimensional gathers and scatters stand
where indexing would do, which takes several times as long.

Shapes: U ids, W rows that an id may take, two sets of 8 (`embeddings/dynamic/buckets.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from embeddings.dynamic.buckets import Layout, Places
from embeddings.schema.lifetime import MISSING_ID, WAYS

# `seen` of a row holds two numbers: the log's day above, the step below.
STEP_BITS = 40
_DAY_BITS, _STEP_MASK = 64 - STEP_BITS, (1 << STEP_BITS) - 1
# What a frequent id is worth holds three: its hits, the step, and which of the W rows it is in.
_AGE_BITS, _WAY_BITS = 36, 4
_AGE_MASK, _WAY_MASK = (1 << _AGE_BITS) - 1, (1 << _WAY_BITS) - 1
_MAX_HITS = (1 << 22) - 1
_NEVER = 2**63 - 1
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
# In how many turns `fill` gives rows.
_TURNS = 32
# Eight bytes, each 0 or 1, times this hold them in their highest byte, the first one lowest.
_GATHER_BITS = 0x0102040810204080


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
        """Return (U,) whether an id has a row, and the row (its default row if not).

        Of `MISSING_ID` neither means anything.
        """
        found = _bits(_take(self.ids, places.rows) == ids[:, None])
        way = _take(_byte_tables(ids.device)[0], found)
        way = torch.where(way[:, 0] < WAYS, way[:, 0], way[:, 1] + WAYS)
        has = way < 2 * WAYS
        row = places.rows.gather(1, way.clamp(max=2 * WAYS - 1)[:, None])[:, 0]
        return has, torch.where(has, row, places.default)

    def touch(self, rows: Tensor, now: int, counts: Tensor) -> None:
        """Note that the ids in `rows`, each once, were seen `counts` times."""
        self.seen.index_fill_(0, rows, now)
        hits = self.hits.index_select(0, rows).long() + counts
        self.hits.index_copy_(0, rows, _as_hits(hits))

    def place(
        self,
        ids: Tensor,
        places: Places,
        now: int,
        counts: Tensor,
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
            counts: (U,) int64, how often the new ids have been seen.
            eviction: which id goes where no row is free: `lru`, `lfu`, `none`.
            ways: (rows,) int64 or None; at a bucket's default row, how many rows of each set are in
              use. Where an id finds none, one is added.

        Returns:
            (U,) rows, -1 for ids that found none, and (U,) bool, whether another id had to leave.
        """
        given = torch.full_like(ids, -1)
        evicted = torch.zeros_like(ids, dtype=torch.bool)
        pending = torch.arange(len(ids), device=ids.device)
        growing = ways if ways is not None and (ways[places.default] < WAYS).any() else None
        while len(pending):
            is_free = _take(self.ids, places.rows) == MISSING_ID
            if growing is not None:
                is_free &= _way(ids.device) < growing[places.default][:, None]
            free = _bits(is_free)
            able = (free[:, 0] | free[:, 1]) != 0
            if growing is not None:
                grow = places.default[~able & (growing[places.default] < WAYS)]
                if len(grow):
                    growing[grow.unique()] += 1
                    continue
            some, every = bool(able.any()), bool(able.all())
            way = _first_of_emptier(free) if some else free[:, 0]
            leaves = torch.zeros_like(able)
            if eviction != "none" and not every:
                worst, may_leave = self._worst(places.rows, ids[pending], now, eviction)
                way = torch.where(able, way, worst)
                leaves = ~able & may_leave
                able = able | leaves
            tries = able.nonzero()[:, 0]
            row = places.rows.gather(1, way[:, None])[:, 0].index_select(0, tries)
            first = self._first_of_each(row)
            winners, row = tries[first], row[first]
            won = pending.index_select(0, winners)
            given.index_copy_(0, won, row)
            evicted.index_copy_(0, won, leaves[winners])
            self.ids.index_copy_(0, row, ids[won])
            self.seen.index_fill_(0, row, now)
            self.hits.index_copy_(0, row, _as_hits(counts[won]))
            lost = tries[~first]
            pending, places = pending[lost], places.at(lost)
        return given, evicted

    def fill(self, ids: Tensor, layout: Layout, ways: Tensor) -> Tensor:
        """Give U new ids, each once, rows while there is room; return (U,) rows, -1 for none.

        Those that come first get theirs first. ways: as for `place`.
        """
        given = torch.full_like(ids, -1)
        for turn in torch.arange(len(ids), device=ids.device).tensor_split(_TURNS):
            chosen, sorting = torch.sort(ids[turn])
            rows, _ = self.place(
                chosen,
                layout.places(chosen),
                0,
                torch.zeros_like(chosen),
                eviction="none",
                ways=ways,
            )
            given[turn[sorting]] = rows
        return given

    def _worst(self, rows: Tensor, ids: Tensor, now: int, eviction: str) -> tuple[Tensor, Tensor]:
        """Return (U,) the way of the id in (U, W) `rows` that is worth least, and if it may leave.

        What was seen `now` may not. Of equals each of the new `ids` prefers another one, so that
        fewer of them want the same row.
        """
        seen, ways = _take(self.seen, rows), torch.arange(rows.shape[1], device=rows.device)
        turn = ((ids * _SPREAD) >> 60) & _WAY_MASK
        ways = ways ^ turn[:, None]
        # Of `seen` the step alone: days go back where a run is repeated on an earlier log.
        if eviction == "lfu":
            hits = _take(self.hits, rows).long().clamp(max=_MAX_HITS)
            worth = (hits << _AGE_BITS) + (seen & _AGE_MASK)
            worth = torch.where(seen == now, _NEVER, (worth << _WAY_BITS) + ways)
            least = worth.amin(1)
            return (least & _WAY_MASK) ^ turn, least != _NEVER
        # Times this, the step stands highest and the day is out. The newest step is the largest.
        least = torch.add(ways, seen, alpha=1 << _DAY_BITS).amin(1)
        return (least & _WAY_MASK) ^ turn, least < (now & _STEP_MASK) << _DAY_BITS

    def _first_of_each(self, rows: Tensor) -> Tensor:
        """Return (U,) whether a row stands there for the first time; spoils the `hits` of all."""
        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        self.hits.scatter_reduce_(0, rows, order, "amin", include_self=False)
        return self.hits.index_select(0, rows) == order


@functools.cache
def _byte_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (256,) of each byte the lowest bit that is set (16: none), and how many are."""
    first = [2 * WAYS, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))]
    count = [byte.bit_count() for byte in range(256)]
    return torch.tensor(first, device=device), torch.tensor(count, device=device)


@functools.cache
def _way(device: torch.device) -> Tensor:
    """Return (W,) which row of its set each of the rows is that an id may take."""
    return torch.arange(WAYS, device=device).repeat(2)


def _bits(marks: Tensor) -> Tensor:
    """Return (U, 2) of (U, W) bool: a byte a set, its first row's bit the lowest."""
    return ((marks.view(torch.int64) * _GATHER_BITS) >> 56) & 0xFF


def _first_of_emptier(free: Tensor) -> Tensor:
    """Return (U,) the way of the first free row of the set with more of them; free: (U, 2) bits."""
    first, count = _byte_tables(free.device)
    room = _take(count, free)
    other = room[:, 1] > room[:, 0]
    chosen = torch.where(other, free[:, 1], free[:, 0])
    way = first.index_select(0, chosen)
    return way.clamp(max=WAYS - 1) + WAYS * other


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`, for rows of any shape."""
    return values.index_select(0, rows.flatten()).view(rows.shape)


def _as_hits(counts: Tensor) -> Tensor:
    return counts.clamp(max=2**31 - 1).int()

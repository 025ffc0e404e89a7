# SPDX-License-Identifier: MIT
"""Which id has which row of a bounded table: find ids, mark them as seen, place new ones, evict.

Everything is arithmetic on whole tensors. The loop of `place` runs over rounds: in each round every
id picks its best row, and the first of the ids that pick the same row gets it. This code is
what a dynamic table costs more than a hashed one. So a set's rows are one byte, with one bit a row
(is it free, does it hold the id). One-dimensional gathers and scatters are used in place of
indexing, which takes several times as long.

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
# The worth of an id under `lfu` packs three numbers: its hits, the step, and its row among the W.
_AGE_BITS, _WAY_BITS = 36, 4
_AGE_MASK, _WAY_MASK = (1 << _AGE_BITS) - 1, (1 << _WAY_BITS) - 1
_MAX_HITS = (1 << 22) - 1
_NEVER = 2**63 - 1
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
# `fill` places ids in this many parts, one after the other.
_TURNS = 32
# Eight bytes, each 0 or 1, times this number: the highest byte then has one bit per byte, the first
# byte's lowest.
_GATHER_BITS = 0x0102040810204080


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The ids of a shard's rows, when they were last seen, and how often.

    Attributes:
        ids: (rows,) int64, `MISSING_ID` for a free row.
        seen: (rows,) int64, 2^40 * day + step of the last occurrence.
        hits: (rows,) int32, occurrences since the id got its row.
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
        """Return (U,) whether an id has a row, and (U,) the row (its default row if not).

        For `MISSING_ID` neither result has a meaning.
        """
        found = _bits(_take(self.ids, places.rows) == ids[:, None])  # (U, W) bool -> (U, 2) bytes
        way = _take(_byte_tables(ids.device)[0], found)  # (U, 2) lowest bit of each set's byte
        way = torch.where(way[:, 0] < WAYS, way[:, 0], way[:, 1] + WAYS)  # (U,) 0 to W, W: none
        has = way < 2 * WAYS
        row = places.rows.gather(1, way.clamp(max=2 * WAYS - 1)[:, None])[:, 0]
        return has, torch.where(has, row, places.default)

    def touch(self, rows: Tensor, now: int, counts: Tensor) -> None:
        """Record that the ids in `rows` (unique) were seen `now`, `counts` times each."""
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
        """Give U new ids a row.

        Ids that were seen `now` are not evicted. Which rows are given does not depend on what
        happens in other buckets.

        Args:
            ids: (U,) int64, sorted and unique.
            places: where the ids may lie.
            now: 2^40 * day + step; the new ids count as seen now.
            counts: (U,) int64, how often the new ids have been seen.
            eviction: which id leaves where no row is free: `lru`, `lfu`, `none`.
            ways: (rows,) int64 or None; at a bucket's default row, how many rows of each set are in
              use. Where an id finds no free row, one is added to each set.

        Returns:
            (U,) rows, -1 for ids that found none, and (U,) bool, whether another id was evicted.
        """
        given = torch.full_like(ids, -1)  # (U,)
        evicted = torch.zeros_like(ids, dtype=torch.bool)  # (U,)
        # Below, U shrinks round by round to the ids that are still without a row.
        pending = torch.arange(len(ids), device=ids.device)
        growing = ways if ways is not None and (ways[places.default] < WAYS).any() else None
        while len(pending):
            free = _bits(self._is_free(places, growing))  # (U, 2)
            able = (free[:, 0] | free[:, 1]) != 0  # (U,) whether any row is free
            if growing is not None and _grow(growing, places.default[~able]):
                continue
            way, leaves = self._choose(free, able, places.rows, ids[pending], now, eviction)
            tries = (able | leaves).nonzero()[:, 0]
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
        """Give U new ids rows while there is room; earlier ids are placed first.

        Args:
            ids: (U,) int64, unique.
            layout: the buckets of this shard.
            ways: as for `place`.

        Returns:
            (U,) rows, -1 for ids without one.
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

    def _is_free(self, places: Places, growing: Tensor | None) -> Tensor:
        """Return (U, W) whether a row is free and, where sets grow, in use at all."""
        is_free = _take(self.ids, places.rows) == MISSING_ID
        if growing is not None:
            is_free &= _way(places.rows.device) < growing[places.default][:, None]
        return is_free

    def _choose(
        self, free: Tensor, able: Tensor, rows: Tensor, ids: Tensor, now: int, eviction: str
    ) -> tuple[Tensor, Tensor]:
        """Return (U,) the way each id takes, and (U,) whether another id is evicted for it.

        Args:
            free: (U, 2), the free rows of an id's two sets as bits.
            able: (U,), whether there are any.
            rows: (U, W), all rows that an id may take.
            ids: (U,), the new ids.
            now: as for `place`.
            eviction: as for `place`.
        """
        some, every = bool(able.any()), bool(able.all())
        way = _first_of_emptier(free) if some else free[:, 0]
        if eviction == "none" or every:
            return way, torch.zeros_like(able)
        worst, may_leave = self._worst(rows, ids, now, eviction)
        return torch.where(able, way, worst), ~able & may_leave

    def _worst(self, rows: Tensor, ids: Tensor, now: int, eviction: str) -> tuple[Tensor, Tensor]:
        """Return (U,) which of the W rows holds the id of least worth, and (U,) if it may leave.

        An id that was seen `now` may not. Among equals each of the new ids prefers another row, so
        that fewer of them pick the same one.
        """
        seen = _take(self.seen, rows)  # (U, W)
        ways = torch.arange(rows.shape[1], device=rows.device)  # (W,)
        turn = ((ids * _SPREAD) >> 60) & _WAY_MASK  # (U,) 0 to W - 1
        ways = ways ^ turn[:, None]  # (U, W), a permutation of the ways for each id
        # Only the step of `seen` counts: days go back where a run is repeated on an earlier log.
        if eviction == "lfu":
            hits = _take(self.hits, rows).long().clamp(max=_MAX_HITS)
            worth = (hits << _AGE_BITS) + (seen & _AGE_MASK)
            worth = torch.where(seen == now, _NEVER, (worth << _WAY_BITS) + ways)
            least = worth.amin(1)
            return (least & _WAY_MASK) ^ turn, least != _NEVER
        # Shifted left by the bits of the day, the step is on top and the day is gone.
        least = torch.add(ways, seen, alpha=1 << _DAY_BITS).amin(1)
        return (least & _WAY_MASK) ^ turn, least < (now & _STEP_MASK) << _DAY_BITS

    def _first_of_each(self, rows: Tensor) -> Tensor:
        """Return (U,) whether a row occurs for the first time; overwrites the `hits` of `rows`."""
        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        self.hits.scatter_reduce_(0, rows, order, "amin", include_self=False)
        return self.hits.index_select(0, rows) == order


def _grow(ways: Tensor, default: Tensor) -> bool:
    """Add one row to each set of full buckets that have more; return whether there was any.

    Args:
        ways: (rows,), at a bucket's default row how many rows of each set are in use; changed.
        default: the default rows of the buckets in which an id found no room.
    """
    grow = default[ways[default] < WAYS]
    if len(grow):
        ways[grow.unique()] += 1
    return len(grow) > 0


@functools.cache
def _byte_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each byte, (256,) its lowest set bit (16: none) and (256,) the number of them."""
    first = [2 * WAYS, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))]
    count = [byte.bit_count() for byte in range(256)]
    return torch.tensor(first, device=device), torch.tensor(count, device=device)


@functools.cache
def _way(device: torch.device) -> Tensor:
    """Return (W,) the position of each of an id's rows within its set."""
    return torch.arange(WAYS, device=device).repeat(2)


def _bits(marks: Tensor) -> Tensor:
    """Pack (U, W) bool into (U, 2): a byte a set, the bit of its first row the lowest."""
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

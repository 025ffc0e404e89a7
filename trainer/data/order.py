# SPDX-License-Identifier: MIT
"""Which rows each rank reads in an epoch, and in which order: arithmetic only, no data.

An epoch is one sequence of all rows, with row groups in an order that depends on (seed, epoch). The
sequence is cut by rows into one contiguous share per rank. Shares are cut into windows. The rows
inside a window are permuted by (seed, epoch, first row). A row group is never split and shuffled in
parts, because Parquet can only be decoded forward. Batches do not depend on the reader or its
number of workers.

An interrupted epoch is described by its legs: (ranks, batch size, window rows, steps done) of each
run that worked on it. From the legs, in order, follow the rows that every rank has left. They are
divided anew among the ranks of the next run, so an epoch continues exactly at any world size.

Shapes: positions count the rows of an epoch's sequence, 0 to its number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np

from trainer.data.files import LogFile, RowInterval
from trainer.data.hashing import permutation

Order = Literal["shuffle", "time", "none"]


class Piece(NamedTuple):
    """Rows `low` to `high` of a window, counted after its rows [start, stop) were permuted."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return self.high - self.low


class Leg(NamedTuple):
    """A run that worked on an epoch: each of `world_size` ranks took `num_steps` batches."""

    world_size: int
    batch_size: int
    window_rows: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """One read: pieces of the epoch and the intervals of the log that hold them.

    Attributes:
        pieces: the rows of the window.
        intervals: per piece, the intervals that hold its rows.
        key: the integers from which the rows of a piece are permuted; None keeps them in order.
    """

    pieces: tuple[Piece, ...]
    intervals: tuple[tuple[RowInterval, ...], ...]
    key: tuple[int, int] | None


class EpochOrder:
    """The sequence of rows of one epoch of a log.

    Args:
        files: the files of the log.
        order: `shuffle` permutes all row groups. `time` keeps days in order and permutes the row
            groups of each day; all ranks work through a day at the same pace. `none` keeps the rows
            of the log in order.
        seed: seed of the permutations.
        epoch: number of the epoch, from 0.

    Attributes:
        num_rows: rows of the epoch.
    """

    def __init__(self, files: Sequence[LogFile], order: Order, seed: int, epoch: int):
        units = [
            (
                file.path,
                row_group,
                rows,
                file.day,
                file.row_group_starts[row_group] if file.row_group_starts else 0,
            )
            for file in files
            for row_group, rows in enumerate(file.row_group_rows)
            if rows
        ]
        segments = [0, len(units)]
        if order == "time":
            per_day = [len(list(group)) for _, group in groupby(units, key=lambda unit: unit[3])]
            segments = [0, *np.cumsum(per_day).tolist()]
        if order != "none":
            units = [
                units[first + i]
                for segment, (first, last) in enumerate(pairwise(segments))
                for i in permutation(last - first, seed, epoch, segment)
            ]
        self._units = units
        self._bounds = np.concatenate(([0], np.cumsum([unit[2] for unit in units], dtype=np.int64)))
        self._segments = self._bounds[segments].tolist()
        self._key = None if order == "none" else (seed, epoch)
        self.num_rows = int(self._bounds[-1])

    def share(self, legs: Sequence[Leg], rank: int) -> list[Piece]:
        """Return the rows of `rank` in the last of `legs`, from that leg's first step on.

        The shares of one leg are disjoint. Together they are all rows that the earlier legs left.
        Their sizes differ by at most one row.
        """
        first, *later = legs
        if not later:
            return self._first_share(first, rank)
        shares = [self._first_share(first, old_rank) for old_rank in range(first.world_size)]
        for previous, leg in zip(legs, later, strict=False):
            done = previous.num_steps * previous.batch_size
            shares = self._cut_anew([cut(pieces, done, None) for pieces in shares], leg.world_size)
        return shares[rank]

    def _cut_anew(self, shares: list[list[Piece]], world_size: int) -> list[list[Piece]]:
        """Divide the rows of `shares` among `world_size` ranks."""
        left = sorted(piece for share in shares for piece in share)
        anew: list[list[Piece]] = [[] for _ in range(world_size)]
        carry = 0
        for first, last in pairwise(self._segments):
            pieces = [piece for piece in left if first <= piece.start < last]
            bounds = _bounds(sum(piece.num_rows for piece in pieces), world_size, carry)
            carry += bounds[-1]
            for rank in range(world_size):
                anew[rank] += cut(pieces, bounds[rank], bounds[rank + 1])
        return anew

    def _first_share(self, leg: Leg, rank: int) -> list[Piece]:
        """Divide the whole epoch among the ranks, and cut the share of `rank` into windows."""
        pieces: list[Piece] = []
        taken = carry = 0
        for first, last in pairwise(self._segments):
            bounds = _bounds(last - first, leg.world_size, carry)
            carry += last - first
            start, stop = first + bounds[rank], first + bounds[rank + 1]
            while start < stop:
                end = min(start + leg.window_rows - taken % leg.window_rows, stop)
                pieces.append(Piece(start, end, 0, end - start))
                taken += end - start
                start = end
        return pieces

    def largest_share(self, legs: Sequence[Leg]) -> int:
        """Return the number of rows of the largest share in the last of `legs`."""
        left = self.num_rows
        for leg in legs[:-1]:
            done = leg.num_steps * leg.batch_size
            # Shares differ by at most a row: `left % world_size` ranks hold one row more.
            small, extra = divmod(left, leg.world_size)
            left = extra * max(small + 1 - done, 0)
            left += (leg.world_size - extra) * max(small - done, 0)
        return -(-left // legs[-1].world_size)

    def windows(self, share: Sequence[Piece], window_rows: int, skip: int = 0) -> Iterator[Window]:
        """Yield the reads of a share from row `skip` on, cut at multiples of `window_rows`."""
        total = sum(piece.num_rows for piece in share)
        position, pieces = skip, list(share)
        offset = 0
        while position < total:
            end = min(position + window_rows - position % window_rows, total)
            while offset + pieces[0].num_rows <= position:
                offset += pieces.pop(0).num_rows
            chosen = tuple(cut(pieces, position - offset, end - offset))
            intervals = tuple(tuple(self.intervals(piece)) for piece in chosen)
            yield Window(pieces=chosen, intervals=intervals, key=self._key)
            position = end

    def intervals(self, piece: Piece) -> Iterator[RowInterval]:
        """Yield the intervals of a piece's window; only its own rows if nothing is permuted."""
        start, stop = piece.start, piece.stop
        if self._key is None:
            start, stop = piece.start + piece.low, piece.start + piece.high
        unit = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while start < stop:
            path, row_group, rows, _, offset = self._units[unit]
            first = int(self._bounds[unit]) - offset
            end = min(first + offset + rows, stop)
            yield RowInterval(path=path, row_group=row_group, start=start - first, stop=end - first)
            start, unit = end, unit + 1


def cut(pieces: Sequence[Piece], first: int, last: int | None) -> list[Piece]:
    """Return rows `first` to `last` (None: to the end) of a run of pieces."""
    kept: list[Piece] = []
    offset = 0
    for piece in pieces:
        if last is not None and offset >= last:
            break
        low = max(first - offset, 0)
        high = piece.num_rows if last is None else min(last - offset, piece.num_rows)
        if low < high:
            kept.append(piece._replace(low=piece.low + low, high=piece.low + high))
        offset += piece.num_rows
    return kept


def _bounds(num_rows: int, world_size: int, carry: int) -> list[int]:
    """Return the bounds of the ranks' parts of `num_rows` rows.

    Args:
        num_rows: rows to divide.
        world_size: number of ranks.
        carry: rows divided before; it selects the ranks that get one row more.
    """
    sizes = np.full(world_size, num_rows // world_size)
    sizes[(carry + np.arange(num_rows % world_size)) % world_size] += 1
    return [0, *np.cumsum(sizes).tolist()]

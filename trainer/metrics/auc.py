# SPDX-License-Identifier: MIT
"""The area under the ROC curve of a stream of scores, in bounded memory, mergeable over ranks.

AUC = P(score of a positive > score of a negative) + P(equal) / 2. A histogram with bins fixed
beforehand fails on click logs: at 0.1 % CTR, or with all scores within 1e-4, most of the
mass falls into a few bins. Averaging the AUC of ranks or batches is not AUC at all.

So the bins follow the data. A bin is a half-open interval of the score's rank-preserving float32
bits, with its weight of positives and negatives. Every distinct score is a bin of its own, and the
result is exact, until `max_bins` is passed; then neighbours are joined so that no joined bin holds
more than 1.5 t of the mass m = (share of positives + share of negatives) / 2, with t = 8 /
max_bins. A single score that is heavier stays alone. Within a bin the order is unknown and counts
1/2, hence

    error <= 1/2 sum_b p_b n_b <= 1/2 sum_b m_b^2 <= 0.75 t,    3.8e-6 at the default 1.5 M bins

whatever the distribution. Later scores join the bin they fall into, unless it would grow past 2 t:
then they stay apart and cut that bin, whose older mass is spread evenly over the pieces. The bins
of two ranks are merged in the same way where they overlap.

Shapes: N scores, M bins.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_BINS = 3 * 2**19
BUFFER_ROWS = 2**19


def rank_keys(scores: NDArray[np.float32]) -> Ints:
    """Return int64 keys (N,) that order as `scores` (N,) float32 do, ±0 being equal."""
    # (N,) the sign and magnitude of the float as a signed integer; adding 0 turns -0 into +0.
    bits = (scores + np.float32(0)).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


def sorted_runs(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Return `keys` (N,) sorted, the order that does it, and where each run of equals starts."""
    # torch sorts with an index twice as fast as NumPy does.
    values, order = (part.numpy() for part in torch.sort(torch.from_numpy(keys)))
    # (N,) whether a key differs from the one before it.
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return values, order, np.flatnonzero(changes)


class ScoreDistribution:
    """Weights of positives and negatives over ordered scores.

    Args:
        max_bins: Bins kept between additions; 32 bytes each.
        buffer_rows: Rows collected before they are sorted.

    Raises:
        ValueError: fewer than 64 bins.
    """

    def __init__(self, max_bins: int = MAX_BINS, buffer_rows: int = BUFFER_ROWS) -> None:
        if max_bins < 64:
            raise ValueError(f"max_bins must be at least 64, got {max_bins}")
        self.max_bins = max_bins
        self.buffer_rows = buffer_rows
        self.tolerance = 8 / max_bins
        self._low: Ints = np.empty(0, np.int64)
        self._high: Ints = np.empty(0, np.int64)
        self._positive: Floats = np.empty(0)
        self._negative: Floats = np.empty(0)
        self._pending: list[tuple[NDArray[np.float32], NDArray, NDArray]] = []
        self._num_pending = 0

    def add(self, scores: NDArray[np.float32], positive: NDArray, negative: NDArray) -> None:
        """Add scores (N,) float32, with their weights as a positive and as a negative (N,)."""
        self._pending.append((scores, positive, negative))
        self._num_pending += len(scores)
        if self._num_pending >= self.buffer_rows:
            self._fold()

    @property
    def state_bytes(self) -> int:
        """Bytes held: under 64 MiB at the defaults, however many rows have been added."""
        held = (self._low, self._high, self._positive, self._negative)
        pending = (part for parts in self._pending for part in parts)
        return sum(part.nbytes for part in (*held, *pending))

    def auc(self) -> float:
        """Return the AUC, in [0, 1]; NaN if a class has no weight."""
        self._fold()
        return binary_auc(self._positive, self._negative)

    def standard_error(self, positive_rows: float, negative_rows: float) -> float:
        """Return the AUC's standard error for so many independent rows of each class, or NaN.

        DeLong's estimate: the variance, over the positives, of the share of negatives below each,
        and the mirror image. With weights, the number of rows is the effective one, (sum w)^2 / sum
        w^2.
        """
        self._fold()
        # (M,) each.
        below_P, above_N = _placements(self._positive, self._negative)
        variance = 0.0
        for placement, weight, rows in (
            (below_P, self._positive, positive_rows),
            (above_N, self._negative, negative_rows),
        ):
            if not weight.sum() or rows <= 1:
                return math.nan
            mean = np.average(placement, weights=weight)
            variance += np.average((placement - mean) ** 2, weights=weight) / (rows - 1)
        return math.sqrt(variance)

    def merge(self, other: ScoreDistribution) -> None:
        """Add everything `other` holds."""
        other._fold()
        self._fold()
        self._merge(other._low, other._high, other._positive, other._negative)

    def reduce_to_first(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Merge all ranks' distributions into group rank 0's. Collective over `group`.

        Ranks merge pairwise, so that no rank holds more than two distributions.

        Args:
            group: The ranks that hold scores.
            device: Where the backend can send from.
        """
        self._fold()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        step = 1
        while step < size:
            if rank % (2 * step) == step:
                state = np.stack([self._low, self._high, self._positive, self._negative])
                length = torch.tensor([state.shape[1]], device=device)
                dist.send(length, group=group, group_dst=rank - step)
                if state.size:
                    dist.send(
                        torch.from_numpy(state).to(device), group=group, group_dst=rank - step
                    )
                return
            if rank + step < size:
                length = torch.zeros(1, dtype=torch.int64, device=device)
                dist.recv(length, group=group, group_src=rank + step)
                if length.item():
                    received = torch.empty(
                        4, int(length.item()), dtype=torch.float64, device=device
                    )
                    dist.recv(received, group=group, group_src=rank + step)
                    low, high, positive, negative = received.cpu().numpy()
                    self._merge(low.astype(np.int64), high.astype(np.int64), positive, negative)
            step *= 2

    def _fold(self) -> None:
        """Move pending rows into bins."""
        if not self._num_pending:
            return
        scores, positive, negative = (
            np.concatenate(part) for part in zip(*self._pending, strict=True)
        )
        self._pending, self._num_pending = [], 0
        # (N,) sorted rows, then (D,) distinct scores with the weights of each class.
        keys, order, starts = sorted_runs(rank_keys(scores))
        keys = keys[starts]
        positive = np.add.reduceat(positive[order], starts, dtype=np.float64)
        negative = np.add.reduceat(negative[order], starts, dtype=np.float64)
        # (D,) the last bin that starts at or below a score, and whether the score lies within it.
        owner = np.searchsorted(self._low, keys, "right") - 1
        inside = owner >= 0
        inside[inside] = keys[inside] < self._high[owner[inside]]
        crowded = self._absorb(owner, inside, positive, negative)
        fresh = ~inside
        low = np.concatenate([self._low, keys[fresh]])
        order = np.argsort(low, kind="stable")
        self._low = low[order]
        self._high = np.concatenate([self._high, keys[fresh] + 1])[order]
        self._positive = np.concatenate([self._positive, positive[fresh]])[order]
        self._negative = np.concatenate([self._negative, negative[fresh]])[order]
        if crowded.any():
            keys = keys[crowded]
            self._merge(keys, keys + 1, positive[crowded], negative[crowded])
        self._bound()

    def _absorb(
        self, owner: Ints, inside: NDArray[np.bool_], positive: Floats, negative: Floats
    ) -> NDArray[np.bool_]:
        """Add scores to the bins they fall into; return those whose bin would become too heavy."""
        crowded = np.zeros(len(owner), bool)
        if not inside.any():
            return crowded
        # (M,) the weights that would be added to each bin, and its share of all mass with them.
        bins = len(self._low)
        more_positive = np.bincount(owner[inside], positive[inside], bins)
        more_negative = np.bincount(owner[inside], negative[inside], bins)
        share = (self._positive + more_positive) / (self._positive.sum() + positive.sum() or 1.0)
        share += (self._negative + more_negative) / (self._negative.sum() + negative.sum() or 1.0)
        heavy = (self._high - self._low > 1) & (share / 2 > 2 * self.tolerance)
        crowded[inside] = heavy[owner[inside]]
        self._positive += np.where(heavy, 0, more_positive)
        self._negative += np.where(heavy, 0, more_negative)
        return crowded

    def _merge(self, low: Ints, high: Ints, positive: Floats, negative: Floats) -> None:
        """Add sorted bins; overlapping bins are cut at each other's edges, mass spread evenly."""
        parts = [
            (self._low, self._high, self._positive, self._negative),
            (low, high, positive, negative),
        ]
        # (E,) all edges; (3, E) positives, negatives and bins of the piece that starts at an edge.
        edges = np.unique(np.concatenate([self._low, self._high, low, high]))
        totals = np.zeros((3, len(edges)))
        for low, high, positive, negative in parts:
            # (M,) the first piece of each bin and how many pieces it is cut into.
            first = np.searchsorted(edges, low)
            counts = np.searchsorted(edges, high) - first
            # (pieces,) the bin of each piece, where the piece starts, its share of the bin.
            owner, place = _repeat(counts)
            slot = first[owner] + place
            share = (edges[slot + 1] - edges[slot]) / (high - low)[owner]
            for row, mass in enumerate((positive, negative, np.ones(len(low)))):
                totals[row] += np.bincount(slot, mass[owner] * share, len(edges))
        used = np.flatnonzero(totals[2])
        self._low, self._high = edges[used], edges[used + 1]
        self._positive, self._negative = totals[0, used], totals[1, used]
        self._bound()

    def _bound(self) -> None:
        """Join light neighbours if there are too many bins."""
        if len(self._low) <= self.max_bins:
            return
        # (M,) m of each bin, whether it stays alone, and the group it is joined into.
        mass = self._positive / (self._positive.sum() or 1.0)
        mass = (mass + self._negative / (self._negative.sum() or 1.0)) / 2
        alone = mass > self.tolerance / 2
        level = ((np.cumsum(mass) - mass) / self.tolerance).astype(np.int64)
        opens = np.ones(len(mass), bool)
        opens[1:] = (level[1:] != level[:-1]) | alone[1:] | alone[:-1]
        starts = np.flatnonzero(opens)
        ends = np.append(starts[1:], len(mass)) - 1
        self._low, self._high = self._low[starts], self._high[ends]
        self._positive = np.add.reduceat(self._positive, starts)
        self._negative = np.add.reduceat(self._negative, starts)


def binary_auc(positive: Floats, negative: Floats) -> float:
    """Return the AUC of weights (M,) per distinct score, ascending; NaN if a class is absent."""
    total = positive.sum() * negative.sum()
    if not total:
        return math.nan
    # (M,) negatives below each score, its own counted half.
    below = np.cumsum(negative) - negative / 2
    return min(max(float(positive @ below / total), 0.0), 1.0)


def _placements(positive: Floats, negative: Floats) -> tuple[Floats, Floats]:
    """Return, per bin, the share of negatives below and of positives above it (ties half)."""
    below = (np.cumsum(negative) - negative / 2) / (negative.sum() or 1.0)
    above = 1 - (np.cumsum(positive) - positive / 2) / (positive.sum() or 1.0)
    return below, above


def _repeat(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for counts (M,), every copy's owner and its place among the owner's copies."""
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, place

# SPDX-License-Identifier: MIT
"""Grouped AUC: how well each user's own impressions are ordered.

GAUC = sum_u w_u AUC_u / sum_u w_u over the users that have both classes, w_u the user's weight of
impressions (Zhu et al., "Optimized Cost per Click in Taobao Display Advertising"); the
unweighted form is the plain mean over the same users. A user's rows may lie on any rank, so rows
are sent to the rank that owns the user's hash, and only five numbers per label travel after that.

Memory is bounded by `max_rows`: when a rank holds more, half of the users are dropped, chosen by
hash, so the same users on every rank and in every run; the share that remains is reported.

Shapes: N rows, K labels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.metrics.auc import rank_keys, sorted_runs

MAX_ROWS = 10_000_000
# The group of a row whose user is unknown. Unknown users are not one user: their rows are left out.
NO_USER = -(2**63)


class UserAreas(NamedTuple):
    """U users: hashed ids, numbers of rows, weights, and AUC (NaN without both classes)."""

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    weight: NDArray[np.float64]
    auc: NDArray[np.float64]


class GroupedRows:
    """Rows kept for GAUC: 8 + 12 K bytes each.

    Args:
        num_labels: K.
        max_rows: Rows a rank keeps before it halves the users.

    Raises:
        ValueError: max_rows is not positive.
    """

    def __init__(self, num_labels: int, max_rows: int = MAX_ROWS) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self.num_labels = num_labels
        self.max_rows = max_rows
        self.halvings = 0
        self._groups: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[np.float32]] = []
        self._num_rows = 0

    def add(self, groups: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Add groups (N,) and rows (N, 3, K): score, weight as a positive, weight as a negative.

        Rows of `NO_USER` are left out.
        """
        known = groups != NO_USER
        if not known.all():
            groups, rows = groups[known], rows[known]
        if self.halvings:
            kept = _kept(groups, self.halvings)
            groups, rows = groups[kept], rows[kept]
        self._groups.append(groups)
        self._rows.append(rows)
        self._num_rows += len(groups)
        while self._num_rows > self.max_rows:
            self._halve(self.halvings + 1)

    def sums(self, group: dist.ProcessGroup | None, device: torch.device | None) -> torch.Tensor:
        """Return (K, 5) float64: sum w AUC, sum w, sum AUC, count, largest w.

        Over users with both classes. Collective if `device` is not None.

        Args:
            group: The ranks that hold rows.
            device: Where the backend can communicate from, or None for one process.
        """
        # (N,) and (N, 3, K), then (K, 5).
        codes, _, rows = self._owned(group, device)
        sums = torch.from_numpy(
            np.stack([_label_sums(codes, rows[:, :, k]) for k in range(self.num_labels)])
        )
        if device is not None:
            # Collectives want contiguous memory, which a slice of columns is not.
            total, largest = (one.contiguous().to(device) for one in (sums[:, :4], sums[:, 4:]))
            dist.all_reduce(total, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            sums = torch.cat([total, largest], 1)
        return sums.cpu()

    def areas(
        self, k: int, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> UserAreas:
        """Return the users that this rank owns, by label `k`. Collective if `device` is not None.

        A row counts if it has weight for the label.
        """
        codes, ids, rows = self._owned(group, device)
        # (users with rows of weight,) each.
        found, count, positive, negative, wins = _user_sums(codes, rows[:, :, k])
        with np.errstate(invalid="ignore"):
            auc = np.where((positive > 0) & (negative > 0), wins / (positive * negative), np.nan)
        return UserAreas(ids[found], count, positive + negative, auc)

    def _owned(
        self, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Return the rows of the users that this rank owns, and each row's user as a number.

        That is: numbers (N,), ids by number (U,), rows (N, 3, K).
        """
        if device is not None:
            level = torch.tensor(self.halvings, device=device)
            dist.all_reduce(level, dist.ReduceOp.MAX, group)
            if int(level) > self.halvings:
                self._halve(int(level))
        groups, rows = self._joined()
        if device is not None:
            groups, rows = _exchange(groups, rows, group, device)
        # (N,) each group's number among the sorted distinct groups, in the order of the rows.
        codes = np.empty_like(groups)
        values, order, starts = sorted_runs(groups)
        codes[order] = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(groups))))
        return codes, values[starts], rows

    @property
    def share(self) -> float:
        """Expected share of users kept: 1 until max_rows is passed."""
        return 0.5**self.halvings

    def _joined(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return all rows as one pair of arrays, and keep them so."""
        groups = np.concatenate([np.empty(0, np.int64), *self._groups])
        rows = np.concatenate([np.empty((0, 3, self.num_labels), np.float32), *self._rows])
        self._groups, self._rows = [groups], [rows]
        return groups, rows

    def _halve(self, halvings: int) -> None:
        """Keep the users that survive so many halvings."""
        groups, rows = self._joined()
        kept = _kept(groups, halvings)
        self._groups, self._rows = [groups[kept]], [rows[kept]]
        self._num_rows, self.halvings = int(kept.sum()), halvings


def _hash(groups: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return well-mixed 64 bits per group: splitmix64, whose offset makes 0 an ordinary value."""
    mixed = groups.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _kept(groups: NDArray[np.int64], halvings: int) -> NDArray[np.bool_]:
    """Return which rows belong to users that survive; after 64 halvings, none."""
    if halvings >= 64:
        return np.zeros(len(groups), bool)
    return _hash(groups) >> np.uint64(64 - halvings) == 0


def _exchange(
    groups: NDArray[np.int64],
    rows: NDArray[np.float32],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Send every row to the rank that owns its group; return the rows this rank owns."""
    size = dist.get_world_size(group)
    # (N,) the rank that owns each row; (ranks,) rows for each rank and from each rank.
    owner = (_hash(groups) % np.uint64(size)).astype(np.int64)
    order = np.argsort(owner, kind="stable")
    sent = torch.from_numpy(np.bincount(owner, minlength=size)).to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    outgoing, incoming = sent.tolist(), received.tolist()
    result = []
    for array in (groups, rows):
        source = torch.from_numpy(array[order]).to(device)
        target = source.new_empty((sum(incoming), *source.shape[1:]))
        dist.all_to_all_single(target, source, incoming, outgoing, group=group)
        result.append(target.cpu().numpy())
    return result[0], result[1]


def _label_sums(codes: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return (5,): sum w AUC, sum w, sum AUC, count, largest w over the groups with both classes.

    Args:
        codes: (N,) group numbers below 2^31.
        rows: (N, 3) score, weight as a positive, weight as a negative.
    """
    _, _, positive, negative, wins = _user_sums(codes, rows)
    both = (positive > 0) & (negative > 0)
    auc = wins[both] / (positive[both] * negative[both])
    weight = positive[both] + negative[both]
    return np.array([weight @ auc, weight.sum(), auc.sum(), len(auc), weight.max(initial=0.0)])


def _user_sums(
    codes: NDArray[np.int64], rows: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], *tuple[NDArray[np.float64], ...]]:
    """Return, per group that has rows: its number, rows, weights of both classes, weight of wins.

    Args:
        codes: (N,) group numbers below 2^31.
        rows: (N, 3) score, weight as a positive, weight as a negative.
    """
    # (N,) rows with weight.
    present = (rows[:, 1] > 0) | (rows[:, 2] > 0)
    codes, rows = codes[present], rows[present]
    if not len(codes):
        return codes, codes, np.zeros(0), np.zeros(0), np.zeros(0)
    # One 64-bit key sorts by group, then score; a run is one (group, distinct score).
    keys = (codes << 32) + (rank_keys(np.ascontiguousarray(rows[:, 0])) + 2**31)
    keys, order, starts = sorted_runs(keys)
    # (runs,) weights of each class in a run; `wins`: weight of pairs in which the positive wins.
    positive, negative = np.add.reduceat(rows[order, 1:], starts, axis=0, dtype=np.float64).T
    # (runs,) rows and group of a run; (groups,) the first run of each group.
    sizes = np.diff(np.append(starts, len(keys)))
    codes = keys[starts] >> 32
    group_starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    # Negatives below a run within its group: the running sum less what earlier groups add to it.
    below = np.cumsum(negative)
    before = np.repeat(
        (below - negative)[group_starts], np.diff(np.append(group_starts, len(codes)))
    )
    # (runs,) wins of a run, then (groups,) sums over the runs of each group.
    wins = positive * (below - negative / 2 - before)
    count, positive, negative, wins = (
        np.add.reduceat(part, group_starts) for part in (sizes, positive, negative, wins)
    )
    return codes[group_starts], count, positive, negative, wins

# SPDX-License-Identifier: MIT
"""Intervals of metrics, of one model or of several on the same rows: a streaming bootstrap.

A Poisson bootstrap over users: rows of one user are not independent, so they are drawn together;
a row without a user is drawn alone. In replicate m a user counts Poisson(1) times, by a hash of the
user and m. Every rank draws the same without communication, and so does every model, which makes
the interval of a difference one of the models and not of the rows (Chamandy et al., "Estimating
Uncertainty for Massive Data Streams", 2012).

A replicate needs sums and a histogram of scores, not rows. The bins are quantiles of the first
batches of all ranks; within a bin the order counts half. That shifts all replicates alike, so the
replicates are moved to where the exact metric is.

Shapes: B examples, Q models, M replicates (the first of M + 1 counts every row once), S score bins,
T sums, U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.data.hashing import mix64
from trainer.metrics import functions
from trainer.metrics.gauc import NO_USER, UserAreas
from trainer.metrics.metrics import Metrics, communication_device
from trainer.metrics.spec import METRICS, with_intervals

Floats = NDArray[np.float64]
LEVEL = (2.5, 97.5)
BINS = 2_048
# Updates whose scores decide the bins; all ranks make the same number of updates.
_FIRST_UPDATES = 16
_CHUNK_ROWS = 8_192
# Rows without a user are drawn by numbers from here on, which are no user's in practice.
_UNKNOWN = 1 << 62
# Draws by the upper 16 bits of a hash: how often Poisson(1) is 0, 1, 2, ...
_POISSON = np.searchsorted(
    np.cumsum(np.exp(-1) / np.array([1, 1, 2, 6, 24, 120, 720, 5040, 40320])),
    (np.arange(2**16) + 0.5) / 2**16,
).astype(np.uint8)


class Bootstrap:
    """The replicates of Q columns of a `Metrics` that sees the same rows.

    The columns are predictions of the same labels with the same weights. `update` with every
    batch, `finish` once; then the replicates are read.

    Args:
        metrics: What sees the same rows; its users' areas are taken from it.
        columns: Q of its columns.
        replicates: M.
        bins: S, at most.

    Attributes:
        histogram: (Q, S, 2) weights of positives and negatives, after `finish`.
        predicted: (Q, S) sums of w p, after `finish`.
        edges: Q arrays between the bins.
        counts: (Q, S) rows of each model in the bins of the last one, after `finish`.
        users: Of each column this rank's users, after `finish`; empty without users.
    """

    def __init__(
        self,
        metrics: Metrics,
        columns: Sequence[int] = (0,),
        replicates: int = 100,
        bins: int = BINS,
    ) -> None:
        self.metrics, self.columns, self.replicates = metrics, list(columns), replicates
        self._bins = bins
        self._terms = functions.terms()
        self._first: list[tuple[NDArray, ...]] = []
        self.edges: list[NDArray[np.float32]] = []
        self.users: list[UserAreas] = []
        self._updates = self._rows = 0
        # Each 64-bit hash gives four draws.
        keys = np.arange(1, replicates // 4 + 2, dtype=np.int64) * 0x2545F4914F6CDD1D
        self._keys = mix64(keys).view(np.int64)
        self._sums = np.zeros((len(self._terms), replicates + 1, len(self.columns)))
        # The largest drawn number, and the largest of their negatives less 1.
        self._extremes = np.full(2, -(2**63), np.int64)

    def update(
        self,
        predictions: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        groups: torch.Tensor,
    ) -> None:
        """Add a batch. Collective once: every rank makes as many calls.

        Args:
            predictions: (B, K) probabilities, as `Metrics.update` takes them.
            labels: (B, K); those of the first column count.
            weights: (B, K); those of the first column count.
            groups: (B,) int64, the user.
        """
        # (B, Q) scores; (B,) targets, weights and users.
        scores = predictions[:, self.columns].detach().to("cpu", torch.float32).numpy()
        targets, weight = (
            one[:, self.columns[0]].detach().to("cpu", torch.float32).numpy()
            for one in (labels, weights)
        )
        users = groups.detach().to("cpu", torch.int64).numpy()
        group = self.metrics.process_group
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        alone = _UNKNOWN + self._rows + np.arange(len(scores)) + (rank << 44)
        users = np.where((users == NO_USER) | ~users.any(), alone, users)
        self._rows += len(scores)
        counted = (weight > 0) & np.isfinite(scores).all(1)
        part = tuple(one[counted] for one in (scores, targets, weight, users))
        self._updates += 1
        if self.edges:
            self._add(*part)
            return
        self._first.append(part)
        if self._updates == _FIRST_UPDATES:
            self._fix_edges()

    def finish(self, exact: Sequence[Mapping[str, float]]) -> None:
        """End the rows: merge the replicates of all ranks. Collective.

        Args:
            exact: Q results of the metrics, around which the replicates are laid.
        """
        if not self.edges:
            self._fix_edges()
        # (2, M + 1, Q): sums of w AUC and of w over the users.
        grouped = np.zeros((2, self.replicates + 1, len(self.columns)))
        if self.metrics.has_users:
            self.users = [self.metrics.user_areas(column) for column in self.columns]
            for model, users in enumerate(self.users):
                grouped[..., model] = self._of_users(users)
        histogram, counts = self._histogram, self._counts
        parts = [self._sums, histogram, self._predicted, counts, grouped]
        sums, histogram, self.predicted, self.counts, grouped = self._reduced(parts)
        self.histogram = histogram[:, 0]
        # (Q, M + 1, S) each: positives, and the negatives below each bin, its own counted half.
        positive, negative = histogram[..., 0], histogram[..., 1]
        below = np.cumsum(negative, 2) - negative / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            # (Q, M + 1)
            area = (positive * below).sum(2) / (positive.sum(2) * negative.sum(2))
        found = functions.values(
            {
                **dict(zip(self._terms, sums, strict=True)),
                "area": area.T,
                "user_area": grouped[0],
                "user_weight": grouped[1],
            }
        )
        self._drawn = {name: self._placed(name, found[name], exact) for name in with_intervals()}

    def drawn(self, name: str) -> Floats:
        """Return (M + 1, Q): the exact value of a metric, then its replicates."""
        return self._drawn[name]

    def interval(self, name: str, model: int = 0) -> tuple[float, list[float]]:
        """Return the value of a metric and its 95 % interval."""
        return of_draws(self._drawn[name][:, model])

    def _placed(self, name: str, found: Floats, exact: Sequence[Mapping[str, float]]) -> Floats:
        """Return replicates (M + 1, Q) moved so that the first is the exact value.

        One user's rows do not say how others would differ: the replicates are NaN.
        """
        values = np.array([one.get(name, np.nan) for one in exact])
        with np.errstate(invalid="ignore"):
            found = found - found[0] + values
        found[0] = values
        one_user = METRICS[name].per_user and any(one.get("gauc_users", 0) < 2 for one in exact)
        if self._one_cluster or one_user:
            found[1:] = np.nan
        return found

    def _reduced(self, parts: list[Floats]) -> list[Floats]:
        """Return the sums of `parts` over all ranks. Collective."""
        device, group = communication_device(self.metrics.process_group), self.metrics.process_group
        extremes = torch.from_numpy(self._extremes)
        if device is not None:
            extremes = extremes.to(device)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
            flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)
            dist.all_reduce(flat, group=group)
            ends = np.cumsum([part.size for part in parts])[:-1]
            pieces = np.split(flat.cpu().numpy(), ends)
            parts = [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        largest, smallest = extremes.tolist()
        self._one_cluster = largest == -1 - smallest
        return parts

    def _fix_edges(self) -> None:
        """Set the bins from the first batches of all ranks. Collective."""
        device, group = communication_device(self.metrics.process_group), self.metrics.process_group
        grid = np.linspace(0, 1, self._bins + 1)
        none = np.empty((0, len(self.columns)), np.float32)
        # (rows, Q) of this rank's first batches.
        scores = np.concatenate([none, *(part[0] for part in self._first)])
        for model in range(len(self.columns)):
            # (S + 1,) quantiles of this rank, then of all ranks' quantiles; NaN without rows.
            own = np.quantile(scores[:, model], grid) if len(scores) else np.full(len(grid), np.nan)
            found = torch.from_numpy(np.asarray(own, np.float64))
            if device is not None:
                size = dist.get_world_size(group)
                every = found.new_empty(size * len(found), device=device)
                dist.all_gather_into_tensor(every, found.to(device), group=group)
                found = every.cpu()
            present = found.numpy()[~np.isnan(found.numpy())]
            inner = np.quantile(present, grid[1:-1]) if len(present) else np.array([0.5])
            self.edges.append(np.unique(inner.astype(np.float32)))
        models, bins = len(self.columns), 1 + max(len(one) for one in self.edges)
        self._histogram = np.zeros((models, self.replicates + 1, bins, 2))
        self._predicted, self._counts = np.zeros((models, bins)), np.zeros((models, bins))
        for part in self._first:
            self._add(*part)
        self._first = []

    def _add(self, scores: NDArray, labels: NDArray, weights: NDArray, users: NDArray) -> None:
        """Add rows to sums and histograms: scores (B, Q), the others (B,)."""
        if len(users):
            ends = users.max(), -1 - users.min()
            self._extremes = np.maximum(self._extremes, ends)
        bins = self._histogram.shape[2]
        for start in range(0, len(scores), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            label, weight = (one[part].astype(np.float64) for one in (labels, weights))
            draws = self._draw(users[part])  # (M + 1, rows)
            for model, edges in enumerate(self.edges):
                narrow = scores[part, model]
                score = narrow.astype(np.float64)
                # (rows, T); (M + 1, rows) @ (rows, T) -> (M + 1, T).
                terms = np.stack([term(score, label) for term in self._terms.values()], 1)
                self._sums[..., model] += (draws @ (weight[:, None] * terms)).T
                place = np.searchsorted(edges, narrow, side="right")
                self._add_bins(model, place, draws, weight, label)
                self._predicted[model] += np.bincount(place, weight * score, bins)
                last = np.searchsorted(self.edges[-1], narrow, side="right")
                self._counts[model] += np.bincount(last, minlength=bins)

    def _add_bins(
        self, model: int, place: NDArray, draws: Floats, weight: Floats, label: Floats
    ) -> None:
        """Add a chunk's rows to the histograms of all replicates; place: (rows,) bins."""
        order = np.argsort(place, kind="stable")
        ordered = place[order]
        # Where each run of rows of the same bin starts.
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        # (M + 1, rows) by bin; the sums over each run are (M + 1, runs).
        drawn = draws[:, order]
        for column, mass in enumerate((weight * label, weight * (1 - label))):
            self._histogram[model][:, ordered[starts], column] += np.add.reduceat(
                drawn * mass[order], starts, axis=1
            )

    def _of_users(self, users: UserAreas) -> Floats:
        """Return (2, M + 1): of each replicate the sums of w AUC and of w over this rank's users.

        Drawing whole users leaves the area of each what it is.
        """
        both = np.isfinite(users.auc)
        ids, weight, area = users.ids[both], users.weight[both], users.auc[both]
        sums = np.zeros((2, self.replicates + 1))
        for start in range(0, len(ids), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            draws = self._draw(ids[part])
            # (M + 1, U) @ (U, 2) -> (M + 1, 2).
            sums += (draws @ np.stack([weight[part] * area[part], weight[part]], 1)).T
        return sums

    def _draw(self, users: NDArray[np.int64]) -> Floats:
        """Return (M + 1, U) how often each user counts, 1 in the first replicate."""
        # (M // 4 + 1, U) hashes of four draws each.
        hashes = mix64((users[None] ^ self._keys[:, None]).ravel()).reshape(len(self._keys), -1)
        draws = np.ones((self.replicates + 1, len(users)))
        for quarter in range(4):
            bits = (hashes >> np.uint64(16 * quarter)).astype(np.uint16)
            rows = draws[1 + quarter :: 4]
            rows[:] = _POISSON[bits[: len(rows)]]
        return draws


def of_draws(drawn: Floats) -> tuple[float, list[float]]:
    """Return the value of (M + 1,) draws and the 95 % interval of the replicates that have one."""
    moved = drawn[1:][np.isfinite(drawn[1:])]
    known = len(moved) and np.isfinite(drawn[0])
    return float(drawn[0]), np.percentile(moved, LEVEL).tolist() if known else [np.nan, np.nan]


def drift(first: Floats, second: Floats, num_bins: int = 10) -> float:
    """Return the population stability index of one model's predictions against another's.

    Sum over bins of (p - q) ln(p / q), the bins holding about equal shares of the second's.

    Args:
        first: (S,) rows of the one in fine bins.
        second: (S,) rows of the other in the same bins.
        num_bins: Into which the fine ones are joined.
    """
    total = second.sum()
    if not total or not first.sum():
        return float("nan")
    # (S,) the wide bin of each fine bin, then (num_bins,) rows of each model.
    middle = (np.cumsum(second) - second / 2) / total
    place = np.minimum((middle * num_bins).astype(np.int64), num_bins - 1)
    joined = [np.bincount(place, one, num_bins) for one in (first, second)]
    used = np.unique(place)
    # Half a row more in each bin, so that an empty one has a logarithm.
    p, q = ((one[used] + 0.5) / (one.sum() + 0.5 * len(used)) for one in joined)
    return float(((p - q) * np.log(p / q)).sum())

# SPDX-License-Identifier: MIT
"""How far an evaluation can be trusted: intervals, reliability, users by activity; streaming.

Intervals come from a Poisson bootstrap over users (rows of one user are not independent; without
users, over rows): in replicate m a user counts Poisson(1) times, drawn from a hash of the user and
m, so that every rank draws the same without asking (Chamandy et al., "Estimating Uncertainty for
Massive Data Streams", 2012). A replicate needs sums and a histogram of scores, not rows. Bins are
quantiles of the first batches of all ranks; within a bin the order counts half. That shifts all
replicates alike, so the interval is laid around the exact metric.

Shapes: B examples, M replicates (the first has weight 1 everywhere), S score bins, U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.data.hashing import mix64
from trainer.metrics.functions import EPSILON, entropy
from trainer.metrics.gauc import NO_USER
from trainer.metrics.metrics import Metrics, communication_device

Floats = NDArray[np.float64]
_LEVEL = (2.5, 97.5)
_BINS = 2_048
_RELIABILITY_BINS = 20
# Updates whose scores decide the bins; all ranks make the same number of updates.
_FIRST_UPDATES = 16
_CHUNK_ROWS = 8_192
# Draws by the upper 16 bits of a hash: how often Poisson(1) is 0, 1, 2, ...
_POISSON = np.searchsorted(
    np.cumsum(np.exp(-1) / np.array([1, 1, 2, 6, 24, 120, 720, 5040, 40320])),
    (np.arange(2**16) + 0.5) / 2**16,
).astype(np.uint8)
_WITH_INTERVALS = ("auc", "gauc", "logloss", "ne", "calibration")
# weight, weighted label, weighted prediction, weighted loss
_SUMS = 4


class Depth:
    """What one label's evaluation says beside its metrics: `update` as `Metrics`, `finish` once.

    replicates: of the bootstrap. process_group: as for `Metrics`. label: which of the labels.
    """

    def __init__(
        self,
        replicates: int = 100,
        process_group: dist.ProcessGroup | None = None,
        label: int = 0,
    ) -> None:
        self.label = label
        self.process_group = process_group
        self.replicates = replicates
        self.values: dict[str, Any] = {}
        self._first: list[tuple[NDArray, ...]] = []
        self._edges: NDArray[np.float32] | None = None
        self._updates = self._rows = 0
        keys = np.arange(1, replicates // 4 + 2, dtype=np.int64) * 0x2545F4914F6CDD1D
        self._keys = mix64(keys).view(np.int64)
        self._sums = np.zeros((replicates + 1, _SUMS))

    def update(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, groups: Any
    ) -> None:
        """Add a batch, as `Metrics.update`. Collective once: ranks make as many calls each."""
        scores, targets, weight = (
            one[:, self.label].detach().to("cpu", torch.float32).numpy()
            for one in (predictions, labels, weights)
        )
        users = groups.detach().to("cpu", torch.int64).numpy()
        # Without a user, each row is one.
        rank = dist.get_rank(self.process_group) if dist.is_initialized() else 0
        strangers = self._rows + np.arange(len(scores)) + (rank << 44)
        users = np.where((users == NO_USER) | ~users.any(), strangers, users)
        self._rows += len(scores)
        counted = (weight > 0) & np.isfinite(scores)
        part = tuple(one[counted] for one in (scores, targets, weight, users))
        self._updates += 1
        if self._edges is not None:
            self._add(*part)
            return
        self._first.append(part)
        if self._updates == _FIRST_UPDATES:
            self._fix_edges()

    def finish(self, metrics: Metrics, exact: Mapping[str, float]) -> dict[str, Any]:
        """Return intervals, reliability and users by activity, the same on all ranks. Collective.

        metrics: what has seen the same batches; exact: its result.
        """
        if self._edges is None:
            self._fix_edges()
        device = communication_device(self.process_group)
        users = metrics.user_areas(self.label) if metrics.has_users else None
        grouped = np.zeros((self.replicates + 1, 2))
        activity = np.zeros((64, 5))
        if users is not None:
            both = np.isfinite(users.auc)
            draws = self._draw(users.ids[both])
            weighted = np.stack([users.weight * users.auc, users.weight], 1)[both]
            grouped = draws @ weighted
            activity = _by_activity(users.rows, users.weight, users.auc)
        parts = [self._sums, self._histogram, self._predicted, grouped, activity]
        if device is not None:
            flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)
            dist.all_reduce(flat, group=self.process_group)
            pieces = np.split(flat.cpu().numpy(), np.cumsum([part.size for part in parts])[:-1])
            parts = [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        sums, histogram, predicted, grouped, activity = parts
        self.values = {
            "intervals": self._intervals(sums, histogram, grouped, exact),
            "reliability": self._reliability(histogram[0], predicted),
        }
        if users is not None:
            self.values["user_activity"] = _activity_rows(activity)
        return self.values

    def _fix_edges(self) -> None:
        """Set the bins from the first batches of all ranks. Collective."""
        scores = np.concatenate([np.empty(0, np.float32), *(part[0] for part in self._first)])
        grid = np.linspace(0, 1, _BINS + 1)
        own = np.quantile(scores, grid) if len(scores) else np.full(len(grid), np.nan)
        found = torch.from_numpy(np.asarray(own, np.float64))
        device = communication_device(self.process_group)
        if device is not None:
            size = dist.get_world_size(self.process_group)
            every = found.new_empty(size * len(found), device=device)
            dist.all_gather_into_tensor(every, found.to(device), group=self.process_group)
            found = every.cpu()
        present = found.numpy()[~np.isnan(found.numpy())]
        inner = np.quantile(present, grid[1:-1]) if len(present) else np.array([0.5])
        self._edges = np.unique(inner.astype(np.float32))
        bins = len(self._edges) + 1
        self._histogram = np.zeros((self.replicates + 1, bins, 2))
        self._predicted = np.zeros(bins)
        for part in self._first:
            self._add(*part)
        self._first = []

    def _add(self, scores: NDArray, labels: NDArray, weights: NDArray, users: NDArray) -> None:
        """Add rows to sums and histograms."""
        assert self._edges is not None
        for start in range(0, len(scores), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            score, label, weight = (
                one[part].astype(np.float64) for one in (scores, labels, weights)
            )
            bins = np.searchsorted(self._edges, scores[part], side="right")
            order = np.argsort(bins, kind="stable")
            ordered = bins[order]
            starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
            draws = self._draw(users[part])
            clipped = np.clip(score, EPSILON, 1 - EPSILON)
            loss = -label * np.log(clipped) - (1 - label) * np.log1p(-clipped)
            self._sums += draws @ (
                weight[:, None] * np.stack([np.ones_like(score), label, score, loss], 1)
            )
            draws = draws[:, order]
            for column, mass in enumerate((weight * label, weight * (1 - label))):
                self._histogram[:, ordered[starts], column] += np.add.reduceat(
                    draws * mass[order], starts, axis=1
                )
            self._predicted += np.bincount(bins, weight * score, len(self._predicted))

    def _draw(self, users: NDArray[np.int64]) -> Floats:
        """Return (M + 1, U) how often each user counts, 1 in the first replicate."""
        hashes = mix64((users[None] ^ self._keys[:, None]).ravel()).reshape(len(self._keys), -1)
        draws = np.ones((self.replicates + 1, len(users)))
        for quarter in range(4):
            bits = (hashes >> np.uint64(16 * quarter)).astype(np.uint16)
            rows = draws[1 + quarter :: 4]
            rows[:] = _POISSON[bits[: len(rows)]]
        return draws

    def _intervals(
        self, sums: Floats, histogram: Floats, grouped: Floats, exact: Mapping[str, float]
    ) -> dict[str, list[float]]:
        """Return [low, high] of 95 % for each metric that has a value."""
        positive, negative = histogram[..., 0], histogram[..., 1]
        below = np.cumsum(negative, 1) - negative / 2
        weight, labelled, predicted, loss = sums.T
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = {
                "auc": (positive * below).sum(1) / (positive.sum(1) * negative.sum(1)),
                "gauc": grouped[:, 0] / grouped[:, 1],
                "logloss": loss / weight,
                "ne": loss / weight / entropy(labelled / weight),
                "calibration": predicted / labelled,
            }
        found = {}
        for name, values in drawn.items():
            value, moved = exact.get(name), values[1:][np.isfinite(values[1:])]
            if value is not None and np.isfinite(value) and len(moved):
                low, high = np.percentile(moved - values[0], _LEVEL)
                found[name] = [float(value + low), float(value + high)]
        return found

    def _reliability(self, histogram: Floats, predicted: Floats) -> dict[str, Any]:
        """Return predictions against labels in bins of equal weight, and the mean gap (ECE)."""
        assert self._edges is not None
        weight = histogram.sum(1)
        total = weight.sum() or 1.0
        place = np.minimum(
            ((np.cumsum(weight) - weight / 2) / total * _RELIABILITY_BINS).astype(np.int64),
            _RELIABILITY_BINS - 1,
        )
        edges = np.concatenate([[0.0], self._edges.astype(np.float64), [1.0]])
        bins = []
        for number in range(_RELIABILITY_BINS):
            chosen = np.flatnonzero((place == number) & (weight > 0))
            mass = weight[chosen].sum()
            if mass:
                bins.append(
                    {
                        "low": float(edges[chosen[0]]),
                        "high": float(edges[chosen[-1] + 1]),
                        "weight": float(mass),
                        "prediction": float(predicted[chosen].sum() / mass),
                        "label": float(histogram[chosen, 0].sum() / mass),
                    }
                )
        gaps = [one["weight"] * abs(one["prediction"] - one["label"]) for one in bins]
        return {"bins": bins, "ece": float(sum(gaps) / total)}


class LabelDepths:
    """`Depth` of every label. `values`: the first label's; of several, each below `labels` as well.

    label_names: as of the `Metrics` that see the same batches.
    """

    def __init__(self, label_names: Sequence[str], replicates: int = 100) -> None:
        self.values: dict[str, Any] = {}
        self._depths = {
            name: Depth(replicates, label=number) for number, name in enumerate(label_names)
        }

    def update(self, *rows: torch.Tensor) -> None:
        """Add a batch, as `Metrics.update`. Collective once a label."""
        for depth in self._depths.values():
            depth.update(*rows)

    def finish(self, metrics: Metrics, exact: Mapping[str, float]) -> None:
        """Find `values`, the same on all ranks. Collective; arguments as of `Depth.finish`."""
        several = len(self._depths) > 1
        found = {}
        for name, depth in self._depths.items():
            prefix = f"{name}_" if several else ""
            found[name] = depth.finish(
                metrics, {key: exact.get(f"{prefix}{key}", np.nan) for key in _WITH_INTERVALS}
            )
        self.values = dict(next(iter(found.values()))) | ({"labels": found} if several else {})


def _by_activity(rows: NDArray[np.int64], weight: Floats, auc: Floats) -> Floats:
    """Return (64, 5) sums over users of 2^(k-1) < rows <= 2^k: users, both, rows, w, w AUC."""
    level = np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)
    both = np.isfinite(auc)
    known = np.where(both, weight, 0)
    columns = (np.ones(len(rows)), both, rows, known, known * np.where(both, auc, 0))
    return np.stack([np.bincount(level, one, 64) for one in columns], 1, dtype=np.float64)


def _activity_rows(sums: Floats) -> list[dict[str, Any]]:
    """Return a record for each range of a user's rows that has users."""
    found = []
    for level, (users, both, rows, weight, areas) in enumerate(sums.tolist()):
        if users:
            low, high = (2 ** (level - 1) + 1 if level else 1), 2**level
            record = {"from_rows": low, "to_rows": high, "users": users, "users_with_both": both}
            found.append(record | {"rows": rows, "gauc": areas / weight if weight else np.nan})
    return found

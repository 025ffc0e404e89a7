# SPDX-License-Identifier: MIT
"""Evaluation metrics of a ranking model: streaming, over all ranks, in bounded memory.

What is merged over ranks is state (sums, bins, users' rows), never a metric. `spec.py` lists the
metrics and `functions.py` how each follows from the state. A metric that the schema does not define
is absent: GAUC, where it names no user. One that the rows do not define is NaN, and null where it
is written as JSON: AUC, NE and calibration when a class is absent, GAUC when no user has both,
everything when no row counts. `undefined` says in words which and why.

Shapes: B examples per rank, K labels, T sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainer.metrics import functions
from trainer.metrics.auc import MAX_BINS, ScoreDistribution
from trainer.metrics.gauc import MAX_ROWS, GroupedRows, UserAreas
from trainer.metrics.spec import METRICS

# Sums without the rows' weights, in this order; those of `functions.terms` follow.
_COUNTS = ("rows", "nonfinite", "positive_rows", "squared_positive", "squared_negative")


class Metrics:
    """Metrics of one evaluation: `update` with every batch, `compute` once, on every rank.

    The plain keys of the result are the first label's; with K > 1 every label has its own as well
    (`<label>_auc`), and `macro_auc` is the mean over the labels for which it is defined.

    Args:
        label_names: K names.
        process_group: None is the default group if torch.distributed is initialised, else one
            process.
        max_user_rows: Rows that a rank keeps for GAUC; above, users are sampled by hash and
            `gauc_users_sampled` (1.0: all) is the share that was kept.
        max_bins: Bins of the scores, as in `auc.py`.
        grouped: Whether there are users, and so GAUC.

    Raises:
        ValueError: no label names, or repeated ones.
    """

    def __init__(
        self,
        label_names: Sequence[str],
        process_group: dist.ProcessGroup | None = None,
        max_user_rows: int = MAX_ROWS,
        max_bins: int = MAX_BINS,
        grouped: bool = True,
    ) -> None:
        if not label_names or len(set(label_names)) != len(label_names):
            raise ValueError(
                f"label_names must be unique and at least one, got {list(label_names)}"
            )
        self.label_names = tuple(label_names)
        self.process_group = process_group
        self.max_user_rows = max_user_rows
        self.max_bins = max_bins
        self.grouped = grouped
        self.reset()

    def reset(self) -> None:
        """Forget every row."""
        num_labels = len(self.label_names)
        self._rows = 0
        self._grouped = False
        self._terms = functions.terms()
        self._names = (*_COUNTS, *self._terms)
        self._sums = np.zeros((num_labels, len(self._names)))
        self._scores = [ScoreDistribution(self.max_bins) for _ in range(num_labels)]
        self._users = GroupedRows(num_labels, self.max_user_rows)

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Add a batch.

        A prediction that is not finite is counted in `nonfinite_predictions` and kept out of the
        sums.

        Args:
            predictions: (B, K) probabilities.
            labels: (B, K) in [0, 1].
            weights: (B, K) >= 0; a row of weight 0 does not count.
            groups: (B,) int64, the user (`gauc.NO_USER`: unknown); if all are 0 there is no GAUC.

        Raises:
            ValueError: shapes differ from the above, or a value lies outside its range.
        """
        shape = (labels.shape[0], len(self.label_names))
        for name, tensor, expected in (
            ("predictions", predictions, shape),
            ("labels", labels, shape),
            ("weights", weights, shape),
            ("groups", groups, shape[:1]),
        ):
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"metrics: {name} must have shape {expected} (examples, labels), "
                    f"got {tuple(tensor.shape)}"
                )
        scores, targets, weight = (_array(tensor) for tensor in (predictions, labels, weights))
        self._check("weights", weight, np.isfinite(weight) & (weight >= 0), ">= 0 and finite")
        present = weight > 0
        finite = np.isfinite(scores)
        self._check("labels", targets, ~present | ((targets >= 0) & (targets <= 1)), "in [0, 1]")
        in_range = ~present | ~finite | ((scores >= 0) & (scores <= 1))
        self._check("predictions", scores, in_range, "probabilities in [0, 1] (are they logits?)")
        counted = present & finite
        scores = np.where(counted, scores, 0)
        weight = np.where(counted, weight, 0)
        positive = np.where(counted, weight * targets, 0)
        negative = weight - positive
        self._rows += int(present.any(1).sum())
        counts = (
            present,
            present & ~finite,
            np.where(counted, targets, 0),
            positive.astype(np.float64) ** 2,
            negative.astype(np.float64) ** 2,
        )
        self._sums[:, : len(counts)] += np.stack([one.sum(0, np.float64) for one in counts], 1)
        self._sums[:, len(counts) :] += self._weighted(
            scores, np.where(counted, targets, 0), weight
        )
        for k, distribution in enumerate(self._scores):
            chosen = counted[:, k]
            distribution.add(scores[chosen, k], positive[chosen, k], negative[chosen, k])
        used = counted.any(1)
        users = groups.detach().to("cpu", torch.int64).numpy()[used]
        self._grouped = self._grouped or bool(users.any())
        self._users.add(users, np.stack([scores[used], positive[used], negative[used]], axis=1))

    def compute(self) -> dict[str, float]:
        """Return every metric over all ranks, the same on each. Collective: every rank calls it."""
        per_label = self.compute_labels()
        result = {**per_label[0], "rows": self._all_rows}
        if self.grouped:
            result["gauc_users_sampled"] = self._users.share
        result["nonfinite_predictions"] = self._nonfinite
        if len(self.label_names) > 1:
            for name, metrics in zip(self.label_names, per_label, strict=True):
                result.update({f"{name}_{key}": value for key, value in metrics.items()})
            defined = [metrics["auc"] for metrics in per_label if not math.isnan(metrics["auc"])]
            result["macro_auc"] = sum(defined) / len(defined) if defined else math.nan
        return result

    def compute_labels(self) -> list[dict[str, float]]:
        """Return the metrics of each label over all ranks, the same on each. Collective."""
        group, device = self.process_group, communication_device(self.process_group)
        totals = torch.from_numpy(
            np.append(self._sums.ravel(), [float(self._rows), float(self._grouped)])
        )
        num_labels = len(self.label_names)
        users = torch.zeros(num_labels, 5, dtype=torch.float64)
        if device is not None:
            totals = totals.to(device)
            dist.all_reduce(totals, group=group)
            totals = totals.cpu()
        self._all_rows, self._grouped = totals[-2].item(), bool(totals[-1])
        if self._grouped:
            users = self._users.sums(group, device)
        # (K, T) -> a mapping from each sum's name to its K values.
        sums = dict(zip(self._names, totals[:-2].view(num_labels, -1).numpy().T, strict=True))
        self._nonfinite = float(sums["nonfinite"].sum())
        areas = self._areas(sums, device).numpy()
        return self._values(sums, areas, users.numpy())

    def _values(
        self, sums: dict[str, NDArray], areas: NDArray, users: NDArray
    ) -> list[dict[str, float]]:
        """Return the metrics of each label.

        Args:
            sums: (K,) by name.
            areas: (K, 2), AUC and its standard error.
            users: (K, 5), as `GroupedRows.sums` returns them.
        """
        user_area, user_weight, plain_area, num_users, heaviest = users.T
        grouped = {"user_area": user_area, "user_weight": user_weight}
        found = functions.values({**sums, "area": areas[:, 0], **grouped})
        kept = {
            name: found[name]
            for name, metric in METRICS.items()
            if self.grouped or not metric.per_user
        }
        weight = sums["weight"]
        with np.errstate(divide="ignore", invalid="ignore"):
            kept["auc_standard_error"] = areas[:, 1]
            if self.grouped:
                kept["gauc_unweighted"] = plain_area / num_users
                kept["gauc_users"] = num_users
                # Users may be a sample, the weight is that of all rows.
                share = user_weight / (weight * self._users.share)
                kept["gauc_share"] = np.minimum(share, 1.0)
                kept["gauc_top_share"] = heaviest / user_weight
            kept["prediction_mean"] = sums["prediction"] / weight
            kept["label_mean"] = sums["positive"] / weight
        kept |= {name: sums[name] for name in ("positive_rows", "rows", "weight")}
        return [
            {name: float(one[k]) for name, one in kept.items()}
            for k in range(len(self.label_names))
        ]

    def _weighted(self, scores: NDArray, targets: NDArray, weight: NDArray) -> NDArray[np.float64]:
        """Return (K, T) sums of the terms; scores, targets and weight are (B, K)."""
        scores, targets, weight = (one.astype(np.float64) for one in (scores, targets, weight))
        terms = self._terms.values()
        return np.stack([(weight * term(scores, targets)).sum(0) for term in terms], axis=1)

    @property
    def has_users(self) -> bool:
        """Whether rows are grouped by user; the same on all ranks after `compute`."""
        return self._grouped

    def user_areas(self, label: int) -> UserAreas:
        """Return this rank's users with their AUC by label number `label`. Collective."""
        group = self.process_group
        return self._users.areas(label, group, communication_device(group))

    def _areas(self, sums: Mapping[str, NDArray], device: torch.device | None) -> Tensor:
        """Return (K, 2): AUC and its standard error, merged on the first rank and sent to all."""
        areas = torch.zeros(len(self._scores), 2, dtype=torch.float64)
        for k, local in enumerate(self._scores):
            merged = local
            if device is not None:
                # A copy, so that compute can be called again after more updates.
                merged = ScoreDistribution(self.max_bins)
                merged.merge(local)
                merged.reduce_to_first(self.process_group, device)
            if device is None or dist.get_rank(self.process_group) == 0:
                values = {name: float(one[k]) for name, one in sums.items()}
                negative = values["weight"] - values["positive"]
                areas[k, 0] = merged.auc()
                # The effective numbers of rows of each class, (sum w)^2 / sum w^2.
                areas[k, 1] = merged.standard_error(
                    values["positive"] ** 2 / (values["squared_positive"] or 1.0),
                    negative**2 / (values["squared_negative"] or 1.0),
                )
        if device is not None:
            areas = areas.to(device)
            dist.broadcast(areas, group=self.process_group, group_src=0)
        return areas.cpu()

    def _check(self, what: str, values: NDArray, good: NDArray[np.bool_], expected: str) -> None:
        """Raise a ValueError that names the first label and value that is not `good`."""
        if not good.all():
            row, k = np.argwhere(~good)[0]
            raise ValueError(
                f"metrics: {what} of label {self.label_names[k]!r} must be {expected}, got "
                f"{values[row, k]} in row {row} of the batch"
            )


def undefined(metrics: Mapping[str, float], label_names: Sequence[str]) -> list[str]:
    """Say which of the main metrics have no value, and why, a line each."""
    lines = []
    if "gauc" not in metrics:
        lines.append("no gauc: the schema names no user (`user: COLUMN` groups rows by a column)")
    for name in label_names:
        prefix = f"{name}_" if len(label_names) > 1 else ""
        rate = metrics[f"{prefix}label_mean"]
        if not metrics[f"{prefix}weight"]:
            lines.append(
                f"no metric of label {name!r}: in every test row it is null, has weight 0 or got "
                "no finite prediction"
            )
        elif rate in (0.0, 1.0):
            lines.append(f"{prefix}auc is null: label {name!r} is {rate:.0f} in every test row")
        elif math.isnan(metrics.get(f"{prefix}gauc", 0.0)):
            lines.append(f"{prefix}gauc is null: no user has both values of label {name!r}")
    return lines


def communication_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Return the device from which `group`'s backend sends, or None if nobody else is there."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _array(tensor: Tensor) -> NDArray[np.float32]:
    """Return the tensor as float32 in host memory."""
    return tensor.detach().to("cpu", torch.float32).numpy()

# SPDX-License-Identifier: MIT
"""Evaluation metrics of a ranking model: streaming, over all ranks, in bounded memory.

What is merged over ranks is state (sums, bins, users' rows), never a metric. A metric that the
schema does not define is absent: GAUC, where it names no user. One that the rows do not define is
NaN, and null where it is written as JSON: AUC, NE and calibration when a class is absent, GAUC when
no user has both, everything when no row counts. `undefined` says in words which and why.

  auc, auc_standard_error  area under the ROC curve, weighted by example; error bound: `auc.py`
  gauc, gauc_unweighted    mean AUC over users, by the user's weight or plain; `gauc.py`
  gauc_users               users with both classes, over which that mean is taken
  logloss                  mean -y ln p - (1 - y) ln(1 - p), p clipped to [e, 1 - e], e = 2^-23
  ne                       normalised entropy: logloss / entropy of the label mean (He et al., 2014)
  calibration              sum w p / sum w y: above 1 predicts too much
  prediction_mean, label_mean, rows, weight

Shapes: B examples per rank, K labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainer.metrics.auc import MAX_BINS, ScoreDistribution
from trainer.metrics.gauc import MAX_ROWS, GroupedRows, UserAreas

EPSILON = float(np.finfo(np.float32).eps)
# Sums kept per label, in this order.
_SUMS = (
    "rows",
    "nonfinite",
    "weight",
    "positive",
    "prediction",
    "loss",
    "squared_positive",
    "squared_negative",
)


class Metrics:
    """Metrics of one evaluation: `update` with every batch, `compute` once, on every rank.

    label_names: K names. The plain keys of the result are the first label's; with K > 1 every label
    has its own as well (`<label>_auc`), and `macro_auc` is the mean over the labels for which it is
    defined. process_group: None is the default group if torch.distributed is initialised, else one
    process. grouped: whether there are users, and so GAUC. max_user_rows: rows that a rank keeps
    for GAUC; above, users are sampled by hash and `gauc_users_sampled` (1.0: all) says which share
    was kept. max_bins: see `auc.py`.

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
        self._sums = np.zeros((num_labels, len(_SUMS)))
        self._scores = [ScoreDistribution(self.max_bins) for _ in range(num_labels)]
        self._users = GroupedRows(num_labels, self.max_user_rows)

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Add a batch.

        predictions: (B, K) probabilities. labels: (B, K) in [0, 1]. weights: (B, K) >= 0; a row of
        weight 0 does not count. groups: (B,) int64, the user (`gauc.NO_USER`: unknown); if all are
        0 there is no GAUC. A prediction that is not finite is counted in `nonfinite_predictions`
        and kept out of the sums.

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
        self._sums += _sums(scores, positive, negative, present, finite)
        for k, distribution in enumerate(self._scores):
            chosen = counted[:, k]
            distribution.add(scores[chosen, k], positive[chosen, k], negative[chosen, k])
        used = counted.any(1)
        users = groups.detach().to("cpu", torch.int64).numpy()[used]
        self._grouped = self._grouped or bool(users.any())
        self._users.add(users, np.stack([scores[used], positive[used], negative[used]], axis=1))

    def compute(self) -> dict[str, float]:
        """Return every metric over all ranks, the same on each. Collective: every rank calls it."""
        group, device = self.process_group, communication_device(self.process_group)
        totals = torch.from_numpy(
            np.append(self._sums.ravel(), [float(self._rows), float(self._grouped)])
        )
        users = torch.zeros(len(self.label_names), 4, dtype=torch.float64)
        if device is not None:
            totals = totals.to(device)
            dist.all_reduce(totals, group=group)
            totals = totals.cpu()
        rows, grouped = totals[-2].item(), bool(totals[-1])
        self._grouped = grouped
        if grouped:
            users = self._users.sums(group, device)
        sums = totals[:-2].view(len(self.label_names), -1).numpy()
        areas = self._areas(sums, device)
        per_label = [
            _label_metrics(
                dict(zip(_SUMS, sums[k].tolist(), strict=True)),
                areas[k].tolist(),
                users[k].tolist() if self.grouped else None,
            )
            for k in range(len(self.label_names))
        ]
        result = {**per_label[0], "rows": rows}
        if self.grouped:
            result["gauc_users_sampled"] = self._users.share
        result["nonfinite_predictions"] = float(sums[:, _SUMS.index("nonfinite")].sum())
        if len(self.label_names) > 1:
            for name, metrics in zip(self.label_names, per_label, strict=True):
                result.update({f"{name}_{key}": value for key, value in metrics.items()})
            defined = [metrics["auc"] for metrics in per_label if not math.isnan(metrics["auc"])]
            result["macro_auc"] = sum(defined) / len(defined) if defined else math.nan
        return result

    @property
    def has_users(self) -> bool:
        """Whether rows are grouped by user; the same on all ranks after `compute`."""
        return self._grouped

    def user_areas(self, label: int) -> UserAreas:
        """Return this rank's users with their AUC by label number `label`. Collective."""
        group = self.process_group
        return self._users.areas(label, group, communication_device(group))

    def _areas(self, sums: NDArray[np.float64], device: torch.device | None) -> Tensor:
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
                values = dict(zip(_SUMS, sums[k].tolist(), strict=True))
                negative = values["weight"] - values["positive"]
                areas[k, 0] = merged.auc()
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


def entropy(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy, in nats, of labels with these means; NaN for 0 and 1."""
    inside = np.where((rates > 0) & (rates < 1), rates, np.nan)
    return -inside * np.log(inside) - (1 - inside) * np.log1p(-inside)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    """Return the tensor as float32 in host memory."""
    return tensor.detach().to("cpu", torch.float32).numpy()


def _sums(
    scores: NDArray, positive: NDArray, negative: NDArray, present: NDArray, finite: NDArray
) -> NDArray[np.float64]:
    """Return (K, S) in the order of _SUMS, from (B, K) with zeros where a row does not count."""
    scores, positive, negative = (part.astype(np.float64) for part in (scores, positive, negative))
    clipped = np.clip(scores, EPSILON, 1 - EPSILON)
    loss = -positive * np.log(clipped) - negative * np.log1p(-clipped)
    weight = positive + negative
    columns = (
        present,
        present & ~finite,
        weight,
        positive,
        weight * scores,
        loss,
        positive**2,
        negative**2,
    )
    return np.stack([column.sum(0, dtype=np.float64) for column in columns], axis=1)


def _label_metrics(
    sums: dict[str, float], area: list[float], users: list[float] | None
) -> dict[str, float]:
    """Return one label's metrics from its sums, its area (value, error) and its users' sums."""
    grouped = {}
    if users is not None:
        grouped = {
            "gauc": users[0] / users[1] if users[1] else math.nan,
            "gauc_unweighted": users[2] / users[3] if users[3] else math.nan,
            "gauc_users": users[3],
        }
    weight, positive = sums["weight"], sums["positive"]
    rate = positive / weight if weight else math.nan
    logloss = sums["loss"] / weight if weight else math.nan
    return {
        "auc": area[0],
        "auc_standard_error": area[1],
        **grouped,
        "logloss": logloss,
        "ne": logloss / float(entropy(np.array(rate))),
        "calibration": sums["prediction"] / positive if positive else math.nan,
        "prediction_mean": sums["prediction"] / weight if weight else math.nan,
        "label_mean": rate,
        "rows": sums["rows"],
        "weight": weight,
    }

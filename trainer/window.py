# SPDX-License-Identifier: MIT
"""Statistics of the latest examples, for the running AUC and for alarms.

Shapes: B examples per rank, K labels.
"""

from __future__ import annotations

import collections
import math

import numpy as np
import torch
from torch import Tensor

from trainer.auc import binary_auc, rank_keys, sorted_runs


class Window:
    """Statistics of the last `num_examples` examples of the first label on this rank, for progress.

    Adding costs no synchronisation: tensors stay on their device until `summary` is called.
    """

    def __init__(self, num_examples: int = 65536) -> None:
        self.num_examples = num_examples
        self._batches: collections.deque[tuple[Tensor, Tensor, Tensor]] = collections.deque()
        self._held = 0

    def add(self, predictions: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add a batch of probabilities, labels and weights, each (B, K)."""
        self._batches.append(
            (predictions.detach()[:, 0], labels.detach()[:, 0], weights.detach()[:, 0])
        )
        self._held += len(predictions)
        while self._held - len(self._batches[0][0]) >= self.num_examples:
            self._held -= len(self._batches.popleft()[0])

    def summary(self) -> dict[str, float]:
        """Return auc, label_mean, prediction_mean, _std, _min and _max; NaN where undefined."""
        keys = (
            "auc",
            "label_mean",
            "prediction_mean",
            "prediction_std",
            "prediction_min",
            "prediction_max",
        )
        if not self._batches:
            return dict.fromkeys(keys, math.nan)
        parts = torch.stack(
            [
                torch.cat([part.float() for part in column])
                for column in zip(*self._batches, strict=True)
            ]
        )
        scores, targets, weight = parts.cpu().numpy()[:, -self.num_examples :]
        used = (weight > 0) & np.isfinite(scores)
        scores, targets, weight = scores[used], targets[used], weight[used].astype(np.float64)
        if not len(scores):
            return dict.fromkeys(keys, math.nan)
        _, order, starts = sorted_runs(rank_keys(scores))
        positive = np.add.reduceat((weight * targets)[order], starts)
        auc = binary_auc(positive, np.add.reduceat(weight[order], starts) - positive)
        mean = float(np.average(scores, weights=weight))
        spread = float(np.sqrt(np.average((scores - mean) ** 2, weights=weight)))
        label_mean = float(np.average(targets, weights=weight))
        return dict(
            zip(
                keys,
                (auc, label_mean, mean, spread, float(scores.min()), float(scores.max())),
                strict=True,
            )
        )

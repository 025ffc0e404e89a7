# SPDX-License-Identifier: MIT
"""Running statistics: of the latest examples, of losses, and of the time spent waiting for input.

Shapes: B examples per rank, K labels.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.metrics.auc import binary_auc, rank_keys, sorted_runs

Item = TypeVar("Item")


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

    def tensor(self) -> Tensor:
        """Return what is held, (3, N): probabilities, labels and weights of N examples."""
        if not self._batches:
            return torch.zeros(3, 0)
        parts = [torch.cat([part.float() for part in c]) for c in zip(*self._batches, strict=True)]
        return torch.stack(parts)

    def restore(self, held: Tensor) -> None:
        """Hold what `tensor` of another window has returned."""
        self._batches.clear()
        self._held = held.shape[1]
        if self._held:
            self._batches.append((held[0], held[1], held[2]))

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
        scores, targets, weight = self.tensor().cpu().numpy()[:, -self.num_examples :]
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


class Losses:
    """The sum and number of the finite losses since `reset`, on their device."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._sum: Tensor | float = 0.0
        self._finite: Tensor | float = 0.0

    def add(self, loss: Tensor | float) -> None:
        """Add a step's loss."""
        value = loss.detach().float() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        finite = value.isfinite()
        self._sum = self._sum + torch.where(finite, value, 0.0)
        self._finite = self._finite + finite

    def values(self) -> tuple[float, float]:
        """Return the sum and the number."""
        return float(self._sum), float(self._finite)

    def restore(self, values: Sequence[float]) -> None:
        """Go on from what `values` has returned."""
        self._sum, self._finite = values


class InputTimer:
    """Seconds spent waiting for input."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, counting the time until each arrives as waiting."""
        with self.waiting():
            iterator = iter(items)
        while True:
            with self.waiting():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

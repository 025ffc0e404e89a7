# SPDX-License-Identifier: MIT
"""Rows of models in memory, and what a comparison says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.evaluation.comparison import Paired


class Rows(NamedTuple):
    """Predictions, labels, weights and users of N rows."""

    scores: NDArray[np.float64]
    labels: NDArray[np.float64]
    weights: NDArray[np.float64]
    users: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Rows:
        """Return some of the rows, by their positions."""
        return Rows(*(part[chosen] for part in self))


def assess(models: Sequence[Rows], replicates: int, batch: int = 1_000) -> dict[str, Any]:
    """Return what is said of models of the same rows, which come in batches."""
    paired = Paired(len(models), replicates, grouped=True)
    for start in range(0, max(len(models[0].scores), 1), batch):
        part = slice(start, start + batch)
        scores = np.stack([one.scores[part] for one in models], 1)
        _, labels, weights, users = models[0]
        columns = (torch.from_numpy(one).float() for one in (scores, labels[part], weights[part]))
        paired.update(*columns, torch.from_numpy(users[part]))
    found = paired.finish()
    del found["rows"]
    return found


def compare(first: Rows, second: Rows, replicates: int) -> dict[str, Any]:
    """Return the differences of two models."""
    return assess([first, second], replicates)["differences"]

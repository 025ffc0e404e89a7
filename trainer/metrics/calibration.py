# SPDX-License-Identifier: MIT
"""Reliability of predictions: mean prediction against mean label in bins of equal weight.

Shapes: S fine bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_BINS = 20


def reliability(edges: NDArray[np.float32], histogram: Floats, predicted: Floats) -> dict[str, Any]:
    """Return predictions against labels in bins of about equal weight, and the mean gap.

    Args:
        edges: (S - 1,) between the fine bins, of scores in [0, 1].
        histogram: (S, 2), weights of positives and of negatives.
        predicted: (S,), sums of weight times prediction.

    Returns:
        `bins`, each with its ends, weight, mean prediction and mean label; and `ece`, the expected
        calibration error: the mean distance of the two by weight.
    """
    weight = histogram.sum(1)
    total = weight.sum() or 1.0
    # (S,) the wide bin in which the middle of a fine bin's weight lies.
    middle = (np.cumsum(weight) - weight / 2) / total
    place = np.minimum((middle * _BINS).astype(np.int64), _BINS - 1)
    ends = np.concatenate([[0.0], edges.astype(np.float64), [1.0]])
    bins = []
    for number in range(_BINS):
        chosen = np.flatnonzero((place == number) & (weight > 0))
        mass = weight[chosen].sum()
        if mass:
            bins.append(
                {
                    "low": float(ends[chosen[0]]),
                    "high": float(ends[chosen[-1] + 1]),
                    "weight": float(mass),
                    "prediction": float(predicted[chosen].sum() / mass),
                    "label": float(histogram[chosen, 0].sum() / mass),
                }
            )
    gaps = [one["weight"] * abs(one["prediction"] - one["label"]) for one in bins]
    return {"bins": bins, "ece": float(sum(gaps) / total)}

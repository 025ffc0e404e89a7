# SPDX-License-Identifier: MIT
"""The functions of the metrics in `spec.py`, in NumPy: from sums over rows to values.

A metric is a function of sums. Sums over rows are mergeable over batches and ranks, and the
bootstrap needs them of every replicate, so each function takes arrays of any shape: () for the
whole, (M + 1, Q) for replicates and models. These sums exist for every metric:

  weight                  sum of the rows' weights w
  positive, prediction    sums of w y and of w p
  area                    area under the ROC curve of all rows (`auc.py`)
  user_area, user_weight  over the users with both classes: sums of w AUC and of w (`gauc.py`)

A function may ask for sums of its own by `terms`: name -> what of a row is summed, with its weight.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sums = Mapping[str, Floats]
# From predictions and labels, (N,) each, to what is summed, (N,).
Term = Callable[[Floats, Floats], Floats]
# Predictions are clipped to [EPSILON, 1 - EPSILON] before a logarithm.
EPSILON = float(np.finfo(np.float32).eps)


class Function(NamedTuple):
    """How a metric follows from sums.

    Args:
        value: Computes the value from the sums; NaN where it is not defined.
        terms: The metric's own sums.
    """

    value: Callable[[Sums], Floats]
    terms: Mapping[str, Term] = {}


def row_mean(name: str, term: Term) -> Function:
    """Return the weighted mean over rows of `term`, whose sum is called `name`."""
    return Function(lambda sums: sums[name] / sums["weight"], {name: term})


def log_loss(predictions: Floats, labels: Floats) -> Floats:
    """Return the cross-entropy (N,) of each row, in nats."""
    clipped = np.clip(predictions, EPSILON, 1 - EPSILON)
    return -labels * np.log(clipped) - (1 - labels) * np.log1p(-clipped)


def entropy(rates: Floats) -> Floats:
    """Return the entropy, in nats, of labels with these means; NaN for 0 and 1."""
    inside = np.where((rates > 0) & (rates < 1), rates, np.nan)
    return -inside * np.log(inside) - (1 - inside) * np.log1p(-inside)


def _normalized_entropy(sums: Sums) -> Floats:
    return sums["loss"] / sums["weight"] / entropy(sums["positive"] / sums["weight"])


FUNCTIONS: dict[str, Function] = {
    "auc": Function(lambda sums: sums["area"]),
    "gauc": Function(lambda sums: sums["user_area"] / sums["user_weight"]),
    "logloss": row_mean("loss", log_loss),
    "ne": Function(_normalized_entropy, {"loss": log_loss}),
    "calibration": Function(lambda sums: sums["prediction"] / sums["positive"]),
}


def terms() -> dict[str, Term]:
    """Return what of a row is summed with its weight, by the name of the sum."""
    found: dict[str, Term] = {
        "weight": lambda predictions, labels: np.ones_like(labels),
        "positive": lambda predictions, labels: labels,
        "prediction": lambda predictions, labels: predictions,
    }
    for function in FUNCTIONS.values():
        found |= function.terms
    return found


def values(sums: Sums) -> dict[str, Floats]:
    """Return every metric of the sums, in the shape of the sums; NaN where it is not defined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {name: np.asarray(one.value(sums)) for name, one in FUNCTIONS.items()}
    return {name: np.where(np.isfinite(one), one, np.nan) for name, one in found.items()}

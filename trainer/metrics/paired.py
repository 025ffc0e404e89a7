# SPDX-License-Identifier: MIT
"""Metrics of models on the same rows and of their differences, with intervals: a paired bootstrap.

Rows of one user are drawn together (a user's rows are not independent), the same for all models, so
that the interval of a difference is about the models and not about which rows there are. Each
replicate gives every user a Poisson(1) weight (Chamandy et al., 2012), which needs no draw of
indices and leaves the rows' order, sorted once by score, in place.

Shapes: N rows, of one label; M replicates; Q models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.metrics.functions import EPSILON, entropy
from trainer.metrics.gauc import NO_USER

Floats = NDArray[np.float64]
COMPARED = ("auc", "gauc", "logloss", "ne", "calibration")
_LEVEL = (2.5, 97.5)


class Rows(NamedTuple):
    """Predictions, labels, weights and users' numbers of N rows."""

    scores: Floats
    labels: Floats
    weights: Floats
    users: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Rows:
        """Return some of the rows, by their positions."""
        scores, labels, weights = (part[chosen] for part in self[:3])
        return Rows(scores=scores, labels=labels, weights=weights, users=self.users[chosen])


def compare(first: Rows, second: Rows, replicates: int, seed: int = 0) -> dict[str, Any]:
    """Return differences `first` - `second` with 95 % intervals, and how far predictions moved.

    Beside those of `COMPARED` that of `calibration_error`, |ln calibration|: twice too much is as
    wrong as half.

    Raises:
        ValueError: the two are not of the same rows.
    """
    return assess((first, second), replicates, seed)["differences"]


def assess(models: Sequence[Rows], replicates: int, seed: int = 0) -> dict[str, Any]:
    """Return `models`, the metrics of each with intervals; of two, their `differences` as well.

    A metric that the rows do not define is NaN, and so is its interval; without rows all are. One
    user's rows do not say how others would differ: without a second user intervals are NaN. Rows
    that one of the models has no finite prediction of are left out, of all of them.

    Raises:
        ValueError: the models are not of the same rows.
    """
    for other in models[1:]:
        check_same(models[0], other)
    finite = np.logical_and.reduce([np.isfinite(one.scores) for one in models])
    if not finite.all():
        models = [one.take(np.flatnonzero(finite)) for one in models]
    drawn = draw(models, replicates, seed)
    values = []
    for number in range(len(models)):
        found = {name: _of_draws(drawn[:, number, i]) for i, name in enumerate(COMPARED)}
        metrics = {name: value for name, (value, _) in found.items()}
        values.append(metrics | {"intervals": {name: low for name, (_, low) in found.items()}})
    if len(models) != 2:
        return {"models": values}
    first, second = models
    differences: dict[str, Any] = {}
    for i, name in enumerate(COMPARED):
        value, interval = _of_draws(drawn[:, 0, i] - drawn[:, 1, i])
        differences[name] = {"difference": value, "interval": interval}
    with np.errstate(divide="ignore"):
        errors = np.abs(np.log(drawn[:, :, COMPARED.index("calibration")]))
    value, interval = _of_draws(errors[:, 0] - errors[:, 1])
    differences["calibration_error"] = {"difference": value, "interval": interval}
    any_row = len(first.scores) > 0
    moved = float(np.abs(first.scores - second.scores).mean()) if any_row else np.nan
    differences |= {"drift": drift(first, second) if any_row else np.nan, "mean_move": moved}
    return {"models": values, "differences": differences}


def check_same(first: Rows, second: Rows) -> None:
    """Refuse models that do not predict the same rows.

    Raises:
        ValueError: they do not.
    """
    same = len(first.labels) == len(second.labels) and all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in ("labels", "weights", "users")
    )
    if not same:
        raise ValueError(
            f"compare: the models predict different rows ({len(first.labels):,} and "
            f"{len(second.labels):,}); their schemas must name the same label, weight and user"
        )


def draw(models: Sequence[Rows], replicates: int, seed: int) -> Floats:
    """Return (M + 1, Q, 5): `COMPARED` of each model; all rows count once in the first replicate.

    models: of the same rows, in the same order.
    """
    random = np.random.default_rng(seed)
    rows = models[0]
    if not len(rows.scores):
        return np.full((replicates + 1, len(models), len(COMPARED)), np.nan)
    clusters, known = _clusters(rows.users)
    by_user = [user_areas(one, clusters, known) for one in models]
    orders = [order(one.scores) for one in models]
    sums = [np.stack([one.scores, log_losses(one)], 1) for one in models]
    drawn = np.empty((replicates + 1, len(models), len(COMPARED)))
    for number in range(replicates + 1):
        times = random.poisson(1.0, len(known)) if number else np.ones(len(known))
        weights = rows.weights * times[clusters]
        total, positive = weights.sum(), weights @ rows.labels
        for model, found in enumerate(drawn[number]):
            predicted, loss = weights @ sums[model]
            areas, counted = (times @ part for part in by_user[model])
            auc = area(weights, rows.labels, *orders[model])
            with np.errstate(invalid="ignore", divide="ignore"):
                logloss = loss / total
                ne = logloss / entropy(positive / total)
                found[:] = auc, areas / counted, logloss, ne, predicted / positive
    if clusters.min() == clusters.max():
        drawn[1:] = np.nan
    return np.where(np.isfinite(drawn), drawn, np.nan)


def _clusters(users: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number (N,) of what each row is drawn with, and of each whether it is a user.

    Strangers are not one user: each is drawn alone.
    """
    values, clusters = np.unique(users, return_inverse=True)
    strangers = np.flatnonzero(users == NO_USER)
    clusters[strangers] = len(values) + np.arange(len(strangers))
    return clusters, np.r_[values != NO_USER, np.zeros(len(strangers), bool)]


def _of_draws(drawn: Floats) -> tuple[float, list[float]]:
    """Return the value of all rows, and the 95 % interval of the replicates that have one."""
    moved = drawn[1:][np.isfinite(drawn[1:])]
    known = len(moved) and np.isfinite(drawn[0])
    return float(drawn[0]), np.percentile(moved, _LEVEL).tolist() if known else [np.nan, np.nan]


def order(scores: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what sorts (N,) scores, and where in that order each run of equals starts."""
    by_score = np.argsort(scores, kind="stable")
    ordered = scores[by_score]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    return by_score, starts


def area(
    weights: Floats, labels: Floats, by_score: NDArray[np.int64], starts: NDArray[np.int64]
) -> float:
    """Return the weighted area under the ROC curve, ties counted half; NaN without both classes."""
    ordered = weights[by_score]
    positive = np.add.reduceat(ordered * labels[by_score], starts)
    negative = np.add.reduceat(ordered * (1 - labels[by_score]), starts)
    below = np.cumsum(negative) - negative / 2
    total = positive.sum() * negative.sum()
    return float((positive * below).sum() / total) if total else float("nan")


def user_areas(
    rows: Rows, clusters: NDArray[np.int64], known: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Return of each user the weight times the area under his own curve, and the weight.

    Both are 0 for users without both classes, and for those that are not `known`. Drawing whole
    users leaves each area what it is, so GAUC needs them once.
    """
    by_score = np.lexsort((rows.scores, clusters))
    owner, scores = clusters[by_score], rows.scores[by_score]
    runs = np.flatnonzero(np.r_[True, (owner[1:] != owner[:-1]) | (scores[1:] != scores[:-1])])
    weights, labels = rows.weights[by_score], rows.labels[by_score]
    positive = np.add.reduceat(weights * labels, runs)
    negative = np.add.reduceat(weights * (1 - labels), runs)
    owner = owner[runs]
    totals = [np.bincount(owner, part, len(known)) for part in (positive, negative)]
    before = np.cumsum(totals[1]) - totals[1]
    below = np.cumsum(negative) - negative / 2 - before[owner]
    pairs = totals[0] * totals[1]
    weight = np.where((pairs > 0) & known, totals[0] + totals[1], 0.0)
    hits = np.bincount(owner, positive * below, len(known))
    return weight * hits / np.where(pairs > 0, pairs, 1.0), weight


def log_losses(rows: Rows) -> Floats:
    """Return the cross-entropy of each row, in nats."""
    clipped = np.clip(rows.scores, EPSILON, 1 - EPSILON)
    return -rows.labels * np.log(clipped) - (1 - rows.labels) * np.log1p(-clipped)


def drift(first: Rows, second: Rows, num_bins: int = 10) -> float:
    """Return the population stability index of `first`'s predictions against `second`'s.

    Sum over bins of (p - q) ln(p / q), the bins holding equal shares of `second`'s.
    """
    edges = np.unique(np.quantile(second.scores, np.linspace(0, 1, num_bins + 1)[1:-1]))
    shares = [
        np.bincount(np.searchsorted(edges, rows.scores, side="right"), minlength=len(edges) + 1)
        for rows in (first, second)
    ]
    p, q = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in shares)
    return float(((p - q) * np.log(p / q)).sum())

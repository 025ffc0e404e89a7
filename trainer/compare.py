# SPDX-License-Identifier: MIT
"""Compare models on the same rows: python -m trainer.compare A [B] --data PATH --days FIRST:LAST.

A and B are checkpoints or runs' folders. Both predict every row of the same days; the answer, as
JSON on standard output (a summary goes to standard error), holds the metrics of each, the
differences A - B with bootstrap intervals, and how far the predictions moved. Rows of one user are
drawn together (a user's rows are not independent), the same for both models, so that an interval is
about their difference and not about which rows there are. One process; rows are kept in memory, 24
bytes each and model.

Bootstrap: each replicate gives every user a Poisson(1) weight (Chamandy et al., 2012), which needs
no draw of indices and leaves the rows' order, sorted once by score, in place.

Shapes: N rows, of the first label; M replicates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.ranking import Predictions
from trainer.curves import json_ready
from trainer.evaluate import choose_rows, evaluate, open_checkpoint, read_config
from trainer.failures import exit_code
from trainer.gauc import NO_USER
from trainer.lines import difference_line, evaluated_lines
from trainer.policies import resolve
from trainer.runtime import Runtime, start
from trainer.storage import Folder

Floats = NDArray[np.float64]
_EPSILON = 2.0**-23
_LEVEL = (2.5, 97.5)


class Rows(NamedTuple):
    """Predictions, labels, weights and users' numbers of N rows."""

    scores: Floats
    labels: Floats
    weights: Floats
    users: NDArray[np.int64]


def compare(first: Rows, second: Rows, replicates: int, seed: int = 0) -> dict[str, Any]:
    """Return differences `first` - `second` with 95 % intervals, and how far predictions moved.

    Raises:
        ValueError: the two are not of the same rows.
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
    random = np.random.default_rng(seed)
    users, clusters = np.unique(first.users, return_inverse=True)
    by_user = [user_areas(rows, clusters, users != NO_USER) for rows in (first, second)]
    orders = [order(rows.scores) for rows in (first, second)]
    losses = [log_losses(rows) for rows in (first, second)]
    draws = []
    for number in range(replicates + 1):
        times = random.poisson(1.0, len(users)) if number else np.ones(len(users))
        weights = first.weights * times[clusters]
        areas = [area(weights, first.labels, *one) for one in orders]
        means = [float((weights * loss).sum() / max(weights.sum(), 1e-12)) for loss in losses]
        grouped = [(times * a).sum() / max((times * w).sum(), 1e-12) for a, w in by_user]
        draws.append((areas[0] - areas[1], means[0] - means[1], grouped[0] - grouped[1]))
    found = np.array(draws)
    result = {}
    for column, name in enumerate(("auc", "logloss", "gauc")):
        drawn = found[1:, column][np.isfinite(found[1:, column])]
        interval = np.percentile(drawn, _LEVEL).tolist() if len(drawn) else [np.nan, np.nan]
        result[name] = {"difference": float(found[0, column]), "interval": interval}
    moved = np.abs(first.scores - second.scores)
    return {**result, "drift": drift(first, second), "mean_move": float(moved.mean())}


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
    clipped = np.clip(rows.scores, _EPSILON, 1 - _EPSILON)
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


def predict(
    path: Folder, data: str, chosen: tuple[str, str], runtime: Runtime
) -> tuple[dict[str, Any], Rows]:
    """Return the metrics of the model at `path` on rows of a log, and its predictions.

    chosen: the days and the share of rows, as `choose_rows` returns them.

    Raises:
        ValueError: no checkpoint there, data that does not fit its schema, or no row with a label.
    """
    opened = open_checkpoint(path, data, chosen, runtime)
    parts: list[tuple[torch.Tensor, ...]] = []

    def keep(found: Predictions) -> None:
        first = [one[: found.num_examples, 0] for one in (found.probabilities, found.labels)]
        weights, users = found.weights[: found.num_examples, 0], found.groups[: found.num_examples]
        parts.append(tuple(one[weights > 0].cpu() for one in (*first, weights, users)))

    values = evaluate(opened.pipeline, opened.loader, opened.config, keep)
    opened.loader.close()
    scores, labels, weights, users = (torch.cat(one).numpy() for one in zip(*parts, strict=True))
    if not len(scores):
        name = opened.config.schema.labels[0].name
        raise ValueError(
            f"{data}: expected rows with a label {name!r}, got none; choose other days"
        )
    return values, Rows(
        scores=scores.astype(np.float64),
        labels=labels.astype(np.float64),
        weights=weights.astype(np.float64),
        users=users if opened.config.schema.user else np.arange(len(scores)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.compare",
        description="Compare models; JSON on stdout, a summary on stderr.",
    )
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="two checkpoints or runs; one: its intervals",
    )
    add("--data", required=True, help="the log's folder or file")
    add("--days", default="", help="FIRST:LAST or DAY; default: the first model's test rows")
    add("--replicates", type=int, default=200, help="of the bootstrap (default: 200)")
    options = parser.parse_args(arguments)

    def work() -> None:
        if len(options.models) > 2:
            raise ValueError(f"expected one or two models, got {len(options.models)}")
        if options.replicates < 1:
            raise ValueError(f"--replicates: expected at least 1, got {options.replicates}")
        paths = [resolve(path) for path in options.models]
        runtime = start()
        # The first model's test rows, for both: they are compared on the same ones.
        days, share, note = choose_rows(read_config(paths[0])[0], options.data, options.days)
        if note:
            print(f"note: {note}", file=sys.stderr, flush=True)
        found = [predict(path, options.data, (days, share), runtime) for path in paths]
        answer: dict[str, Any] = {"models": [metrics for metrics, _ in found]}
        for _, rows in found[1:]:
            answer["differences"] = compare(found[0][1], rows, options.replicates)
        print(json.dumps(json_ready(answer)), flush=True)
        names = options.models
        for name, (metrics, _) in zip(names, found, strict=True):
            print(*evaluated_lines(name, metrics), sep="\n", file=sys.stderr)
        if "differences" in answer:
            print(
                difference_line(names[0], names[1], answer["differences"]),
                file=sys.stderr,
                flush=True,
            )
        runtime.stop()

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Metrics that are undefined or implausible, each with the reason and a way out.

`doubts` reads an evaluation's numbers alone: the console, the alerts, the report and the nights ask
it of the same dictionary, and a page of old runs needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.metrics.spec import METRICS

# Below so many rows of a class the AUC's error is about 0.04 and more.
LEAST_OF_A_CLASS = 50
# Below so many, and without any, nothing else about the label means anything either.
_NOTHING_OF_A_CLASS = 10
_LEAST_USERS = 10
_TOP_SHARE = 0.5
_CALIBRATION = (0.5, 2.0)
_LEAK = 0.99

ADVICE = {
    "few_rows_of_a_class": (
        "Such an AUC moves by several hundredths with other rows. Way out: test on more days or "
        "rows."
    ),
    "gauc_of_few_users": (
        "Likely causes: an id that means 'unknown' (0, -1, an empty text) is taken for a user; few "
        "users with both values of the label. Way out: write unknown users as nulls; test on more "
        "days; read AUC instead."
    ),
    "interval_without_width": (
        "The bootstrap found nothing that moves. Likely causes: one user, or one row, has all the "
        "weight of a class; constant predictions. Way out: check the user column; test on more "
        "rows."
    ),
    "worse_than_constant": (
        "Predicting the label mean for every row does as well. Likely causes: a label rate that "
        "differs between training and test rows; too many epochs; a learning rate that is too "
        "high. Way out: compare the days' label means; train fewer epochs."
    ),
    "miscalibrated": (
        "Likely causes: labels of the training rows that are not final (clicks not yet joined); "
        "negatives that were sampled; a label rate that jumped. Way out: compare the label means "
        "of the training and the test days."
    ),
    "reversed_order": (
        "A constant would rank better. Likely causes: a label that means the opposite; features "
        "of other rows; within users, features that tell users apart and not items. Way out: "
        "check the label's column; add features of items."
    ),
    "label_leak": (
        "No click log is that easy. Likely cause: a feature that is known only after the label, "
        "or that is the label. Way out: leave such columns out of the schema."
    ),
    "undefined_auc": (
        "Likely causes: labels that were not joined to the test rows; too few rows. Way out: "
        "check the test days' label means; test on more rows."
    ),
}


def doubts(
    metrics: Mapping[str, Any],
    intervals: Mapping[str, Any] | None = None,
    label: str = "",
) -> dict[str, str]:
    """Return what is doubtful about an evaluation: name -> what was found.

    Args:
        metrics: Of an evaluation; what is missing or no number is not judged.
        intervals: Of the metrics, [low, high] by name.
        label: Named in the texts, where there are several.
    """
    known = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    found = {
        "few_rows_of_a_class": _few_rows(known),
        "undefined_auc": _undefined(metrics, known),
        "gauc_of_few_users": _few_users(known),
        "interval_without_width": _no_width(known, intervals or {}),
        "worse_than_constant": _above(known, "ne", 1.0),
        "miscalibrated": _miscalibrated(known),
        "reversed_order": _reversed(known, intervals or {}),
        "label_leak": _leak(known),
    }
    if _least_of_a_class(known)[0] < _NOTHING_OF_A_CLASS:
        # One reason for all: the others would be consequences of it, or chance.
        found = {name: found[name] for name in ("few_rows_of_a_class", "undefined_auc")}
    start = f"label {label!r}: " if label else ""
    return {name: f"{start}{text}" for name, text in found.items() if text}


def all_doubts(metrics: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, str]:
    """Return the doubts about every label of an evaluation, those of one name together.

    Args:
        metrics: As `Metrics.compute` returns them.
        details: What `Details` has found, or nothing.
    """
    ending = "_auc_standard_error"
    labels = [key.removesuffix(ending) for key in metrics if key.endswith(ending)]
    if not labels:
        return doubts(metrics, _mapping(details.get("intervals")))
    by_label = _mapping(details.get("labels"))
    found: dict[str, list[str]] = {}
    for label in labels:
        start = f"{label}_"
        own = {
            key.removeprefix(start): one for key, one in metrics.items() if key.startswith(start)
        }
        intervals = _mapping(_mapping(by_label.get(label)).get("intervals"))
        for name, text in doubts(own, intervals, label).items():
            found.setdefault(name, []).append(text)
    return {name: "; ".join(texts) for name, texts in found.items()}


def _few_rows(known: Mapping[str, float]) -> str:
    """Say that a class has few rows; a class without rows has no AUC at all."""
    least, name = _least_of_a_class(known)
    if not 0 < least < LEAST_OF_A_CLASS or "auc" not in known:
        return ""
    return f"auc {known['auc']:.4f} rests on {least:,.0f} {name} of {known['rows']:,.0f} rows"


def _least_of_a_class(known: Mapping[str, float]) -> tuple[float, str]:
    """Return how many rows the class with fewer of them has, and its name; infinite if unknown."""
    rows, positive = known.get("rows"), known.get("positive_rows")
    if rows is None or (positive is None and "label_mean" not in known):
        return math.inf, ""
    positive = rows * known["label_mean"] if positive is None else positive
    return min((positive, "positive"), (rows - positive, "negative"))


def _undefined(metrics: Mapping[str, Any], known: Mapping[str, float]) -> str:
    if "auc" not in metrics or "auc" in known:
        return ""
    if known.get("weight") == 0:
        return "no test row counts"
    rate = known.get("label_mean")
    return f"the label is {rate:.0f} in every test row" if rate in (0.0, 1.0) else ""


def _few_users(known: Mapping[str, float]) -> str:
    users, top = known.get("gauc_users"), known.get("gauc_top_share", 0.0)
    if "gauc" not in known or users is None:
        return ""
    if users < _LEAST_USERS:
        many = "one user" if users == 1 else f"{users:,.0f} users"
        return f"gauc {known['gauc']:.4f} is of {many} with both values of the label"
    if top > _TOP_SHARE:
        return f"one of {users:,.0f} users has {top:.0%} of the weight behind the gauc"
    return ""


def _no_width(known: Mapping[str, float], intervals: Mapping[str, Any]) -> str:
    flat = [
        name
        for name, ends in intervals.items()
        if isinstance(ends, list | tuple) and len(ends) == 2 and all(map(_is_number, ends))
        if ends[0] == ends[1] and name in METRICS
    ]
    values = ", ".join(f"{name} {known.get(name, math.nan):.4f}" for name in flat)
    return f"the 95 % interval of {values} has no width" if flat else ""


def _above(known: Mapping[str, float], name: str, limit: float) -> str:
    value = known.get(name, -math.inf)
    return f"{name} is {value:.4f}" if value >= limit else ""


def _miscalibrated(known: Mapping[str, float]) -> str:
    value, (low, high) = known.get("calibration"), _CALIBRATION
    if value is None or low <= value <= high:
        return ""
    return (
        f"calibration is {value:.4f}: predictions sum to "
        f"{'less than half' if value < low else 'more than twice'} of the labels"
    )


def _reversed(known: Mapping[str, float], intervals: Mapping[str, Any]) -> str:
    """Say that an AUC or a GAUC of enough users is below 0.5 by more than its error.

    The error is the 95 % interval's where there is one. An AUC has a standard error too. The AUC of
    one user deviates by at most 0.5, so an average over n users with equal weights by
    0.5 / sqrt(n); a heavy user adds its share.
    """
    users, top = known.get("gauc_users", math.inf), known.get("gauc_top_share", 0.0)
    errors = {
        "auc": known.get("auc_standard_error", 0.0),
        "gauc": math.hypot(top, math.sqrt(1 / max(users, 1.0))) / 2,
    }
    parts = []
    for name, error in errors.items():
        value, ends = known.get(name, math.inf), intervals.get(name)
        high = value + 2 * error
        if isinstance(ends, list | tuple) and len(ends) == 2 and _is_number(ends[1]):
            high = float(ends[1])
        if max(value, high) < 0.5 and (name == "auc" or users >= _LEAST_USERS):
            parts.append(f"{name} is {value:.4f}")
    return f"{' and '.join(parts)}, below 0.5" if parts else ""


def _leak(known: Mapping[str, float]) -> str:
    return f"auc is {known['auc']:.4f}" if known.get("auc", 0.0) > _LEAK else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

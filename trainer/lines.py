# SPDX-License-Identifier: MIT
"""Numbers as lines for people: of an interval of training, of an evaluation, of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def interval_line(record: Mapping[str, Any]) -> str:
    """Return the interval's main numbers as one line."""
    return (
        f"loss {record['loss']:.4f}  auc {record['auc']:.4f}  "
        f"{record['rows_per_second']:,.0f} rows/s  input wait {record['input_wait']:.0%}"
    )


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """Return an evaluation's main numbers as one line; a GAUC that a log cannot have is left out.

    Behind the AUC stands its standard error, without which two evaluations cannot be compared.
    """
    parts = []
    for name in ("auc", "gauc", "logloss", "ne", "calibration"):
        if name not in metrics or (name == "gauc" and math.isnan(metrics[name])):
            continue
        parts.append(f"{name} {metrics[name]:.4f}")
        error = metrics.get(f"{name}_standard_error", math.nan)
        if not math.isnan(error):
            parts[-1] += f" ± {error:.4f}"
    return ", ".join(parts)


def evaluated_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return what an evaluation found of the model `name`, and below it a line of each slice."""
    lines = [f"{name}: {evaluation_line(found)} over {found['rows']:,.0f} rows"]
    for column, slices in found.get("slices", {}).items():
        lines += [
            f"  {column} {one['slice']}: {evaluation_line(one)} over {one['rows']:,.0f} rows"
            for one in slices
        ]
    return lines


def difference_line(first: str, second: str, differences: Mapping[str, Any]) -> str:
    """Return the differences of two models with their intervals, and whether AUC tells them apart.

    differences: as `trainer.compare.compare` returns them.
    """
    parts = []
    for name in ("auc", "gauc", "logloss"):
        low, high = differences[name]["interval"]
        if not math.isnan(low):
            parts.append(f"{name} {differences[name]['difference']:+.4f} [{low:+.4f}, {high:+.4f}]")
    low, high = differences["auc"]["interval"]
    told = f"{first} has the higher AUC" if low > 0 else f"{second} has the higher AUC"
    if not (low > 0 or high < 0):
        told = "the AUC of these rows does not tell them apart"
    return f"{first} - {second}: {', '.join(parts)} (95 % intervals); {told}"

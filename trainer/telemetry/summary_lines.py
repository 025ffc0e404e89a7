# SPDX-License-Identifier: MIT
"""Numbers as lines for people: of an interval of training, of an evaluation, of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.metrics.spec import METRICS


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
    for name, metric in METRICS.items():
        if name not in metrics or (metric.per_user and math.isnan(metrics[name])):
            continue
        parts.append(f"{name} {metrics[name]:{metric.form}}")
        error = metrics.get(f"{name}_standard_error", math.nan)
        if not math.isnan(error):
            parts[-1] += f" ± {error:.4f}"
    return ", ".join(parts)


def evaluated_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return what an evaluation found of the model `name`; below it, other labels and slices."""
    lines = [f"{name}: {evaluation_line(found)} over {found['rows']:,.0f} rows"]
    ending = "_auc_standard_error"
    labels = [key.removesuffix(ending) for key in found if key.endswith(ending)]
    for label in labels[1:]:  # what stands above is the first one's
        prefix = f"{label}_"
        own = {
            key.removeprefix(prefix): one for key, one in found.items() if key.startswith(prefix)
        }
        lines.append(f"  label {label}: {evaluation_line(own)} over {own['rows']:,.0f} rows")
    for column, slices in found.get("slices", {}).items():
        lines += [
            f"  {column} {one['slice']}: {evaluation_line(one)} over {one['rows']:,.0f} rows"
            for one in slices
        ]
    return lines


def difference_line(first: str, second: str, differences: Mapping[str, Any]) -> str:
    """Return the differences of two models with their intervals, and whether AUC separates them.

    Args:
        first: The first model's name.
        second: The second model's name.
        differences: The `differences` that `trainer.evaluation.comparison.Paired.finish` returns.
    """
    low, high = differences["auc"]["interval"]
    told = f"{first} has the higher AUC" if low > 0 else f"{second} has the higher AUC"
    if not (low > 0 or high < 0):
        told = "the AUC of these rows does not tell them apart"
    return f"{first} - {second}: {_differences(differences)} (95 % intervals); {told}"


def compared_lines(names: Sequence[str], found: Mapping[str, Any]) -> list[str]:
    """Return the result of `trainer.compare`: a line a model, their difference, and each part.

    Args:
        names: The models' names.
        found: The result of the comparison.
    """
    lines = []
    for name, model in zip(names, found["models"], strict=True):
        lines += evaluated_lines(name, model)
    if "differences" in found:
        lines.append(difference_line(names[0], names[1], found["differences"]))
    for label, part in found.get("labels", {}).items():
        lines.append(f"  label {label}: {_part(part)}")
    for column, slices in found.get("slices", {}).items():
        lines += [f"  {column} {one['slice']}: {_part(one)}" for one in slices]
    return lines


def _part(found: Mapping[str, Any]) -> str:
    """Return the differences of a label or slice, or of a single model its metrics."""
    if "differences" in found:
        said = _differences(found["differences"])
    else:
        model = found["models"][0]
        values = {name: (model[name], model["intervals"][name]) for name in model["intervals"]}
        said = _with_intervals(values, "")
    rows = f" over {found['rows']:,} rows" if "rows" in found else ""
    return f"{said or 'not defined'}{rows}"


def _differences(found: Mapping[str, Any]) -> str:
    names = [name for name in METRICS if name in found]
    values = {name: (found[name]["difference"], found[name]["interval"]) for name in names}
    return _with_intervals(values, "+")


def _with_intervals(found: Mapping[str, tuple[float, Sequence[float]]], sign: str) -> str:
    """Return name, value and interval of each metric that has one."""
    return ", ".join(
        f"{name} {value:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]"
        for name, (value, (low, high)) in found.items()
        if METRICS[name].compared and not math.isnan(low)
    )

# SPDX-License-Identifier: MIT
"""The report's intervals, calibration plot, and GAUC by users' activity: how far to trust a run.

They are what a run's last evaluation left in evaluation.json (`trainer/metrics/bootstrap.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from pipelines.reporting.run_data import DASH, Run, entry, is_number, records, written
from pipelines.reporting.svg_charts import Axes, Line, chart
from trainer.metrics.spec import METRICS, with_intervals

INTERVALS = (
    "95 % intervals by a bootstrap over users (over rows where there are none): how far the figure "
    "would move with other users of the same kind. Two runs on the same rows are told apart by "
    "trainer.compare, whose interval is that of their difference, and narrower."
)
CALIBRATION = (
    "Rows in twenty bins of equal weight, by prediction: the mean prediction against the share of "
    "positives. On the diagonal a prediction means what it says; ECE is the mean distance from it."
)
_MAX_LABELS, _MAX_BINS = 20, 100
ACTIVITY = "GAUC of users by how many test rows they have; only users with both labels have one."


def intervals(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return a table of each run's metrics with their intervals, by label, if a run has some."""
    rows = []
    for run in runs:
        for label, part in _parts(run):
            found = part.get("intervals")
            if not isinstance(found, dict):
                continue
            cells = []
            for key in with_intervals():
                ends = found.get(key)
                low, high = ends if isinstance(ends, list) and len(ends) == 2 else (None, None)
                value = written(run.metrics.get(f"{label}_{key}" if label else key))
                between = f" [{written(low)}, {written(high)}]" if is_number(low) else ""
                cells.append(f"{value}{between}")
            rows.append([named(run, label), *cells, written(entry(part, "reliability", "ece"))])
    header = ["Run", *(METRICS[key].title for key in with_intervals()), "ECE"]
    hints = {"ECE": "Expected calibration error: mean distance from the diagonal"}
    return {"header": header, "rows": rows, "hints": hints, "best": {}} if rows else None


def named(run: Run, label: str) -> str:
    """Return what a run's label is called; the run alone where it has one label."""
    return f"{run.name}: {label}" if label else run.name


def calibrations(runs: Sequence[Run]) -> list[tuple[str, Markup]]:
    """Return the title and the calibration plot of each label that a run has one of."""
    labels = dict.fromkeys(label for run in runs for label, _ in _parts(run))
    found = [(label, _calibration(runs, label, number)) for number, label in enumerate(labels)]
    return [
        (f"Calibration of {label}" if label else "Calibration", svg) for label, svg in found if svg
    ]


def _title(label: str) -> str:
    return f"Calibration of {label}" if label else "Calibration"


def _calibration(runs: Sequence[Run], label: str, number: int) -> Markup | None:
    lines = [
        Line(
            label=run.name,
            series=index,
            points=[
                (one["prediction"], one["label"])
                for own, part in _parts(run)
                if own == label
                for one in _bins(part)
                if is_number(one.get("prediction")) and is_number(one.get("label"))
            ],
        )
        for index, run in enumerate(runs)
    ]
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    top = 1.05 * max(max(point) for point in points) or 1.0
    lines.append(Line(label="diagonal", series=len(runs), points=[(0.0, 0.0), (top, top)]))
    axes = Axes(
        title=_title(label),
        x="mean prediction",
        y="share of positives",
        y_limits=(0.0, top),
        plain_x=True,
    )
    return Markup(chart(f"calibration-{number}" if number else "calibration", axes, lines))


def calibration_tables(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """Return the numbers behind a run's calibration plots, by what they are of."""
    found = []
    header = ["Predictions", "Mean prediction", "Share of positives", "Weight"]
    for label, part in _parts(run):
        rows = [
            [
                f"{written(one.get('low'))} to {written(one.get('high'))}",
                *(written(one.get(key)) for key in ("prediction", "label")),
                written(one.get("weight"), ",.0f"),
            ]
            for one in _bins(part)
        ]
        if rows:
            table = {"header": header, "rows": rows, "hints": {}, "best": {}}
            found.append((named(run, label), table))
    return found


def activities(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """Return tables of GAUC by users' activity, by what they are of."""
    tables = []
    header = ["Test rows of a user", "Users", "With both labels", "Rows", "GAUC"]
    for label, part in _parts(run):
        found = records(part.get("user_activity"))
        if not found:
            continue
        rows = []
        for one in found:
            low, high = (written(one.get(key), ",.0f") for key in ("from_rows", "to_rows"))
            ends = low if low == high else f"{low} to {high}"
            counts = [written(one.get(key), ",.0f") for key in ("users", "users_with_both", "rows")]
            rows.append([ends, *counts, written(one.get("gauc"))])
        tables.append(
            (named(run, label), {"header": header, "rows": rows, "hints": {}, "best": {}})
        )
    return tables


def phases(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return where a step's time went: shares of the sampled steps of each run."""
    found = [run.evaluation.get("phase_seconds") for run in runs]
    measured = [
        {name: value for name, value in one.items() if is_number(value) and value >= 0}
        if isinstance(one, dict)
        else {}
        for one in found
    ]
    names = list(dict.fromkeys(name for one in measured for name in one))
    rows = []
    for run, seconds in zip(runs, measured, strict=True):
        total = sum(seconds.values())
        if total:
            shares = [f"{seconds.get(name, 0) / total:.1%}" for name in names]
            steps = run.evaluation.get("sampled_steps")
            step = DASH
            if is_number(steps) and steps > 0:
                step = f"{1e3 * total / steps:,.1f}"
            rows.append([run.name, step, *shares])
    header = ["Run", "ms a step", *(name.replace("_", " ") for name in names)]
    return {"header": header, "rows": rows, "hints": {}, "best": {}} if rows else None


def _parts(run: Run) -> list[tuple[str, dict[str, Any]]]:
    """Return a run's evaluation by label; under no name where there is one label."""
    found = run.evaluation.get("labels")
    if not isinstance(found, dict):
        return [("", run.evaluation)]
    parts = [(name, part) for name, part in found.items() if isinstance(part, dict)]
    return parts[:_MAX_LABELS]


def _bins(part: dict[str, Any]) -> list[dict[str, Any]]:
    return records(entry(part, "reliability", "bins"))[:_MAX_BINS]

# SPDX-License-Identifier: MIT
"""The report's intervals, calibration plot, and GAUC by users' activity: how far to trust a run.

They are what a run's last evaluation left in evaluation.json (`trainer/depth.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from pipelines.figures import Axes, Line, chart
from pipelines.runs import DASH, Run, is_number, written

INTERVALS = (
    "95 % intervals by a bootstrap over users (over rows where there are none): how far the figure "
    "would move with other users of the same kind. Two runs on the same rows are told apart by "
    "trainer.compare, whose interval is that of their difference, and narrower."
)
CALIBRATION = (
    "Rows in twenty bins of equal weight, by prediction: the mean prediction against the share of "
    "positives. On the diagonal a prediction means what it says; ECE is the mean distance from it."
)
ACTIVITY = "GAUC of users by how many test rows they have; only users with both labels have one."
METRICS = (
    ("AUC", "auc"),
    ("GAUC", "gauc"),
    ("Logloss", "logloss"),
    ("NE", "ne"),
    ("Calibration", "calibration"),
)


def intervals(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return a table of each run's metrics with their intervals, if a run has some."""
    rows = []
    for run in runs:
        found = run.evaluation.get("intervals")
        if not isinstance(found, dict):
            continue
        cells = []
        for _, key in METRICS:
            low, high = found.get(key) or (None, None)
            value = written(run.metrics.get(key))
            between = f" [{written(low)}, {written(high)}]" if is_number(low) else ""
            cells.append(f"{value}{between}")
        ece = run.evaluation.get("reliability", {}).get("ece")
        rows.append([run.name, *cells, written(ece)])
    header = ["Run", *(name for name, _ in METRICS), "ECE"]
    hints = {"ECE": "Expected calibration error: mean distance from the diagonal"}
    return {"header": header, "rows": rows, "hints": hints, "best": {}} if rows else None


def calibration(runs: Sequence[Run]) -> Markup | None:
    """Return the calibration plot of the runs that have one."""
    lines = [
        Line(
            label=run.name,
            series=index,
            points=[(one["prediction"], one["label"]) for one in _bins(run)],
        )
        for index, run in enumerate(runs)
    ]
    points = [point for line in lines for point in line.points]
    if not points:
        return None
    top = 1.05 * max(max(point) for point in points)
    lines.append(Line(label="diagonal", series=len(runs), points=[(0.0, 0.0), (top, top)]))
    axes = Axes(
        title="Calibration",
        x="mean prediction",
        y="share of positives",
        y_limits=(0.0, top),
        plain_x=True,
    )
    return Markup(chart("calibration", axes, lines))


def calibration_table(run: Run) -> dict[str, Any] | None:
    """Return the numbers behind a run's calibration plot."""
    rows = [
        [
            f"{written(one['low'])} to {written(one['high'])}",
            *(written(one[key]) for key in ("prediction", "label")),
            written(one["weight"], ",.0f"),
        ]
        for one in _bins(run)
    ]
    header = ["Predictions", "Mean prediction", "Share of positives", "Weight"]
    return {"header": header, "rows": rows, "hints": {}, "best": {}} if rows else None


def activity(run: Run) -> dict[str, Any] | None:
    """Return a table of GAUC by users' activity."""
    found = run.evaluation.get("user_activity")
    if not isinstance(found, list) or not found:
        return None
    rows = []
    for one in found:
        low, high = one["from_rows"], one["to_rows"]
        ends = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        counts = [written(one[key], ",.0f") for key in ("users", "users_with_both", "rows")]
        rows.append([ends, *counts, written(one.get("gauc"))])
    header = ["Test rows of a user", "Users", "With both labels", "Rows", "GAUC"]
    return {"header": header, "rows": rows, "hints": {}, "best": {}}


def phases(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return where a step's time went: shares of the sampled steps of each run."""
    found = [run.evaluation.get("phase_seconds") for run in runs]
    measured = [one if isinstance(one, dict) else {} for one in found]
    names = list(dict.fromkeys(name for one in measured for name in one))
    rows = []
    for run, seconds in zip(runs, measured, strict=True):
        total = sum(value for value in seconds.values() if is_number(value))
        if total:
            shares = [f"{seconds.get(name, 0) / total:.1%}" for name in names]
            steps = run.evaluation.get("sampled_steps") or 0
            step = f"{1e3 * total / steps:,.1f}" if steps else DASH
            rows.append([run.name, step, *shares])
    header = ["Run", "ms a step", *(name.replace("_", " ") for name in names)]
    return {"header": header, "rows": rows, "hints": {}, "best": {}} if rows else None


def _bins(run: Run) -> list[dict[str, Any]]:
    found = run.evaluation.get("reliability")
    return found.get("bins", []) if isinstance(found, dict) else []

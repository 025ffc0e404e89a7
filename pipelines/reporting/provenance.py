# SPDX-License-Identifier: MIT
"""The context of a run: how it differs from its recipe and from other runs, and its data.

The other runs are those beside it in its folder's parent that test on the same rows. Statistics of
the days are those that ingestion left in the log; a log that is not there any more has none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.reporting.run_data import (
    CHANGES,
    DASH,
    Run,
    entry,
    is_number,
    read_data,
    read_run,
    records,
    written,
)
from trainer.metrics.spec import METRICS
from trainer.runtime.dict_diff import differences
from trainer.runtime.printable import printable

# What `pipelines/ingestion/partition.py` calls the file; it imports Arrow, which takes long.
_STATISTICS = "_statistics.json"
_SAME_TEST = ("path", "test_path", "test_days", "test_rows")
_SHOWN = 12
_NEIGHBOURS = 200


def changes(run: Run) -> dict[str, Any] | str:
    """Return a table of the settings that are not the recipe's, or why there is none.

    The training noted them itself. A recipe is code: one that a configuration names is not looked
    up here, since reading a folder must not run anything.
    """
    name = run.config.get("recipe")
    if not isinstance(name, str) or not name:
        return "its configuration names no recipe."
    name = printable(name)
    found = run.changes.get("settings")
    if not isinstance(found, list):
        return f"its folder has no {CHANGES}, where a training notes how it differs from {name}."
    rows = [
        [str(one.get("setting")), _short(one.get("recipe")), _short(one.get("run"))]
        for one in records(found)
    ]
    if not rows:
        return f"every setting is that of {name}."
    header = ["Setting", f"In {name}", "In this run"]
    return {"header": header, "rows": rows, "hints": {}, "best": {}}


def differing(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return one table of the settings that differ between runs; None if there is no such."""
    known = [run for run in runs if run.config]
    if len(known) < 2:
        return None
    first = known[0]
    found: dict[str, list[Any]] = {}
    for number, run in enumerate(known[1:], start=1):
        for one in differences(first.config, run.config):
            found.setdefault(one.path, [one.old] * len(known))[number] = one.new
    rows = [[path, *map(_short, values)] for path, values in sorted(found.items())]
    header = ["Setting", *(run.name for run in known)]
    return {"header": header, "rows": rows, "hints": {}, "best": {}} if rows else None


def neighbours(run: Run) -> dict[str, Any] | None:
    """Return the run beside the one that finished before it, and the best one, on the same test."""
    own = _finished(run.folder)
    if run.folder is None or own is None or not is_number(run.metrics.get("auc")):
        return None
    found = []
    for folder in sorted(run.folder.resolve().parent.iterdir())[:_NEIGHBOURS]:
        time = _finished(folder)
        if time is None or folder == run.folder.resolve():
            continue
        other = read_run(folder, folder.name, brief=True)
        if is_number(other.metrics.get("auc")) and _same_test(run, other):
            found.append((time, other))
    before = max((one for one in found if one[0] < own), key=lambda one: one[0], default=None)
    best = max(found, key=lambda one: one[1].metrics["auc"], default=None)
    shown = [("this run", run)]
    if before is not None:
        shown.append((f"the one before: {before[1].name}", before[1]))
    if best is not None and best is not before:
        shown.append((f"the best beside it: {best[1].name}", best[1]))
    if len(shown) == 1:
        return None
    rows = []
    for title, one in shown:
        lead = run.metrics["auc"] - one.metrics["auc"] if one is not run else None
        values = [written(one.metrics.get(key)) for key in METRICS]
        rows.append([title, *values, DASH if lead is None else f"{lead:+.4f}"])
    header = ["Run", *(one.title for one in METRICS.values()), "This run's AUC is higher by"]
    return {"header": header, "rows": rows, "hints": {}, "best": {}}


def data_drift(run: Run) -> dict[str, Any] | None:
    """Return the columns of the test day against the day before, as ingestion measured them."""
    day = _day(run)
    path = Path(str(run.data.get("test_path") or run.data.get("path") or "")) / f"dt={day}"
    try:
        found = read_data(path / _STATISTICS) if day else None
    except (OSError, ValueError):
        return None
    columns, drift = entry(found, "columns"), entry(found, "drift")
    if not isinstance(columns, dict) or not isinstance(drift, dict):
        return None
    rows = []
    for name, one in columns.items():
        nulls, count = entry(one, "nulls"), entry(one, "count")
        known = is_number(nulls) and is_number(count) and count > 0
        moved = drift.get(name)
        rows.append(
            [
                name,
                written(nulls / count if known else None, ".2%"),
                written(entry(moved, "null_share"), "+.2%"),
                written(entry(one, "cardinality"), ",.0f"),
                written(entry(moved, "cardinality"), ".2f"),
                written(entry(one, "mean"), ",.4g"),
                written(entry(moved, "mean"), "+.2f"),
            ]
        )
    rows.sort(key=lambda row: -_size(drift.get(row[0])))
    header = ["Column", "Null", "Change", "Distinct", "Times the day before's"]
    header += ["Mean", "Change (deviations)"]
    return {"header": header, "rows": rows[:_SHOWN], "hints": {}, "best": {}} if rows else None


def _day(run: Run) -> str:
    """Return the first day that a run was tested on, empty if it names none."""
    day = str(run.data.get("test_days") or "").partition(":")[0]
    return day if re.fullmatch(r"\d{4}-\d{2}-\d{2}", day) else ""


def no_drift(runs: Sequence[Run]) -> str:
    """Return why the first run's test day has no statistics."""
    if runs and not runs[0].data.get("test_days"):
        return "The run tests a share of the rows and no day, which could be held against another."
    return (
        "The log has no statistics of the test day that can be read here; "
        "python -m pipelines.ingest writes them."
    )


def _size(moved: Any) -> float:
    """Return how far a column has moved, to sort by."""
    shares, means, ratio = (entry(moved, name) for name in ("null_share", "mean", "cardinality"))
    size = 10 * abs(shares) if is_number(shares) else 0.0
    size += abs(means) if is_number(means) else 0.0
    return size + (abs(math.log(max(ratio, 1e-9))) if is_number(ratio) else 0.0)


def _finished(folder: Path | None) -> float | None:
    """Return when a run wrote its metrics, or None."""
    try:
        return None if folder is None else (folder / "metrics.json").stat().st_mtime
    except OSError:
        return None


def _same_test(first: Run, second: Run) -> bool:
    labels = [entry(run.config, "schema", "labels") for run in (first, second)]
    same = all(first.data.get(name) == second.data.get(name) for name in _SAME_TEST)
    return same and labels[0] == labels[1]


def _short(value: Any) -> str:
    """Return a value in a cell's length; of a long list its length."""
    if isinstance(value, list) and len(json.dumps(value)) > 60:
        return f"{len(value)} entries"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text else "''"

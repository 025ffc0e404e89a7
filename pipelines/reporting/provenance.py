# SPDX-License-Identifier: MIT
"""What the report says around a run: how it differs from its recipe, from other runs, and its data.

The other runs are those beside it in its folder's parent that test on the same rows. Statistics of
the days are those that ingestion left in the log; a log that is not there any more has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.ingestion.partition import STATISTICS
from pipelines.reporting.run_data import DASH, Run, is_number, read_run, written
from trainer.metrics.spec import METRICS
from trainer.runtime.dict_diff import differences

_SAME_TEST = ("path", "test_path", "test_days", "test_rows")
_SHOWN = 12
_NEIGHBOURS = 200


def changes(run: Run) -> dict[str, Any] | str:
    """Return a table of the settings that are not the recipe's, or why there is none."""
    name = run.config.get("recipe")
    if not name:
        return "its configuration names no recipe."
    from trainer.config.config import (  # seconds, which a page of old runs need not
        load_recipe,
        to_dict,
    )

    try:
        recipe = to_dict(load_recipe(name))
    except ValueError:
        return f"the recipe {name} is not known here, so its settings cannot be compared."
    rows = [[path, _short(old), _short(new)] for path, old, new in differences(recipe, run.config)]
    if not rows:
        return f"every setting is that of {name}."
    header = ["Setting", f"In {name}", "In this run"]
    return {"header": header, "rows": rows, "hints": {}, "best": {}}


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
        other = read_run(folder, folder.name)
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
    data = run.config.get("data") or {}
    day = str(data.get("test_days") or "").partition(":")[0]
    path = Path(str(data.get("test_path") or data.get("path") or "")) / f"dt={day}" / STATISTICS
    try:
        found = json.loads(path.read_text("utf-8")) if day else {}
        columns, drift = found["columns"], found["drift"]
    except (OSError, ValueError, KeyError):
        return None
    rows = []
    for name, one in columns.items():
        moved = drift.get(name, {})
        rows.append(
            [
                name,
                written(one.get("nulls", 0) / max(one.get("count", 1), 1), ".2%"),
                written(moved.get("null_share"), "+.2%"),
                written(one.get("cardinality"), ",.0f"),
                written(moved.get("cardinality"), ".2f"),
                written(one.get("mean"), ",.4g"),
                written(moved.get("mean"), "+.2f"),
            ]
        )
    rows.sort(key=lambda row: -_size(drift.get(row[0], {})))
    header = ["Column", "Null", "Change", "Distinct", "Times the day before's"]
    header += ["Mean", "Change (deviations)"]
    return {"header": header, "rows": rows[:_SHOWN], "hints": {}, "best": {}} if rows else None


def no_drift(runs: Sequence[Run]) -> str:
    """Return why there is nothing to say of the first run's test day."""
    data = (runs[0].config.get("data") or {}) if runs else {}
    if runs and not data.get("test_days"):
        return "The run tests a share of the rows and no day, which could be held against another."
    return (
        "The log has no statistics of the test day that can be read here; "
        "python -m pipelines.ingest writes them."
    )


def _size(moved: dict[str, Any]) -> float:
    """Return how far a column has moved, to sort by."""
    ratio = moved.get("cardinality") or 1.0
    mean = moved.get("mean") or 0.0
    return 10 * abs(moved.get("null_share") or 0.0) + abs(mean) + abs(math.log(max(ratio, 1e-9)))


def _finished(folder: Path | None) -> float | None:
    """Return when a run wrote its metrics, or None."""
    try:
        return None if folder is None else (folder / "metrics.json").stat().st_mtime
    except OSError:
        return None


def _same_test(first: Run, second: Run) -> bool:
    data = [run.config.get("data") or {} for run in (first, second)]
    labels = [(run.config.get("schema") or {}).get("labels") for run in (first, second)]
    same = all(data[0].get(name) == data[1].get(name) for name in _SAME_TEST)
    return same and labels[0] == labels[1]


def _short(value: Any) -> str:
    """Return a value in a cell's length; of a long list its length."""
    if isinstance(value, list) and len(json.dumps(value)) > 60:
        return f"{len(value)} entries"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text else "''"

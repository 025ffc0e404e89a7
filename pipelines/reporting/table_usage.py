# SPDX-License-Identifier: MIT
"""The report's tables of embedding tables: occupancy, hit rate of ids, cost of a step.

Of each run, its largest tables at the latest evaluation (tables.jsonl) and the counts of a sampled
step, which the run's metrics hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.reporting.run_data import Run, is_number, written

_SHOWN = 20
# Name of a column, its hint, the key of a table's numbers, and how they are written.
_COLUMNS = (
    ("Rows", "Of all ranks", "rows", ",.0f"),
    ("MB", "Of weights", "bytes", ",.1f"),
    ("Occupancy", "Share of the rows that were ever updated", "occupancy", ".1%"),
    ("Hit rate", "Share of the test ids whose row was ever updated", "hit_rate", ".1%"),
    ("Missing", "Share of null, empty and out-of-range ids in training", "missing", ".2%"),
    ("Top 10", "Share of the training ids on the ten most frequent rows", "top_share", ".1%"),
    ("Mean norm", "Of a sample of the updated rows", "mean_norm", ".3f"),
)
_STEP = (
    ("Features", "step_features"),
    ("Lookup kernels", "step_lookups"),
    ("Exchanges", "step_collectives"),
    ("Ids", "step_ids_in"),
    ("Ids sent", "step_ids_sent"),
    ("Ids looked up", "step_ids_looked_up"),
    ("Bytes sent", "step_bytes_sent"),
)


def table_use(run: Run) -> dict[str, Any] | None:
    """Return the largest tables of a run at its latest evaluation, if it noted them."""
    found = run.tables[-1].get("tables") if run.tables else None
    found = found if isinstance(found, dict) else {}
    tables = {name: one for name, one in found.items() if isinstance(one, dict)}
    if not tables:
        return None
    sizes = {
        name: one["bytes"] if is_number(one.get("bytes")) else 0 for name, one in tables.items()
    }
    rows = []
    for name in sorted(tables, key=lambda name: -sizes[name])[:_SHOWN]:
        numbers = {**tables[name], "bytes": sizes[name] / 1e6}
        rows.append([name, *(written(numbers.get(key), form) for _, _, key, form in _COLUMNS)])
    header = ["Table", *(name for name, _, _, _ in _COLUMNS)]
    hints = {name: hint for name, hint, _, _ in _COLUMNS}
    return {"header": header, "rows": rows, "hints": hints, "best": {}}


def step_use(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return what a sampled step of each run needed, all ranks together, if a run counted it."""
    rows = [
        [run.name, *(written(run.metrics.get(key), ",.0f") for _, key in _STEP)]
        for run in runs
        if is_number(run.metrics.get("step_lookups"))
    ]
    if not rows:
        return None
    header = ["A step, all ranks", *(name for name, _ in _STEP)]
    return {"header": header, "rows": rows, "hints": {}, "best": {}}

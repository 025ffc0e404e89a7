# SPDX-License-Identifier: MIT
"""Which of several runs is best, and whether the test rows can show it: tables and the verdict.

The difference of two runs has the error √(s1² + s2²) if their errors are independent. On the same
rows they move together, and a paired estimate would be smaller; but it needs every prediction,
which a run does not keep. So a run is called best only if it leads every other by more than the
95 % interval of this cautious error, and only by AUC: then `trainer.compare`, which predicts the
rows again and decides, does not contradict it. Errors are DeLong's, or those of the bootstrap over
users where that found larger ones.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.reporting.run_data import COLUMNS, DASH, Run, entry, is_number, read_runs, written
from trainer.runtime.printable import printable

_NORMAL_95 = 1.96
# Columns that follow from the AUC, in which the best run is marked.
_BY_AUC = ("AUC", "To ceiling")
_TEXT_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Lead:
    """How far the run of the highest AUC is ahead of the one that comes closest in errors.

    Args:
        first: index of the first run.
        rival: index of the run it is compared with.
        lead: difference of AUC.
        open: what the 95 % interval of the difference leaves open, unpaired.
    """

    first: int
    rival: int
    lead: float
    open: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the lead leaves no zero."""
        return self.lead > self.open


def by_auc(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, highest AUC first; those without one come last, in their order."""
    return sorted(
        runs, key=lambda run: -auc if is_number(auc := run.metrics.get("auc")) else math.inf
    )


def leader(runs: Sequence[Run]) -> Lead | None:
    """Return the lead of the best run by AUC, or None if there is nothing to compare it with.

    Nothing to compare: fewer than two AUCs, one without standard error, or different test rows.
    """
    found = [
        (index, float(auc), error)
        for index, run in enumerate(runs)
        if is_number(auc := run.metrics.get("auc")) and (error := _error(run)) is not None
    ]
    measured = sum(is_number(run.metrics.get("auc")) for run in runs)
    if len(found) < 2 or len(found) < measured or not same_rows(runs):
        return None
    first, auc, own = max(found, key=lambda one: one[1])
    leads = [
        Lead(first=first, rival=index, lead=auc - other, open=_NORMAL_95 * math.hypot(own, error))
        for index, other, error in found
        if index != first
    ]
    return min(leads, key=lambda lead: lead.lead - lead.open)


def _error(run: Run) -> float | None:
    """Return the larger of a run's standard errors of its AUC, over rows and over users."""
    if run.auc_error is None:
        return None
    interval = entry(run.evaluation, "intervals", "auc")
    low, high = interval if isinstance(interval, list) and len(interval) == 2 else (None, None)
    by_user = (high - low) / (2 * _NORMAL_95) if is_number(low) and is_number(high) else 0.0
    return max(run.auc_error, by_user)


def same_rows(runs: Sequence[Run]) -> bool:
    """Return whether all runs with an AUC were tested on as many rows and positives."""
    tested = [run.metrics for run in runs if is_number(run.metrics.get("auc"))]
    keys = ("rows", "label_mean")
    return len({tuple(written(one.get(key), ".9g") for key in keys) for one in tested}) <= 1


def verdict(runs: Sequence[Run]) -> str:
    """Return which run is best, or why none is called so, as text; empty for a single AUC."""
    if sum(is_number(run.metrics.get("auc")) for run in runs) < 2:
        return ""
    if not same_rows(runs):
        return "No run is called best: they were tested on different rows."
    lead = leader(runs)
    if lead is None:
        return "No run is called best: of some AUC no standard error is known."
    first, rival = runs[lead.first], runs[lead.rival]
    if lead.is_clear:
        said = (
            f"Best by AUC: {first.name}. It leads {rival.name} by {lead.lead:.4f}, more than the "
            f"95 % interval of an unpaired difference leaves open, {lead.open:.4f}"
        )
    else:
        said = (
            f"No run is called best: {first.name} leads {rival.name} by {lead.lead:.4f}, which the "
            f"95 % interval of an unpaired difference leaves open, {lead.open:.4f}"
        )
    return (
        f"{said}. Paired, on the same rows, the interval is narrower, and it decides: "
        f"{_deciding(first, rival)}. Either is of the test rows alone; another seed may change the "
        "order as well."
    )


def early_stopping(run: Run) -> str:
    """Return which checkpoint an early-stopping run was tested with, in a sentence, or nothing."""
    found = run.metrics.get("early_stopping")
    if not isinstance(found, dict) or not is_number(found.get("best_step")):
        return ""
    ended = "ended early" if found.get("stopped_early") is True else "trained all its epochs"
    metric, value = str(found.get("metric"))[:_TEXT_WIDTH], written(found.get("best_value"))
    return (
        f"{run.name} {ended}, at step {written(run.metrics.get('steps'))}; it was tested with its "
        f"best checkpoint, of step {written(found['best_step'])} (validation {metric} {value}), of "
        f"{written(found.get('validations'))} validations."
    )


def _deciding(first: Run, rival: Run) -> str:
    """Return the command that compares two runs on the rows that the first was tested on."""
    path = first.data.get("test_path") or first.data.get("path")
    words = ["python -m trainer.compare"]
    if first.folder and rival.folder and path:
        words.append(shlex.join([str(first.folder), str(rival.folder), "--data", str(path)]))
    return printable(" ".join(words))


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return header, rows, hints and the cells to mark: column -> row of the best run."""
    lead = leader(runs)
    cells = {one: [written(one.get(run), one.form) for run in runs] for one in COLUMNS}
    # The AUC has a column in any case; of the others, those with a value.
    shown = [one for one in COLUMNS if one.name == "AUC" or {*cells[one]} - {DASH}]
    best = {}
    if lead is not None and lead.is_clear:
        marked = [(index, one) for index, one in enumerate(shown, 1) if one.name in _BY_AUC]
        winner = runs[lead.first]
        best = {index: lead.first for index, column in marked if is_number(column.get(winner))}
    return {
        "header": ["Run", *(column.name for column in shown)],
        "hints": {column.name: column.hint for column in shown},
        "rows": [
            [run.name, *(cells[column][number] for column in shown)]
            for number, run in enumerate(runs)
        ],
        "best": best,
    }


def comparison_table(paths: Sequence[Path]) -> str:
    """Return the runs as a plain-text table for a terminal, highest AUC first, and the verdict.

    Behind each AUC stands its standard error (`Run.auc_error`: DeLong's, else Hanley and McNeil's);
    then come the AUC that the true probabilities reach on the same rows, where it is known, and the
    distance to it.
    """
    runs = by_auc(read_runs(paths))
    rows = [["Run", "AUC ± s.e.", "Ceiling", "Distance", "GAUC", "Logloss", "Rows/s"]]
    for run in runs:
        metrics, error = run.metrics, run.auc_error
        auc = written(metrics.get("auc"))
        rows.append(
            [
                run.name,
                auc if error is None or auc == DASH else f"{auc} ± {error:.4f}",
                written(metrics.get("ceiling_auc")),
                written(run.gap),
                *(written(metrics.get(name)) for name in ("gauc", "logloss")),
                written(metrics.get("rows_per_second"), ",.0f"),
            ]
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    table = [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
    notes = [verdict(runs)]
    if any(run.gap is not None for run in runs):
        notes.append(
            "Ceiling: the AUC of the probabilities that the test rows' labels were drawn from."
        )
    wrapped = [
        textwrap.fill(note, _TEXT_WIDTH, break_on_hyphens=False, break_long_words=False)
        for note in notes
        if note
    ]
    return "\n".join([*table, *wrapped])

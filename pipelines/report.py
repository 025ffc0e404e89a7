# SPDX-License-Identifier: MIT
"""Compare runs in one HTML page: python -m pipelines.report RUN [RUN ...] --output report.html.

A RUN is a folder written by trainer.train: config.json, metrics.json, evaluation.json,
curves.jsonl, tables.jsonl and, for towers with diagnostics, ranks.json; or, alone, a night's
(OUTPUT/nights/DATE of the nightly pipeline). What is missing is marked as missing in its
place. The page is one file without scripts or external addresses, so that it can be mailed and
archived.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from pipelines.reporting.comparison import by_auc, early_stopping, summary, verdict
from pipelines.reporting.night_page import candidate_run, is_night, read_night
from pipelines.reporting.provenance import changes, data_drift, differing, neighbours, no_drift
from pipelines.reporting.rank_charts import rank_charts, rank_notes, rank_table
from pipelines.reporting.run_data import CHANGES, Run, is_number, read_runs, written
from pipelines.reporting.svg_charts import Axes, Line, chart
from pipelines.reporting.table_usage import step_use, table_use
from pipelines.reporting.uncertainty import (
    ACTIVITY,
    CALIBRATION,
    INTERVALS,
    activities,
    calibration_tables,
    calibrations,
    intervals,
    phases,
)
from trainer.metrics.spec import METRICS
from trainer.metrics.validity import ADVICE as DOUBTS
from trainer.metrics.validity import all_doubts
from trainer.runtime.atomic_files import write_text
from trainer.runtime.printable import printable
from trainer.runtime.program import Parser, program, quiet_pipe

_PAGE = "report.html"
# A page that a browser can show, whatever a folder holds.
_MAX_ROWS, _MAX_COLUMNS, _MAX_CELL, _MAX_TEXT = 500, 60, 500, 1_000_000
_MAX_EPOCHS = 100
# What comes of values that have the right type and make no sense.
_DAMAGE = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)
_NOT_SHOWN = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Args:
        name: In the template.
        file: What it is made from.
        make: Given the runs, returns what the template shows.
        empty: What it shows where that fails.
    """

    name: str
    file: str
    make: Callable[[Sequence[Run]], Any]
    empty: Any


def report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page that compares `runs`, or that of a night, and return its path.

    Raises:
        ValueError: no runs, a folder that is not one, a night beside others, or an output that is a
            folder.
    """
    if not runs:
        raise ValueError("report: expected at least one run folder, got none")
    output = Path(output)
    if output.is_dir():
        raise ValueError(
            f"{output}: expected the page's file, got a folder; pass --output {output / _PAGE}"
        )
    night = None
    if any(is_night(Path(path)) for path in runs):
        if len(runs) > 1:
            raise ValueError(
                f"report: expected one night or any number of runs, got {len(runs)} folders; a "
                "night has a page of its own"
            )
        night = read_night(Path(runs[0]))
        candidate = candidate_run(Path(runs[0]))
        runs = [candidate] if candidate else []
    found = by_auc(read_runs(runs)) if runs else []
    if night is not None:
        found = [dataclasses.replace(run, name="candidate") for run in found]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, _NOT_SHOWN.sub("\ufffd", _page(found, night)))
    return output


def _page(runs: Sequence[Run], night: dict[str, Any] | None) -> str:
    """Return the page as HTML."""
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    content = {}
    for section in SECTIONS:
        try:
            content[section.name] = _bounded(section.make(runs))
        except _DAMAGE as error:
            content[section.name] = section.empty
            why = f"{type(error).__name__}: {error}"[:_MAX_CELL]
            notes.append(f"{section.file}: cannot be shown as {section.name} ({why})")
    return _template().render(
        title=_title(runs, night),
        subtitle=f"Runs: {', '.join(run.name for run in runs) or 'none'}",
        night=_bounded(night),
        written=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        notes=notes,
        interval_note=INTERVALS,
        calibration_note=CALIBRATION,
        activity_note=ACTIVITY,
        **content,
    )


@functools.cache
def _template() -> Template:
    """Return the page's template; compiling it takes longer than a page without charts."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "reporting" / "templates"),
        autoescape=True,
        trim_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _bounded(value: Any, longest: int = _MAX_TEXT) -> Any:
    """Return tables, lists and texts cut to what a page can hold."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[:longest]} …"
    if isinstance(value, dict):
        if "rows" not in value:
            return {key: _bounded(one, longest) for key, one in value.items()}
        header = [_bounded(str(one), _MAX_CELL) for one in value["header"][:_MAX_COLUMNS]]
        rows = [_bounded(row[:_MAX_COLUMNS], _MAX_CELL) for row in value["rows"][:_MAX_ROWS]]
        if len(value["rows"]) > _MAX_ROWS:
            rows.append([f"… and {len(value['rows']) - _MAX_ROWS:,} more"])
        return {**value, "header": header, "rows": rows}
    if isinstance(value, list | tuple):
        return [_bounded(one, longest) for one in value[:_MAX_ROWS]]
    return value


def _of_each(make: Callable[[Run], Any]) -> Callable[[Sequence[Run]], list[tuple[str, Any]]]:
    """Return (name, what `make` gives) of every run that it gives something for."""
    return lambda runs: [(run.name, found) for run in runs if (found := make(run))]


def _of_first(make: Callable[[Run], Any]) -> Callable[[Sequence[Run]], list[tuple[str, Any]]]:
    return lambda runs: _of_each(make)(runs[:1])


def _joined(make: Callable[[Run], list[Any]]) -> Callable[[Sequence[Run]], list[Any]]:
    return lambda runs: [one for run in runs for one in make(run)]


def _title(runs: Sequence[Run], night: dict[str, Any] | None) -> str:
    if night is not None:
        return f"FullRank night of {night['date']}"
    return "FullRank report" + (f": {runs[0].name}" if len(runs) == 1 else "")


def _reading(runs: Sequence[Run]) -> str:
    """Return how to read the ceiling, and a GAUC of some users or none."""
    parts = []
    if any(run.gap is not None for run in runs):
        parts.append(
            "The ceiling is the AUC of the probabilities that the labels were drawn from: no model "
            "can be expected to pass it."
        )
    parts += [text for run in runs if (text := early_stopping(run))]
    missing: dict[str, list[str]] = {}
    for run in runs:
        if run.no_gauc:
            missing.setdefault(run.no_gauc, []).append(run.name)
    for why, names in missing.items():
        of = "" if len(names) == len(runs) else f" of {', '.join(names)}"
        parts.append(f"GAUC{of} is missing: {why}.")
    for run in runs:
        share = run.metrics.get("gauc_users_sampled")
        if is_number(share) and share < 1:
            parts.append(f"GAUC of {run.name} is over a sample of {share:.3%} of the users.")
    return " ".join(parts)


def _plain(header: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"header": header, "rows": rows, "hints": {}, "best": {}}


def _labels(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return a table of every label's metrics, if a run has more than one label."""
    shown = {name: one.title for name, one in METRICS.items()}
    shown |= {"auc_standard_error": "AUC's s.e.", "label_mean": "Label mean"}
    rows = []
    for run in runs:
        ending = "_auc_standard_error"
        labels = [key.removesuffix(ending) for key in run.metrics if key.endswith(ending)]
        rows += [
            [f"{run.name}: {label}", *(written(run.metrics.get(f"{label}_{key}")) for key in shown)]
            for label in labels
        ]
    return _plain(["Run and label", *shown.values()], rows) if rows else None


def _epochs(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return a table of the test AUC after each epoch, if a run was evaluated after each."""
    found = [
        {
            int(match[1]): value
            for key, value in run.metrics.items()
            if (match := re.fullmatch(r"auc_epoch_([0-9]{1,6})", key))
        }
        for run in runs
    ]
    epochs = sorted({epoch for one in found for epoch in one})[:_MAX_EPOCHS]
    if not epochs:
        return None
    rows = [
        [run.name, *(written(one.get(epoch)) for epoch in epochs)]
        for run, one in zip(runs, found, strict=True)
    ]
    return _plain(["Test AUC after epoch", *(str(epoch) for epoch in epochs)], rows)


def _alerts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return (run, text) of every alert, doubt, and of predictions that were not finite."""
    found: list[tuple[str, str]] = []
    for run in runs:
        steps: dict[str, list[int]] = {}
        for point in run.curve:
            for name in _texts(point.get("alerts")):
                step = point.get("step")
                steps.setdefault(name, []).append(int(step) if is_number(step) else 0)
        for name in _texts(run.metrics.get("alerts")):
            steps.setdefault(name, [])
        for name, where in steps.items():
            text = f" at {len(where)} points, steps {where[0]:,} to {where[-1]:,}" if where else ""
            if name not in DOUBTS:
                found.append((run.name, f"{name.replace('_', ' ')}{text}"))
        # Judged here, too: what an older version or another program has written is as doubtful.
        doubtful = all_doubts(run.metrics, run.evaluation)
        for name, text in doubtful.items():
            found.append((run.name, f"{name.replace('_', ' ')}: {text}. {DOUBTS[name]}"))
        broken = run.metrics.get("nonfinite_predictions")
        if is_number(broken) and broken:
            found.append((run.name, f"{broken:,.0f} predictions of the evaluation were not finite"))
    return found


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _points(
    records: Sequence[dict[str, Any]], y: str, x: str = "rows"
) -> list[tuple[float, float]]:
    """Return (x, y) of the records that have both."""
    return [(one[x], one[y]) for one in records if is_number(one.get(x)) and is_number(one.get(y))]


def _curves(runs: Sequence[Run]) -> list[tuple[str, Markup]]:
    """Return (title, SVG) of the training curves and of the evaluations in between."""
    found = []
    for key, title, y in (
        ("loss", "Training loss", "loss"),
        ("auc", "Running AUC", "AUC"),
        ("rows_per_second", "Throughput", "rows/s"),
        ("input_wait", "Input wait", "share of time"),
    ):
        lines = [
            Line(label=run.name, series=index, points=_points(run.curve, key))
            for index, run in enumerate(runs)
        ]
        limits = (0.0, 1.0) if key == "input_wait" else None
        axes = Axes(title=title, x="rows trained", y=y, y_limits=limits)
        found.append((title, chart(f"curve-{key.replace('_', '-')}", axes, lines)))
    for split in ("test", "validation"):
        lines = [
            Line(label=run.name, series=index, points=_points(points, "auc", "step"))
            for index, run in enumerate(runs)
            if len(points := [e for e in run.evaluations if e.get("split", "test") == split]) > 1
        ]
        title = f"{split.capitalize()} AUC"
        axes = Axes(title=title, x="step", y="AUC")
        found.append((title, chart(f"curve-{split}-auc", axes, lines)))
    return [(title, Markup(svg)) for title, svg in found if svg]


def _configuration(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return each run's configuration as text, empty where it is not known."""
    return [(run.name, json.dumps(run.config, indent=2) if run.config else "") for run in runs]


_METRICS, _CURVE, _EVALUATION = "metrics.json", "curves.jsonl", "evaluation.json"
_RANKS, _TABLES, _CONFIG = "ranks.json", "tables.jsonl", "config.json"
SECTIONS = tuple(
    Section(name=name, file=file, make=make, empty=empty)
    for name, file, make, empty in (
        ("reading", _METRICS, _reading, ""),
        ("verdict", _METRICS, verdict, ""),
        ("summary", _METRICS, summary, _plain([], [])),
        ("labels", _METRICS, _labels, None),
        ("epochs", _METRICS, _epochs, None),
        ("alerts", _CURVE, _alerts, ()),
        ("intervals", _EVALUATION, intervals, None),
        ("neighbours", _METRICS, _of_first(neighbours), ()),
        ("calibrations", _EVALUATION, calibrations, ()),
        ("calibration_tables", _EVALUATION, _joined(calibration_tables), ()),
        ("activities", _EVALUATION, _joined(activities), ()),
        ("drifts", "the statistics of the test day", _of_first(data_drift), ()),
        ("no_drift", _CONFIG, no_drift, ""),
        ("curves", _CURVE, _curves, ()),
        ("phases", _EVALUATION, phases, None),
        ("ranks", _RANKS, rank_charts, ()),
        ("rank_notes", _RANKS, rank_notes, ()),
        ("rank_tables", _RANKS, _of_each(lambda run: rank_table(run) if run.ranks else None), ()),
        ("step_use", _METRICS, step_use, None),
        ("table_uses", _TABLES, _of_each(table_use), ()),
        ("differing", _CONFIG, differing, None),
        ("changes", CHANGES, _of_each(changes), ()),
        ("configs", _CONFIG, _configuration, ()),
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(prog=program("pipelines.report"), description="Compare runs in one HTML page.")
    add, page = parser.add_argument, Path(_PAGE)
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a night's")
    add("--output", type=Path, metavar="FILE", default=page, help=f"the page (default: {page})")
    options = parser.parse_args(arguments)
    try:
        print(printable(str(report(options.runs, options.output))))
    except (ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

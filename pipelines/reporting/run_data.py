# SPDX-License-Identifier: MIT
"""What the folders of finished or unfinished runs hold, and how their numbers are written.

Anybody may have written these folders. Files are read as data alone: nothing that they name is
imported, opened or called. They are read up to a size and a depth; numbers that are not finite or
absurdly large count as absent. A file that is missing or damaged is a note on the page; a path that
holds no run is an error of the caller.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from trainer.metrics.spec import METRICS
from trainer.runtime.atomic_files import parse_json, read_bytes
from trainer.runtime.credentials import without_credentials_in
from trainer.runtime.printable import printable

DASH = "–"
# Any of these makes a folder a run's.
_FILES = ("config.json", "metrics.json", "curves.jsonl")
_NAMES_SHOWN = 5
CHANGES = "recipe_changes.json"
# As Python objects, JSON takes up to twenty times its bytes.
_MAX_BYTES = {"ranks.json": 16 << 20}
_MAX_BYTES_OF_OTHERS = 4 << 20
_MAX_BYTES_OF_LINES = 64 << 20
_PARSED_BYTES_OF_LINES = 8 << 20
_MAX_LINES = 100_000
_MAX_DEPTH = 32
_LARGEST = 1e30
_MAX_NAME = 120


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's folder holds.

    Args:
        name: Of the run on the page, in one line.
        config: config.json.
        metrics: metrics.json.
        curve: Records of curves.jsonl.
        evaluations: Records of evaluations.jsonl.
        ranks: Records of ranks.json.
        tables: Records of tables.jsonl.
        evaluation: evaluation.json.
        changes: recipe_changes.json.
        folder: Where it was read.
        notes: What is missing or damaged.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def tower(self) -> str:
        """Name of the tower, or a dash."""
        kind = entry(self.config, "model", "tower", "type")
        return (kind.removesuffix("Config") if isinstance(kind, str) else "") or DASH

    @property
    def data(self) -> dict[str, Any]:
        """The settings of the data; empty if they are not known."""
        found = entry(self.config, "data")
        return found if isinstance(found, dict) else {}

    @property
    def gap(self) -> float | None:
        """AUC that is still missing to the known ceiling, or None."""
        ceiling, auc = self.metrics.get("ceiling_auc"), self.metrics.get("auc")
        return ceiling - auc if is_number(ceiling) and is_number(auc) else None

    @property
    def auc_error(self) -> float | None:
        """Standard error of the AUC, or None.

        DeLong's estimate as the evaluation measured it (`trainer/metrics/auc.py`); of metrics
        without it, that of Hanley and McNeil (1982) from the counts of positives P and negatives N,
        var A = (A (1 - A) + (P - 1) (A / (2 - A) - A²) + (N - 1) (2 A² / (1 + A) - A²)) / (P N).
        """
        names = ("auc_standard_error", "auc", "rows", "label_mean")
        measured, auc, rows, rate = (self.metrics.get(name) for name in names)
        if is_number(measured) and measured >= 0:
            return float(measured)
        if not (is_number(auc) and is_number(rows) and is_number(rate)):
            return None
        if not (0 <= auc <= 1 and rows > 0 and 0 < rate < 1):
            return None
        positives, negatives = rows * rate, rows * (1 - rate)
        variance = auc * (1 - auc)
        variance += max(positives - 1, 0.0) * (auc / (2 - auc) - auc**2)
        variance += max(negatives - 1, 0.0) * (2 * auc**2 / (1 + auc) - auc**2)
        return math.sqrt(max(variance, 0.0) / (positives * negatives))

    @property
    def no_gauc(self) -> str:
        """Why there is no GAUC, as a phrase; nothing if there is one, or no evaluation."""
        if not self.metrics or is_number(self.metrics.get("gauc")):
            return ""
        schema = self.config.get("schema")
        if isinstance(schema, dict) and not schema.get("user"):
            return "this log has no user column (its schema names no user)"
        return "no user of the test rows has both positives and negatives"


@dataclass(frozen=True)
class Column:
    """A column of the summary: how to get its value and how to write it."""

    name: str
    hint: str
    get: Callable[[Run], Any]
    form: str = ".4f"


def _metric(key: str) -> Callable[[Run], Any]:
    return lambda run: run.metrics.get(key)


def _quality() -> tuple[Column, ...]:
    """Return a column for each metric; behind the AUC its error and its distance to the ceiling."""
    columns = [
        Column(one.title, one.meaning, _metric(name), one.form) for name, one in METRICS.items()
    ]
    columns[1:1] = [
        Column("± s.e.", "Standard error of the AUC", lambda run: run.auc_error),
        Column("Ceiling", "AUC of the labels' true probabilities", _metric("ceiling_auc")),
        Column("To ceiling", "AUC missing to the known ceiling", lambda run: run.gap),
    ]
    return tuple(columns)


COLUMNS = (
    *_quality(),
    Column("Tower", "Model tower", lambda run: run.tower),
    Column("Rows/s", "Trained, all ranks", _metric("rows_per_second"), form=",.0f"),
    Column("Input wait", "Share of the training time", _metric("input_wait"), form=".1%"),
    Column("Ranks", "Processes that trained", _metric("world_size"), form=",.0f"),
    Column("Test rows", "Examples evaluated", _metric("rows"), form=",.0f"),
)


def read_run(path: Path, name: str, brief: bool = False) -> Run:
    """Read a run's folder.

    Args:
        path: The folder.
        name: Of the run on the page.
        brief: Whether its configuration and its metrics are enough.

    Raises:
        ValueError: `path` is not a folder, or holds none of a run's files.
    """
    _check_is_run(path)
    notes: list[str] = []
    run = Run(
        name=printable(name)[-_MAX_NAME:],
        config=_read(path / "config.json", dict, notes, True),
        metrics=_read(path / "metrics.json", dict, notes, True),
        folder=path,
    )
    if not brief:
        run = dataclasses.replace(
            run,
            curve=_read(path / "curves.jsonl", list, notes, True),
            evaluations=_read(path / "evaluations.jsonl", list, notes, False),
            ranks=_read(path / "ranks.json", list, notes, False),
            tables=_read(path / "tables.jsonl", list, notes, False),
            evaluation=_read(path / "evaluation.json", dict, notes, False),
            changes=_read(path / CHANGES, dict, notes, False),
        )
    return dataclasses.replace(run, notes=tuple(notes))


def _check_is_run(path: Path) -> None:
    """Raise a ValueError that names what is there instead of a run, and runs nearby."""
    if _is_run(path):
        return
    expected = f"expected the folder of a run, with {', '.join(_FILES[:-1])} or {_FILES[-1]}"
    if path.is_dir():
        names = sorted(one.name + "/" * one.is_dir() for one in path.iterdir())
        there = f"a folder with {_listed(names)}" if names else "an empty folder"
        near = path
    else:
        there = "a file" if path.exists() else "nothing of that name"
        near = path.parent
    runs = sorted(str(one) for one in near.iterdir() if _is_run(one)) if near.is_dir() else []
    nights = sorted(path.glob("nights/????-??-??"))
    way_out = "pass what trainer.train was given as --output"
    if nights:
        way_out = f"each night has a page of its own, the last {nights[-1]}"
    elif runs:
        way_out = f"runs are in {_listed(runs)}"
    raise ValueError(printable(f"{path}: {expected}, got {there}; {way_out}"))


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read(path: Path, kind: type, notes: list[str], needed: bool) -> Any:
    """Return what a JSON or JSON lines file holds, or an empty `kind` and a note of why."""
    try:
        value = _read_lines(path, notes) if path.suffix == ".jsonl" else read_data(path)
    except FileNotFoundError:
        if needed:
            notes.append(f"{path.name} is missing")
        return kind()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        notes.append(printable(f"{path.name} cannot be read ({reason})"))
        return kind()
    if not isinstance(value, kind):
        notes.append(f"{path.name}: expected a {kind.__name__}, got a {type(value).__name__}")
        return kind()
    return [one for one in value if isinstance(one, dict)] if kind is list else value


def read_data(path: Path) -> Any:
    """Return the value in a JSON file, as `tamed`.

    Raises:
        OSError: it cannot be read, or is no plain file.
        ValueError: it is no JSON, too large or too deep.
    """
    content = read_bytes(path, _MAX_BYTES.get(path.name, _MAX_BYTES_OF_OTHERS))
    # A run masks passwords in addresses itself; one of an older version did not.
    return without_credentials_in(tamed(parse_json(content)))


def _read_lines(path: Path, notes: list[str]) -> list[Any]:
    """Return the values of JSON lines; of a file of many, evenly chosen ones."""
    content = read_bytes(path, _MAX_BYTES_OF_LINES)
    # A line without its end is one that a crash cut short.
    content = content[: content.rfind(b"\n") + 1]
    lines = content.count(b"\n")
    step = max(-(-len(content) // _PARSED_BYTES_OF_LINES), -(-lines // _MAX_LINES), 1)
    found, damaged, why = [], 0, ""
    for number, line in enumerate(io.BytesIO(content)):
        if number % step and number != lines - 1:
            continue
        try:
            found.append(tamed(parse_json(line)))
        except ValueError as error:
            damaged, why = damaged + 1, str(error)
    if damaged:
        notes.append(printable(f"{path.name} cannot be read in {damaged:,} lines ({why})"))
    if step > 1:
        notes.append(f"{path.name} is long: one of {step} lines is shown")
    return found


def tamed(value: Any, depth: int = 0) -> Any:
    """Return JSON data whose numbers can be calculated with; others are None.

    Raises:
        ValueError: it is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {key: tamed(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [tamed(one, depth + 1) for one in value]
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        return None
    return value


def entry(values: Any, *keys: str) -> Any:
    """Return what nested mappings hold under `keys`, or None where one of them is no mapping."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def records(values: Any) -> list[dict[str, Any]]:
    """Return the mappings of a list, none if it is no list."""
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs; folders of the same name are told apart by their whole path."""
    paths = [Path(path) for path in paths]
    names = [path.resolve().name for path in paths]
    return [
        read_run(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def written(value: Any, form: str = ".4f") -> str:
    """Return a number in `form`, text as it is, lists by element, and a dash for nothing."""
    if isinstance(value, list | tuple):
        return ", ".join(written(item, form) for item in value)
    if is_number(value):
        return format(value, "," if isinstance(value, int) and "%" not in form else form)
    absent = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return DASH if absent else str(value)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a finite number that is not absurdly large."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and -_LARGEST <= value <= _LARGEST

# SPDX-License-Identifier: MIT
"""Replay nights: python -m pipelines.replay [--data LOGS] [--output DIR] [--days N].

Runs the nightly pipeline for one date after the other, as a scheduler would, on raw days that are
there already or on generated ones: ingest, warm start, gates, publication. Then one model is
trained from nothing on all days but the last, and a table shows the nights beside it: what
`make nightly` runs. A replay that was cut short, however, resumes where it stopped and ends with
the same table.

Exit codes: those of `python -m pipelines.run`, of the first night that did not end with 0 or 3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines import run
from pipelines.ingestion.readiness import Readiness
from pipelines.nightly.model_store import Store
from pipelines.nightly.night_metrics import FILE
from pipelines.orchestration import stage
from pipelines.orchestration.text_tables import table
from pipelines.synthesize import SynthesisConfig, synthesize
from trainer.runtime.printable import printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe

_STAGES = ("partitions", "days", "candidate", "evaluation", "verdict", "publication")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        data = options.data or generated(options)
        mark = "manifest" if Readiness().days(str(data)) else "files"
        days = Readiness(mark=mark).days(str(data))[-options.days or None :]
        if len(days) <= options.first_days:
            raise ValueError(
                f"{data}: expected more than --first-days {options.first_days} days, got "
                f"{len(days)}"
            )
    except (ValueError, RuntimeError, OSError) as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return run.WRONG
    recipe = options.recipe or ("dlrm.globo" if options.data else "dlrm.demo")
    words = ["--recipe", recipe, "--raw", str(data), "--ready", mark, "-j", options.topology]
    words += ["--skip-days", *_before(mark, data, days[0])] if _before(mark, data, days[0]) else []
    nights, last = days[options.first_days :], days[-1]
    first = ["--first-days", str(options.first_days), "--output", str(options.output)]
    for date in nights:
        print(f"\n=== {date}", flush=True)
        code = run.main(["nightly", "--date", date, *words, *first, *options.words])
        if code not in (run.DONE, run.REFUSED):
            return code
    if not options.no_scratch:
        print(f"\n=== {last}, from scratch", flush=True)
        output = options.output / "scratch"
        more = ["--first-days", "0", "--output", str(output), *options.words]
        code = run.main(["nightly", "--date", last, *words, *more])
        if code not in (run.DONE, run.REFUSED):
            return code
    print(f"\n{describe(options.output, nights, last)}\nmetrics in {options.output / FILE}")
    return run.DONE


def describe(output: Path, nights: Sequence[str], last: str) -> str:
    """Return a line a night: rows, AUC of candidate and serving model, decision, seconds."""
    head = ("night", "days", "rows", "auc", "serving auc", "decision", "seconds")
    lines = [_line(date, output / "nights" / date) for date in nights]
    scratch = output / "scratch" / "nights" / last
    if (scratch / "evaluation").is_dir():
        lines.append(_line(f"{last} from scratch", scratch))
    serving = Store(output).serving() or "no model"
    return f"{table(head, lines)}\n{serving} serves"


def _line(name: str, folder: Path) -> tuple[str, ...]:
    found: dict[str, Any] = {}
    for one in _STAGES:
        if (folder / one / stage.MANIFEST).is_file():
            found[one] = stage.read(folder / one)
    seconds = f"{sum(float(one['seconds']) for one in found.values()):.1f}"
    if "evaluation" not in found:
        return (name, "-", "-", "-", "-", "day refused", seconds)
    days = found["days"]["metrics"]
    aucs = [one.get("auc") for one in found["evaluation"]["metrics"]["models"]]
    shown = [f"{auc:.4f}" if auc is not None else "-" for auc in aucs] + ["-"]
    decision = "promoted" if found["verdict"]["metrics"]["promote"] else "refused"
    rows = f"{days['trained_rows']:,}"
    return (name, str(len(days["new"])), rows, shown[0], shown[1], decision, seconds)


def _before(mark: str, data: Path, first: str) -> list[str]:
    """Return the days that a replay of the last days does not look at."""
    return [day for day in Readiness(mark=mark).days(str(data)) if day < first]


def generated(options: argparse.Namespace) -> Path:
    """Return a generated log of so many days, written once."""
    logs, count = options.output / "logs", options.days or 16
    if not logs.is_dir() or len(Readiness().days(str(logs))) < count:
        print(f"generating {count} days in {logs}", flush=True)
        config = SynthesisConfig(days=count, rows_per_day=options.rows_per_day, overwrite=True)
        synthesize(logs, config)
    return logs


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.replay"), description="Run nights, one after the other."
    )
    add = parser.add_argument
    default = Path("runs/nightly")
    add("--output", type=Path, default=default, metavar="DIR", help=f"(default: {default})")
    add("--data", type=Path, metavar="LOGS", help="a log in days (default: it is generated)")
    recipe = "what to train (default: dlrm.demo, with --data dlrm.globo)"
    add("--recipe", default="", help=recipe)
    days = "the last days of the log; 0: all, or 16 generated ones (default: 0)"
    add("--days", type=int, default=0, metavar="N", help=days)
    add("--first-days", type=int, default=2, metavar="N", help="of the first night (default: 2)")
    rows = "of each generated day (default: 20000)"
    add("--rows-per-day", type=int, default=20_000, metavar="N", help=rows)
    ranks = "NODESxPROCESSES of a training (default: 1x2)"
    add("-j", dest="topology", default="1x2", metavar="NxM", help=ranks)
    add("--no-scratch", action="store_true", help="no model from nothing beside the nights")
    add("words", nargs="*", metavar="-- WORDS", help="more words for every night")
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

# SPDX-License-Identifier: MIT
"""Run a pipeline by date: python -m pipelines.run PIPELINE [--date D] [--from STAGE] [--dry-run].

It prints the plan first (what is done, what will be made and why), the stages' progress while they
run, and a summary last. Running it again skips what is done, resumes what was begun and makes again
what has changed. `python -m pipelines.run PIPELINE --help` lists a pipeline's own options. Settings
of the recipe come last, behind `--`; a log of your own needs `-- --data.schema FILE`.

Exit codes: 0 everything is made; 1 a stage failed; 2 the options, the configuration or the data are
wrong; 3 a gate refused the candidate, or the drift check a day; 4 the day is not ready, or nothing
is new; 5 another run of the same date is going on.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pipelines.epochs import epochs
from pipelines.nightly import nightly
from pipelines.orchestration import stage
from pipelines.orchestration.help_screens import add_help
from pipelines.orchestration.lock import EXPIRY_SECONDS, Lock, LockedError
from pipelines.orchestration.run_status import (
    DONE,
    FAILED,
    LOCKED,
    NOT_READY,
    REFUSED,
    WRONG,
    RunStatus,
)
from pipelines.orchestration.stage import NotReadyError, Pipeline, RefusedError, StageError, Step
from pipelines.orchestration.text_tables import table
from trainer.runtime.printable import printable, printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe


class Module(Protocol):
    """Interface of a module of PIPELINES.

    Optional members:
        each(options): returns the options of several runs in a row.
        during(options, status): is called when a stage enters another state.
        after(options, status): is called when a run has ended, or none can begin.
        USAGE: the arguments after the pipeline's name, for --help.
        BRIEFLY: groups of options that --help only names.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...  # noqa: D102
    def build(self, options: argparse.Namespace) -> Pipeline: ...  # noqa: D102


PIPELINES: dict[str, Module] = {"epochs": epochs, "nightly": nightly}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended: `skipped` (it was done), `made`, `failed` or `not run`."""

    name: str
    state: str
    seconds: float = 0.0
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    module = PIPELINES[options.pipeline]
    try:
        each = getattr(module, "each", None)
        several = each(options) if each else [options]
    except Exception as error:
        status = RunStatus(code=_explain(error), reason=str(error))
        _end(module, options, status)
        return status.code
    code = DONE
    for one in several:
        if len(several) > 1:
            print(f"\n=== {one.date}", flush=True)
        code = _run_one(module, one)
        if code not in (DONE, REFUSED):
            break
    return code


def _run_one(module: Module, options: argparse.Namespace) -> int:
    """Run one pipeline, call its module with the outcome, and return the exit code."""
    started, during = time.monotonic(), getattr(module, "during", None)
    status = RunStatus(tell=partial(during, options)) if during else RunStatus()
    try:
        pipeline = module.build(options)
        if options.dry_run:
            print(plan_table(stage.plan(pipeline.stages, pipeline.folder, options.first)))
            return DONE
        with Lock(pipeline.folder, options.lock_seconds) as lock:
            status.code = run(pipeline, lock, status, options.first)
    except Exception as error:
        status.code, status.reason = _explain(error), str(error)
    status.seconds = time.monotonic() - started
    _end(module, options, status)
    return status.code


def _end(module: Module, options: argparse.Namespace, status: RunStatus) -> None:
    """Tell a pipeline's module how a run has ended."""
    after = getattr(module, "after", None)
    if after and not options.dry_run:
        after(options, status)


def run(pipeline: Pipeline, lock: Lock, status: RunStatus, first: str = "") -> int:
    """Make what is not done, and all from stage `first` on if given; return the exit code.

    Args:
        status: is updated when a stage enters another state.

    Raises:
        ValueError: no stage is called `first`.
    """
    stages, folder = pipeline.stages, pipeline.folder
    stage.recover(folder, [one.name for one in stages])
    steps = stage.plan(stages, folder, first)
    print(plan_table(steps), flush=True)
    status.plan([one.name for one in stages])
    outcomes: list[Outcome] = []
    code = DONE
    for number, step in enumerate(steps, 1):
        name, started = step.stage.name, time.monotonic()
        if step.will != "done":
            print(f"\n[{number}/{len(steps)}] {name}", flush=True)
            status.enter(name, "running")
        try:
            made, manifest = stage.make(step.stage, folder, lock, _say, anew=name == first)
        except Exception as error:
            code, status.reason = _explain(error, name), f"{name}: {error}"
            status.enter(name, "failed")
            seconds, note = time.monotonic() - started, " ".join(str(error).split())
            outcomes.append(Outcome(name=name, state="failed", seconds=seconds, note=note))
            break
        found = status.metrics[name] = manifest["metrics"]
        status.enter(name, "done" if made else "skipped")
        note = str(found.get("skipped") or found.get("summary") or "")
        state, seconds = ("made", time.monotonic() - started) if made else ("skipped", 0.0)
        outcomes.append(Outcome(name=name, state=state, seconds=seconds, note=note))
    left = [Outcome(name=one.name, state="not run") for one in stages[len(outcomes) :]]
    print(f"\n{summary_table([*outcomes, *left])}", flush=True)
    return pipeline.conclude(status.metrics) if code == DONE else code


def plan_table(steps: Sequence[Step]) -> str:
    """Return what will be done with each stage, a line each."""
    rows = [(step.stage.name, step.will, step.why) for step in steps]
    return table(("stage", "plan", "why"), rows)


def summary_table(outcomes: Sequence[Outcome]) -> str:
    """Return what was done with each stage, a line each."""
    rows = [(one.name, one.state, f"{one.seconds:.1f} s", one.note) for one in outcomes]
    return table(("stage", "result", "time", ""), rows)


def _say(line: str) -> None:
    # A line of a launched command, indented, so that it cannot pass for one of the pipeline's.
    print(f"  {printable(line.expandtabs())}", flush=True)


def _explain(error: Exception, where: str = "") -> int:
    """Print an error, with its trace if it does not explain itself; return the exit code."""
    codes: list[tuple[type[Exception], int]] = [
        (LockedError, LOCKED),
        (NotReadyError, NOT_READY),
        (RefusedError, REFUSED),
        (ValueError, WRONG),
        (StageError, FAILED),
        (OSError, FAILED),
    ]
    place = f"{where}: " if where else ""
    for kind, code in codes:
        if isinstance(error, kind):
            print(printable_lines(f"error: {place}{error}"), file=sys.stderr, flush=True)
            return code
    trace = "".join(traceback.format_exception(error))
    print(printable_lines(f"error: {place}{trace}"), file=sys.stderr, flush=True)
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.run"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="pipeline", required=True, metavar="PIPELINE")
    for name, module in PIPELINES.items():
        summary = (getattr(module, "__doc__", None) or "").partition("\n")[0]
        usage = getattr(module, "USAGE", "")
        sub = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            prog=program("pipelines.run", name),
            usage=f"{program('pipelines.run', name)} {usage}" if usage else None,
            add_help=False,
        )
        add_help(sub, getattr(module, "BRIEFLY", ()))
        add = sub.add_argument
        add("--from", dest="first", default="", metavar="STAGE", help="make this stage anew, too")
        add("--dry-run", action="store_true", help="print the plan and do nothing")
        seconds = f"after which a dead run's lock is void (default: {EXPIRY_SECONDS:.0f})"
        add("--lock-seconds", type=float, default=EXPIRY_SECONDS, metavar="S", help=seconds)
        module.add_options(sub)
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

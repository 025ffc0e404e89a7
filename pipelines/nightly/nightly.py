# SPDX-License-Identifier: MIT
"""A night: train yesterday's model on the days since, compare it with the one that serves, decide.

The stages are in `pipelines/nightly/stages.py`. The base is the newest published model before date
D that was not withdrawn, so that a date can be run again, or run late (back-fill), and does the
same. A late date does not take the place of a newer model that serves.

  python -m pipelines.run nightly --date 2026-01-08 --recipe dlrm.demo --data LOGS --output DIR
  python -m pipelines.run nightly --date new --recipe dlrm.demo --raw RAW --output DIR

--date FIRST:LAST fills a range of nights, `new` catches up with every ready day since the last one:
the exit code is that of the first night that ends with neither 0 nor 3, else of the last. With
--raw the days are raw ones (CSV, TSV, Parquet; a folder or a URL), checked and typed into DIR/data
first. Every night leaves DIR/night.prom (`pipelines/nightly/night_metrics.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import re
import shlex
import sys
from pathlib import Path

from embeddings.schema.schema import Schema
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.intake import Intake
from pipelines.ingestion.options import add_file_options, add_row_options, config_of
from pipelines.ingestion.readiness import MARKS, Readiness
from pipelines.nightly import mlflow_tracking, night_metrics
from pipelines.nightly.discovery import Choice, Known, days_of_refused, known_to
from pipelines.nightly.drift import DriftConfig
from pipelines.nightly.gates import GateConfig
from pipelines.nightly.model_store import Store
from pipelines.nightly.stages import NightConfig
from pipelines.orchestration import launch
from pipelines.orchestration.run_status import LOCKED, NOT_READY, RunStatus
from pipelines.orchestration.stage import NotReadyError, Pipeline
from pipelines.orchestration.threshold_options import add_thresholds, read_thresholds
from trainer.data.splits import parse_days

USAGE = """--date D --recipe NAME (--data PATH | --raw PATH) --output DIR [OPTION ...]
                                       [-- --data.schema FILE --section.field VALUE ...]"""
BRIEFLY = ("drift", "gate", "processes", "mlflow")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline's options."""
    add = parser.add_argument
    dates = (
        "day to evaluate on, which earlier days train for; FIRST:LAST: one night a day; new: of "
    )
    add("--date", required=True, metavar="D", help=f"{dates}every day after the last night")
    add("--recipe", required=True, help="what to train")
    add("--data", default="", metavar="PATH", help="typed days dt=YYYY-MM-DD (default: of --raw)")
    add("--output", type=Path, required=True, metavar="DIR", help="of nights and models")
    replicates = "of the bootstrap (default: 200)"
    add("--replicates", type=int, default=200, metavar="N", help=replicates)
    add = parser.add_argument_group("days").add_argument
    add("--raw", default="", metavar="PATH", help="raw days, or their URL (default: none)")
    words = "options of pipelines.ingest for raw days, as one word (default: none)"
    add("--ingest", default="", metavar="WORDS", help=words)
    back = "raw days before, which are looked at again for late files (default: 2)"
    add("--look-back", type=int, default=2, metavar="N", help=back)
    ready = f"of ready days: {', '.join(MARKS)} (default: manifest, with --raw success)"
    add("--ready", default="", choices=MARKS, metavar="MARK", help=ready)
    add("--ready-rows", type=int, default=0, metavar="N", help="of --ready rows")
    first = "days of the first night, which has no model to start from (default: all)"
    add("--first-days", type=int, default=0, metavar="N", help=first)
    add("--allow-gaps", action="store_true", help="train although a day in between is missing")
    skip = "days not to train on (default: none)"
    add("--skip-days", nargs="+", default=[], metavar="DAY", help=skip)
    accept = "days that the drift check refuses and that are right (default: none)"
    add("--accept-days", nargs="+", default=[], metavar="DAY", help=accept)
    dropped = "do not train on the days of refused candidates again (default: do)"
    add("--drop-refused", action="store_true", help=dropped)
    add_thresholds(parser, "drift", DriftConfig)
    add_thresholds(parser, "gate", GateConfig)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="-- --section.field VALUE",
        help="settings of the recipe; of a log of your own: -- --data.schema FILE",
    )
    launch.add_options(parser, retries=1)
    mlflow_tracking.add_options(parser)


def each(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the options of every night that --date means, in order.

    Raises:
        ValueError: --date is none of its forms, or an option is wrong.
        NotReadyError: there is no night to run.
    """
    _check(options)
    if options.date != "new" and ":" not in options.date:
        return [options]
    mark, _, ready, _ = _look(options)
    wanted = f"in {options.date}"
    if options.date == "new":
        done = finished(options.output)
        wanted = f"after the last night, {done[-1]}," if done else "beyond those of the first night"
        dates = (
            [day for day in ready if day > done[-1]] if done else ready[options.first_days or 1 :]
        )
    else:
        first, last = parse_days(options.date, "--date") or ("", "")
        dates = [day for day in ready if first <= day <= last]
    if not dates:
        last = f"the last that is: {ready[-1]}" if ready else "nor any other"
        raise NotReadyError(
            f"--date {options.date}: no day {wanted} is ready ({last}); {mark.describe()}"
        )
    return [argparse.Namespace(**{**vars(options), "date": date}) for date in dates]


def _check(options: argparse.Namespace) -> None:
    """Raise a ValueError for a day that is none, or a number out of its range."""
    days = [("--skip-days", day) for day in options.skip_days]
    days += [("--accept-days", day) for day in options.accept_days]
    if options.date != "new" and ":" not in options.date:
        days.append(("--date", options.date))
    for name, day in days:
        if not _is_day(day):
            also = ", FIRST:LAST or new" if name == "--date" else ""
            raise ValueError(f"{name}: expected a day YYYY-MM-DD{also}, got {day!r}")
    for name in ("data", "output"):
        value = str(getattr(options, name))
        if _is_url(value):
            raise ValueError(
                f"--{name}: expected a folder, since nights link to files in it, got the URL "
                f"{value!r}; raw days may have one (--raw)"
            )
    for name, least in (("first_days", 0), ("look_back", 0), ("replicates", 1)):
        if getattr(options, name) < least:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option}: expected a number >= {least}, got {getattr(options, name)}"
            )


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _is_url(text: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+]+:/", text))  # a Path has lost one of the two strokes


def finished(output: Path) -> list[str]:
    """Return the dates whose nights came to a verdict, in order."""
    return sorted(path.parent.name for path in (output / "nights").glob("*/publication"))


def build(options: argparse.Namespace) -> Pipeline:
    """Return the night's pipeline.

    Raises:
        ValueError: an option, the recipe or a setting is wrong.
        NotReadyError: the date, or a day before it, is not ready; or no day is new.
    """
    from trainer.config.command_line import apply_overrides
    from trainer.recipes.load import load_recipe

    config = apply_overrides(load_recipe(options.recipe), options.overrides)
    output = options.output.resolve()
    store = Store(output)
    known = known_to(store, options.date)
    mark, raw, ready, data = _look(options)
    skip = {*options.skip_days, *(days_of_refused(store, known) if options.drop_refused else ())}
    choice = Choice(
        date=options.date,
        first_days=options.first_days,
        skip=skip,
        allow_gaps=options.allow_gaps,
    )
    new = choice.new_days(ready, known, mark)
    night = NightConfig(
        store=store,
        date=options.date,
        new=new,
        known=known,
        intake=_intake(options, config.schema, data) if options.raw else None,
        raw_days=_raw_days(raw, new, known, options),
        recipe=options.recipe,
        schema=config.schema,
        data=str(data),
        overrides=tuple(options.overrides),
        has_warmup=config.has_warmup,
        replicates=options.replicates,
        accept=tuple(options.accept_days),
        drift=read_thresholds("drift", DriftConfig, options),
        gate=read_thresholds("gate", GateConfig, options),
        launch=launch.from_options(options, config.outside_tower),
        mlflow=mlflow_tracking.from_options(options),
    )
    folder = output / "nights" / options.date
    return Pipeline(stages=night.stages(), folder=folder, conclude=night.conclude)


def _look(options: argparse.Namespace) -> tuple[Readiness, list[str], list[str], Path]:
    """Return what makes days ready, the raw ones that are, all that are, and where typed ones are.

    Raises:
        ValueError: options contradict each other, or a log is not there.
    """
    if bool(options.raw) == bool(options.data):
        raise ValueError("expected one of --data (typed days) and --raw (raw days)")
    if options.ingest and not options.raw:
        raise ValueError("--ingest: has no effect without --raw")
    data = Path(options.data) if options.data else options.output.resolve() / "data"
    default = "success" if options.raw else "manifest"
    mark = Readiness(mark=options.ready or default, min_rows=options.ready_rows)
    if not options.raw:
        return mark, [], mark.days(str(data)), data
    raw = mark.days(options.raw)
    typed = Readiness().days(str(data)) if data.is_dir() else []
    return mark, raw, sorted({*raw, *typed}), data


def during(options: argparse.Namespace, status: RunStatus) -> None:
    """Write the states of the night's stages for monitoring."""
    with contextlib.suppress(OSError):  # a night runs without them, too
        night_metrics.write_states(options.output.resolve() / night_metrics.FILE, status)


def after(options: argparse.Namespace, status: RunStatus) -> None:
    """Write the night's numbers for monitoring, and one line of the log."""
    found = night_metrics.collect(options.date, status)
    # The numbers of a night that another process is at are its own; and a URL for --output, which
    # was refused, is no folder to make. Of `new`, where no day is ready, the file says that.
    theirs = status.code == LOCKED or _is_url(str(options.output))
    known = _is_day(options.date) or status.code == NOT_READY
    if known and not theirs:
        with contextlib.suppress(OSError, ValueError):  # a damaged record is no reason to be silent
            found.values.update(night_metrics.of_store(Store(options.output.resolve())))
    print(found.line(), file=sys.stderr if status.code else sys.stdout, flush=True)
    if known and not theirs:
        path = options.output.resolve() / night_metrics.FILE
        try:
            found.write(path)
        except OSError as error:  # which changes neither the night nor its exit code
            print(f"error: {path} was not written: {error}", file=sys.stderr, flush=True)


def _raw_days(
    raw: list[str], new: tuple[str, ...], known: Known, options: argparse.Namespace
) -> tuple[str, ...]:
    """Return the raw days to look at: those of the night, and the last ones of the base."""
    behind = [day for day in raw if day in known.days and day < options.date]
    behind = behind[-options.look_back :] if options.look_back else []
    wanted = {*new, options.date, *behind}
    return tuple(day for day in raw if day in wanted)


def _intake(options: argparse.Namespace, schema: Schema, output: Path) -> Intake:
    return Intake(raw=options.raw, output=output, schema=schema, config=_ingest(options.ingest))


def _ingest(words: str) -> IngestConfig:
    """Return the configuration that --ingest gives.

    Raises:
        ValueError: an option that ingestion does not know, or a value that it does not take.
    """
    parser = argparse.ArgumentParser(prog="--ingest", add_help=False, exit_on_error=False)
    add_file_options(parser)
    add_row_options(parser)
    try:
        given, unknown = parser.parse_known_args(shlex.split(words))
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"--ingest: {error}") from error
    if unknown:
        raise ValueError(
            f"--ingest: {unknown[0]!r} is none of pipelines.ingest's on files, values and bad rows"
        )
    return config_of(given)

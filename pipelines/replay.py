# SPDX-License-Identifier: MIT
"""Replay nights: python -m pipelines.replay [--data LOGS] [--output DIR] [--days N].

Runs the nightly pipeline for one date after the other, as a scheduler would, on a log that is there
already or on generated days, and ends with the list of models: what `make nightly` runs. A replay
that was cut short goes on where it stopped.

Exit codes: those of `python -m pipelines.run`, of the first night that did not end with 0 or 3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines import run
from pipelines.nightly import ready_days
from pipelines.publish import Store
from pipelines.synthesize import SynthesisConfig, synthesize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.replay", description="Run nights, one after the other."
    )
    add = parser.add_argument
    default = Path("runs/nightly")
    add("--output", type=Path, default=default, metavar="DIR", help=f"(default: {default})")
    add("--data", type=Path, metavar="LOGS", help="a log in days (default: it is generated)")
    add("--recipe", default="dlrm.demo", help="what to train (default: dlrm.demo)")
    add("--days", type=int, default=6, metavar="N", help="the last days of the log (default: 6)")
    add("--first-days", type=int, default=2, metavar="N", help="of the first night (default: 2)")
    rows = "of each generated day (default: 20000)"
    add("--rows-per-day", type=int, default=20_000, metavar="N", help=rows)
    add("--ready", default="manifest", choices=("manifest", "files"), help="see pipelines.run")
    add("words", nargs="*", metavar="-- WORDS", help="more words for every night")
    options = parser.parse_args(arguments)
    try:
        data = options.data or generated(options)
        days = ready_days(data, options.ready)[-options.days :]
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return run.WRONG
    for day in days[options.first_days :]:
        print(f"\n=== {day}", flush=True)
        words = ["--date", day, "--recipe", options.recipe, "--data", str(data)]
        words += ["--output", str(options.output), "--first-days", str(options.first_days)]
        code = run.main(["nightly", *words, "--ready", options.ready, *options.words])
        if code not in (run.DONE, run.REFUSED):
            return code
    print(f"\n{Store(options.output).describe()}")
    return run.DONE


def generated(options: argparse.Namespace) -> Path:
    """Return a generated log of so many days, written once."""
    logs = options.output / "logs"
    if len(ready_days(logs, "manifest")) < options.days:
        print(f"generating {options.days} days in {logs}", flush=True)
        config = SynthesisConfig(
            days=options.days, rows_per_day=options.rows_per_day, overwrite=True
        )
        synthesize(logs, config)
    return logs


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Compare models on the same rows: python -m trainer.compare A [B] [--data PATH --days FIRST:LAST].

A and B are checkpoints or runs' folders. Both predict every row of the same days; the answer, as
JSON on standard output (a summary goes to standard error), holds

  models       metrics of each, with `intervals` of 95 %
  differences  A - B in every metric, each with an interval; how far the predictions moved
               (`drift`, `mean_move`)
  labels       the same of every label that both models have, where there are several
  slices       the same by the values of each column of --slice-by, or by `day`

Without --data, A and B are runs with `data.progressive`: the rows are those of the days that both
have predicted, from their folders, and `slices` has each day.

Above `labels` all numbers are of the first label. How intervals come about: `metrics/bootstrap.py`.
Runs alone or under torchrun, at any world size. The first model's scores are kept: 4 bytes a row
and label, on the rank that predicts the row.

Shapes: B examples, K labels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.plugins import TOWER_HELP
from trainer.runtime.atomic_files import json_ready
from trainer.runtime.printable import printable
from trainer.runtime.program import Parser, program, quiet_pipe
from trainer.telemetry.summary_lines import compared_lines

if TYPE_CHECKING:
    from trainer.runtime.runtime import Runtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(
        prog=program("trainer.compare"),
        description="Compare models; JSON on stdout, a summary on stderr.",
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="two checkpoints or runs; one: its intervals")
    add(
        "--data",
        default="",
        help="the log's folder or file; none: the days that runs with data.progressive predicted",
    )
    add("--days", default="", help="FIRST:LAST or DAY; default: the first model's test rows")
    add("--replicates", type=int, default=200, help="of the bootstrap (default: 200)")
    by = "the same by a column's values, or by `day`; may be repeated"
    add("--slice-by", metavar="COLUMN", action="append", default=[], help=by)
    add("--tower", metavar="MODULE:CLASS", action="append", default=[], help=TOWER_HELP)
    options = parser.parse_args(arguments)

    # Imported after the words are read: --help and a misspelt option need no torch.
    from trainer.evaluation.compare import Rows, compare
    from trainer.evaluation.evaluate import choose_rows, read_config
    from trainer.recipes.load import import_tower
    from trainer.runtime.exit_codes import exit_code
    from trainer.runtime.runtime import start
    from trainer.warm_start.policies import resolve

    def work() -> None:
        if len(options.models) > 2:
            raise ValueError(f"expected one or two models, got {len(options.models)}")
        if options.replicates < 1:
            raise ValueError(f"--replicates: expected at least 1, got {options.replicates}")
        for name in options.tower:
            import_tower(name)
        if not options.data:
            found, runtime = _on_days(options)
            _print(options.models, found, runtime)
            return
        paths = [resolve(path) for path in options.models]
        runtime = start()
        # The first model's test rows, for both: they are compared on the same ones.
        own = [read_config(path)[0] for path in paths]
        days, share, note = choose_rows(own[0], options.data, options.days)
        notes = [note, *(choose_rows(one, options.data, days)[2] for one in own[1:] if days)]
        for path, one in zip(options.models, notes, strict=False):
            if one and runtime.is_first:
                print(printable(f"note: {path}: {one}"), file=sys.stderr, flush=True)
        rows = Rows(options.data, (days, share), own[0].loader)
        found = compare(paths, rows, runtime, options.slice_by, options.replicates)
        _print(options.models, found, runtime)

    return exit_code(work)


def _on_days(options: argparse.Namespace) -> tuple[dict[str, Any], Runtime]:
    """Return what is said of runs that have predicted their test days, and this process."""
    from trainer.evaluation.compare import compare_days
    from trainer.evaluation.predictions import FOLDER
    from trainer.run_dir import CONFIG
    from trainer.runtime.atomic_files import read_json
    from trainer.runtime.runtime import start

    for name in ("days", "slice_by", "tower"):
        if getattr(options, name):
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect without --data: all days that the runs "
                "have predicted are compared, together and each; remove it"
            )
    folders = [Path(one) for one in options.models]
    for folder in folders:
        if not (folder / FOLDER).is_dir():
            raise ValueError(
                f"{printable(str(folder))}: has no predicted days, so --data is needed; or train "
                "with --data.progressive"
            )
    schemas = [read_json(folder / CONFIG, follow=False) for folder in folders]
    grouped = all(bool(one["schema"].get("user")) for one in schemas)
    runtime = start()
    return compare_days(folders, grouped, runtime, options.replicates), runtime


def _print(names: Sequence[str], found: dict[str, Any], runtime: Runtime) -> None:
    """Print the answer of the first rank, and end the process group."""
    if runtime.is_first:
        print(json.dumps(json_ready(found)), flush=True)
        lines = compared_lines(names, found)
        for path, model in zip(names, found["models"], strict=True):
            lines += [f"ALERT {name}: {path}: {text}" for name, text in model["alerts"].items()]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    runtime.stop()


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

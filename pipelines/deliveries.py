# SPDX-License-Identifier: MIT
"""Raw days as they come, come late and come again: python -m pipelines.deliveries RAW --output DIR.

Each ready day RAW/dt=YYYY-MM-DD becomes the day DIR/dt=YYYY-MM-DD of typed Parquet, many small
files a few large ones: once, and again when its bytes have changed (`pipelines/ingestion/intake.py`
does the work).

  python -m pipelines.deliveries RAW --schema schema.yaml --output DIR --ready success
  torchrun --nproc-per-node 4 -m pipelines.deliveries RAW --schema schema.yaml --output DIR
  torchx run -s local_cwd dist.ddp -j 1x4 -m pipelines.deliveries -- RAW --schema ...

Processes that a launcher has started share the days among them. RAW may be a URL that fsspec knows.
The options on values and bad rows are those of `pipelines.ingest`. Exit codes: 0 done; 1 it failed;
2 options or data are wrong; 4 no day is ready.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from embeddings.schema.schema import load_schema
from pipelines.ingestion.intake import Delivery, Intake
from pipelines.ingestion.options import add_file_options, add_row_options, config_of
from pipelines.ingestion.readiness import MARKS, Readiness
from pipelines.orchestration.help_screens import add_help
from pipelines.orchestration.text_tables import table
from trainer.data.splits import parse_days
from trainer.runtime.program import Parser, program, quiet_pipe

NOT_READY = 4


def describe(found: Sequence[Delivery]) -> str:
    """Return a line a day."""
    rows = [
        (one.day, one.state, f"{one.rows:,}", f"{one.raw_files} to {one.files}", one.note)
        for one in found
    ]
    return table(("day", "delivery", "rows", "files", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        readiness = Readiness(mark=options.ready, min_rows=options.ready_rows)
        first, last = parse_days(options.days, "--days") or ("", "9")
        days = [day for day in readiness.days(options.raw) if first <= day <= last]
        if not days:
            print(f"error: {options.raw}: no day is ready; {readiness.describe()}", file=sys.stderr)
            return NOT_READY
        intake = Intake(
            raw=options.raw,
            output=Path(options.output),
            schema=load_schema(options.schema),
            config=config_of(options),
        )
        number, count = _part(options.part)
        print(describe(intake.take(days[number::count], print)))
    except (ValueError, RuntimeError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _part(text: str) -> tuple[int, int]:
    """Return this process's number and their count: as asked for, or as a launcher says."""
    if not text:
        from trainer.runtime.runtime import place

        return place()
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"--part: expected NUMBER/COUNT such as 0/4, got {text!r}")
    return int(number), int(count)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.deliveries"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s RAW --schema FILE --output DIR [OPTION ...]",
        add_help=False,
    )
    add_help(parser, ("files", "values", "bad rows"))
    add = parser.add_argument
    add("raw", metavar="RAW", help="folder or URL of the raw days dt=YYYY-MM-DD")
    add("--schema", metavar="FILE", required=True, help="the schema's YAML file")
    add("--output", metavar="DIR", required=True, help="folder of the typed days")
    add("--days", default="", metavar="FIRST:LAST", help="(default: all that are ready)")
    add("--ready", default="success", choices=MARKS, help="what makes a day ready: see README")
    add("--ready-rows", type=int, default=0, metavar="N", help="of --ready rows")
    add("--part", default="", metavar="I/N", help="days I, I + N, ... (default: the launcher's)")
    add_file_options(parser)
    add_row_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

# SPDX-License-Identifier: MIT
"""Turn raw click logs into validated, typed Parquet by day.

  python -m pipelines.ingest LOGS... --schema schema.yaml --output DIR

reads CSV, TSV (plain or compressed) and Parquet in bounded memory, keeps the schema's columns,
hashes strings to int64, sets bad rows aside with file, row, column and reason, and writes
DIR/dt=YYYY-MM-DD/. A day is complete if it has a manifest.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

from embeddings.schema.schema import Schema, load_schema
from pipelines.ingestion.ingestion import IngestConfig, IngestSummary
from pipelines.ingestion.options import add_file_options, add_row_options, config_of
from pipelines.ingestion.partition import PartitionConfig
from trainer.runtime.program import Parser, program, quiet_pipe

_DAYS_SHOWN = 12


def ingest(
    sources: list[str], schema: Schema, output: str | Path, config: IngestConfig | None = None
) -> IngestSummary:
    """Ingest `sources` into `output`; see `Ingestion.run` for what is raised."""
    return (config or IngestConfig()).build(schema).run(sources, output)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, ingest, print a summary; return the exit code."""
    given = _parser().parse_args(arguments)
    try:
        config = config_of(given)
        part = PartitionConfig(row_group_rows=given.row_group_rows, overwrite=given.overwrite)
        config = dataclasses.replace(config, partition=part, day=given.day)
        summary = ingest(given.sources, load_schema(given.schema), given.output, config)
    except (ValueError, RuntimeError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(describe(summary))
    if summary.days:
        data, schema = shlex.quote(given.output), shlex.quote(given.schema)
        print(
            "next: python -m trainer.train dlrm.demo --output runs/first "
            f"--data.path {data} --data.schema {schema}"
        )
    return 0


def describe(summary: IngestSummary) -> str:
    """Return what an ingestion did as a screen of text."""
    rows_out = sum(summary.days.values())
    speed = summary.rows_in / max(summary.seconds, 1e-9)
    lines = [
        f"{summary.files} files, {summary.rows_in:,} rows in, {rows_out:,} out, "
        f"{summary.rows_bad:,} quarantined; {summary.seconds:.1f} s, {speed:,.0f} rows/s"
    ]
    days = list(summary.days.items())
    lines += [f"  dt={day}  {rows:>12,} rows" for day, rows in days[:_DAYS_SHOWN]]
    if len(days) > _DAYS_SHOWN:
        lines.append(f"  ... and {len(days) - _DAYS_SHOWN} more days, the last {days[-1][0]}")
    strings = [column for column, kind in summary.kinds.items() if kind == "string"]
    if strings:
        lines.append(f"hashed strings: {', '.join(strings)}")
    if summary.quarantine:
        lines.append(f"bad rows: {summary.reasons}; all in {summary.quarantine}")
    lines += [f"drift: {drift}" for drift in summary.drifts]
    lines += [f"note: {note}" for note in summary.notes]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    """Return the command line, which explains every option in a line that ends with its default."""
    parser = Parser(
        prog=program("pipelines.ingest"),
        usage="%(prog)s LOGS... --schema FILE --output DIR [options]",
        description=__doc__,
        formatter_class=_OneLine,
    )
    parser.add_argument("sources", metavar="LOGS", nargs="+", help="files, folders and globs")
    default = IngestConfig()
    add, part = parser.add_argument_group("places").add_argument, default.partition
    add("--schema", metavar="FILE", required=True, help="the schema's YAML file (required)")
    add("--output", metavar="DIR", required=True, help="folder of the partitions (required)")
    add("--overwrite", action="store_true", help="replace days that exist (default: refuse)")
    size = part.row_group_rows
    rows = f"rows of a Parquet row group (default: {size})"
    add("--row-group-rows", metavar="ROWS", type=int, default=size, help=rows)

    add_file_options(parser)
    add_row_options(parser)
    day = "of logs without timestamp (default: of their dt=YYYY-MM-DD folder)"
    add("--day", metavar="YYYY-MM-DD", default="", help=day)
    return parser


class _OneLine(argparse.RawDescriptionHelpFormatter):
    """Help that is wide enough for a line an option, whatever the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=105)


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

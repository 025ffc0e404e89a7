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
import sys
from pathlib import Path

from embeddings.schema.schema import Schema, load_schema
from pipelines.ingestion.casting import Times
from pipelines.ingestion.ingestion import IngestConfig, IngestSummary
from pipelines.ingestion.parsing import UNITS_MS
from pipelines.ingestion.partition import PartitionConfig
from pipelines.ingestion.sources import SourceConfig

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
        print("ingest:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(describe(summary))
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
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    """Return the command line, which explains every option in a line that ends with its default."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.ingest",
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


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add what concerns the files."""
    default = IngestConfig()
    add, source = parser.add_argument_group("files").add_argument, default.source
    names = ("csv", "tsv", "parquet")
    form = "csv, tsv or parquet (default: by each file's name)"
    add("--format", default="", choices=names, metavar="NAME", help=form)
    add("--columns", default="", metavar="A,B", help="a CSV's columns (default: its first row)")
    cut = "between columns; `tab` for a tab (default: a comma, in .tsv a tab)"
    add("--delimiter", default="", metavar="CHAR", help=cut)
    entries = "between the entries of a list in text (default: none, lists are refused)"
    add("--list-separator", default="", metavar="CHAR", help=entries)
    code, nulls = source.encoding, ",".join(source.null_values)
    add("--encoding", metavar="NAME", default=code, help=f"of text files (default: {code})")
    absent = f"texts that count as null, the empty one too (default: {nulls})"
    add("--null-values", metavar="A,B", default=nulls, help=absent)


def add_row_options(parser: argparse.ArgumentParser) -> None:
    """Add what concerns values and bad rows."""
    default = IngestConfig()
    add = parser.add_argument_group("values").add_argument
    kinds = "string, int or float; may be repeated (default: as the first rows look)"
    add("--type", metavar="COLUMN=KIND", action="append", default=[], dest="types", help=kinds)
    add("--keep", metavar="A,B", default="", help="columns to keep as they are (default: none)")
    units = f"of times that are numbers: {', '.join(UNITS_MS)} (default: ms)"
    add("--timestamp-unit", metavar="UNIT", help=units)
    pattern = "strptime pattern of times that are text (default: ISO 8601)"
    add("--timestamp-format", metavar="PATTERN", default="", help=pattern)

    add = parser.add_argument_group("bad rows").add_argument
    policy, labels, share = default.on_bad_row, default.null_labels, default.max_bad_share
    bad = f"quarantine it, or fail at the first (default: {policy})"
    add("--on-bad-row", metavar="DO", default=policy, choices=("quarantine", "fail"), help=bad)
    null = f"quarantine the row, or mask the missing label (default: {labels})"
    add("--null-labels", metavar="DO", default=labels, choices=("quarantine", "mask"), help=null)
    many = f"share of bad rows beyond which nothing is written (default: {share})"
    add("--max-bad-share", metavar="SHARE", type=float, default=share, help=many)


class _OneLine(argparse.RawDescriptionHelpFormatter):
    """Help that is wide enough for a line an option, whatever the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=105)


def config_of(given: argparse.Namespace) -> IngestConfig:
    """Return what the options of `add_file_options` and `add_row_options` say."""
    kinds = dict(item.partition("=")[::2] for item in given.types)
    delimiter = "\t" if given.delimiter in ("\\t", "tab") else given.delimiter
    return IngestConfig(
        source=SourceConfig(
            format=given.format,
            columns=_names(given.columns),
            delimiter=delimiter,
            encoding=given.encoding,
            null_values=tuple(given.null_values.split(",")),
        ),
        times=Times(unit=given.timestamp_unit, pattern=given.timestamp_format),
        list_separator=given.list_separator,
        keep=_names(given.keep),
        kinds=kinds,
        on_bad_row=given.on_bad_row,
        max_bad_share=given.max_bad_share,
        null_labels=given.null_labels,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())

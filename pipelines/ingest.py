# SPDX-License-Identifier: MIT
"""Turn raw click logs into validated, typed Parquet by day.

  python -m pipelines.ingest LOGS... --schema schema.yaml --output DIR

reads CSV, TSV (plain or compressed) and Parquet in bounded memory, keeps the schema's columns,
hashes strings to int64, sets bad rows aside with file, row, column and reason, and writes
DIR/dt=YYYY-MM-DD/. A day is complete if it has a manifest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from embeddings.schema import Schema, load_schema
from pipelines.casting import Times
from pipelines.ingestion import IngestConfig, IngestSummary
from pipelines.partition import PartitionConfig
from pipelines.sources import SourceConfig

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
        summary = ingest(given.sources, load_schema(given.schema), given.output, _config(given))
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
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.ingest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, source = parser.add_argument, SourceConfig()
    add("sources", nargs="+", help="files, folders and globs")
    add("--schema", required=True, help="the schema's YAML file")
    add("--output", required=True, help="folder of the dt=YYYY-MM-DD partitions")
    add("--format", default="", choices=["csv", "tsv", "parquet"], help="default: by file name")
    add("--columns", default="", help="comma-separated names of the columns of CSVs without header")
    add("--delimiter", default="", help="of text files, if not a comma or, for .tsv, a tab")
    add("--list-separator", default="", help="between the entries of lists in text files")
    add("--encoding", default=source.encoding, help="of text files")
    add("--null-values", default=",".join(source.null_values), help="comma-separated")
    add("--timestamp-unit", help="of times that are numbers: s, ms (the default), us, ns")
    add("--timestamp-format", default="", help="strptime pattern of times that are text")
    add("--day", default="", help="YYYY-MM-DD, for logs without timestamp")
    add("--keep", default="", help="comma-separated columns to keep beside the schema's")
    add("--type", action="append", default=[], metavar="COLUMN=string|int|float", dest="types")
    add("--on-bad-row", default="quarantine", choices=["quarantine", "fail"])
    add("--max-bad-share", type=float, default=0.01, help="beyond it nothing is written")
    add("--null-labels", default="quarantine", choices=["quarantine", "mask"])
    add("--row-group-rows", type=int, default=PartitionConfig().row_group_rows)
    add("--overwrite", action="store_true", help="replace days that exist")
    return parser


def _config(given: argparse.Namespace) -> IngestConfig:
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
        partition=PartitionConfig(row_group_rows=given.row_group_rows, overwrite=given.overwrite),
        times=Times(unit=given.timestamp_unit, pattern=given.timestamp_format),
        list_separator=given.list_separator,
        keep=_names(given.keep),
        kinds=kinds,
        day=given.day,
        on_bad_row=given.on_bad_row,
        max_bad_share=given.max_bad_share,
        null_labels=given.null_labels,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())

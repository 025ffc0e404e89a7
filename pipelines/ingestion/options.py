# SPDX-License-Identifier: MIT
"""The options of ingestion: files, values and bad rows, shared by every command that ingests."""

from __future__ import annotations

import argparse

from pipelines.ingestion.casting import Times
from pipelines.ingestion.formats import NAMES
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.parsing import UNITS_MS
from pipelines.ingestion.source import MAX_FIELD_LINES, QUOTING, SourceConfig


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add what concerns the files."""
    default = IngestConfig()
    add, source = parser.add_argument_group("files").add_argument, default.source
    form = f"{', '.join(NAMES)} (default: by each file's name)"
    add("--format", default="", choices=NAMES, metavar="NAME", help=form)
    add("--columns", default="", metavar="A,B", help="a CSV's columns (default: its first row)")
    cut = "between columns; `tab` for a tab (default: a comma, in .tsv a tab)"
    add("--delimiter", default="", metavar="CHAR", help=cut)
    quotes = "double (RFC 4180) or none (default: none between tabs, else double)"
    add("--quoting", default="", choices=QUOTING, metavar="HOW", help=quotes)
    size = source.max_field_bytes
    longest = f"bytes of a field beyond which its row is bad (default: {size})"
    add("--max-field-bytes", metavar="BYTES", type=int, default=size, help=longest)
    lines = f"lines of a quoted field (default: {MAX_FIELD_LINES}, none that look like rows)"
    add("--max-field-lines", metavar="LINES", type=int, default=0, help=lines)
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


def config_of(given: argparse.Namespace) -> IngestConfig:
    """Return what the options of `add_file_options` and `add_row_options` say."""
    kinds = dict(item.partition("=")[::2] for item in given.types)
    delimiter = "\t" if given.delimiter in ("\\t", "tab") else given.delimiter
    return IngestConfig(
        source=SourceConfig(
            format=given.format,
            columns=_names(given.columns),
            delimiter=delimiter,
            quoting=given.quoting,
            max_field_bytes=given.max_field_bytes,
            max_field_lines=given.max_field_lines,
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

# SPDX-License-Identifier: MIT
"""Parquet logs: which files and row groups there are, known from their footers.

Every footer is checked against the schema before anything is read, so that a retyped, missing or
truncated file is named before the first step, not hours into a run.

Layout: a folder with partitions dt=YYYY-MM-DD/ at any depth, a folder of Parquet files, or one
file. Which files count is said in `trainer/data/discovery.py`.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.schema.schema import Schema
from trainer.data.columns import check_columns, is_list, kind_of
from trainer.data.discovery import (
    day_of,
    is_parquet,
    list_files,
    openable,
    partition_keys,
    printable,
    refuse_table,
)
from trainer.data.splits import describe_days

_log = logging.getLogger(__name__)
# Raw logs in text, plain or compressed.
_TEXT = re.compile(r"\.(csv|tsv|txt|jsonl|ndjson)(\.(gz|bz2|zst|xz|lz4|br))?$", re.IGNORECASE)
_FOOTER_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One Parquet file of a log.

    Attributes:
        path: the file's path.
        day: YYYY-MM-DD, or empty.
        row_group_rows: number of rows of each row group.
        row_group_starts: first wanted row of each row group; empty if that is row 0 everywhere.
        families: (column, `text`, `date` or `number`) of each column that has values.
        footer: a hash of the footer, which changes with nearly any change of the rows.
    """

    path: str
    day: str = ""
    row_group_rows: tuple[int, ...]
    row_group_starts: tuple[int, ...] = ()
    families: tuple[tuple[str, str], ...] = ()
    footer: str = ""

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_group_rows)


@dataclass(frozen=True, kw_only=True)
class RowInterval:
    """Rows `start` (inclusive) to `stop` (exclusive) of one row group."""

    path: str
    row_group: int
    start: int
    stop: int


def discover(path: str | Path, days: tuple[str, str] | None, schema: Schema) -> tuple[LogFile, ...]:
    """Find the files of a log, in order of day and name, and check their footers against `schema`.

    Args:
        path: a folder of dt=YYYY-MM-DD/ partitions, a folder of Parquet files, or one file.
        days: the first and last wanted day, inclusive, as YYYY-MM-DD; None takes every day.
        schema: the columns that the files must have.

    Raises:
        ValueError: there is no file or no row; `days` are not days or the log has none of them; a
            file is empty, truncated or not Parquet; a column is missing or has a wrong type; a
            column is text in one file and a number in another, so that its ids would not match.
    """
    found = _list_files(Path(path))
    if days is not None:
        found = _of_days(found, days, str(path))
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        files = tuple(pool.map(lambda item: _read_footer(item[0], item[1], schema), found))
    check_families(files)
    if not sum(file.num_rows for file in files):
        days_found = describe_days({file.day for file in files} - {""})
        of_days = f" of {days_found}" if days_found else ""
        raise ValueError(
            f"{path}: expected rows, got {len(files)} files{of_days} without any, such as "
            f"{printable(files[0].path)}; check the log"
        )
    return files


def contents(files: Sequence[LogFile]) -> dict[str, str]:
    """Return a hash of the rows read from each file, by day and name.

    The folder is left out of the hash, so that a log may be moved.
    """
    found: dict[str, str] = {}
    for file in files:
        read = repr((file.row_group_rows, file.row_group_starts, file.footer))
        name = f"{file.day}/{printable(os.path.basename(file.path))}"
        while name in found:  # of the same name, in another folder of the day
            name += "+"
        found[name] = hashlib.sha256(read.encode()).hexdigest()[:8]
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str], count: int = 3) -> str:
    """Return which files of two `contents` are new, gone or changed; empty if none.

    Args:
        before: the earlier contents.
        now: the current contents.
        count: names to show per group.
    """
    both = before.keys() & now.keys()
    groups = {
        "new": sorted(now.keys() - before.keys()),
        "gone": sorted(before.keys() - now.keys()),
        "changed": sorted(name for name in both if before[name] != now[name]),
    }
    parts = []
    for word, names in groups.items():
        if names:
            more = f" and {len(names) - count} more" if len(names) > count else ""
            parts.append(f"{word}: {', '.join(names[:count])}{more}")
    return "; ".join(parts)


def fingerprint_of(files: Sequence[LogFile]) -> str:
    """Return a hash of files and of the rows kept of them, independent of their paths."""
    content = repr([(f.day, f.row_group_rows, f.row_group_starts, f.footer) for f in files])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def days_of(path: str | Path) -> list[str]:
    """Return the days of a log, in order; files outside any partition have the empty day.

    Raises:
        ValueError: there is no file.
    """
    return sorted({day for _, day in _list_files(Path(path))})


def last_days(path: str | Path, days: Sequence[str], least_rows: int, share: float) -> list[str]:
    """Return the last of `days` that together hold enough rows to test on; at least one day.

    Enough is `least_rows`, or `share` of the rows of all `days` if that is less. A log with large
    days costs the footers of one day. Where a footer cannot be read, the last day is returned.

    Args:
        path: the log.
        days: days of it, in order.
        least_rows: rows that are enough in any case.
        share: of the rows of all days that is enough.
    """
    files: dict[str, list[str]] = {}
    for name, day in _list_files(Path(path)):
        files.setdefault(day, []).append(name)

    def rows(day: str) -> int:
        return sum(pq.read_metadata(openable(name)).num_rows for name in files[day])

    try:
        if rows(days[-1]) >= least_rows:
            return [days[-1]]
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            counts = [*pool.map(rows, days)]
    except (pa.ArrowException, OSError):
        return [days[-1]]
    enough, chosen = min(least_rows, share * sum(counts)), 0
    for number, count in enumerate(reversed(counts), start=1):
        chosen += count
        if chosen >= enough:
            return list(days[-number:])
    return list(days)


def column_names(path: str | Path) -> list[str]:
    """Return the columns of a log's first file, none if it cannot be read.

    Raises:
        ValueError: there is no file.
    """
    try:
        return pq.read_schema(openable(_list_files(Path(path))[0][0])).names
    except (pa.ArrowException, OSError):
        return []


def keep_rows(files: Sequence[LogFile], shares: tuple[float, float]) -> tuple[LogFile, ...]:
    """Keep the rows from share to share (0 to 1) of all rows in the files' order.

    Args:
        files: the files of the log.
        shares: where the kept rows begin and end.

    Raises:
        ValueError: no row is left.
    """
    total = sum(file.num_rows for file in files)
    first, last = round(shares[0] * total), round(shares[1] * total)
    kept, position = [], 0
    for file in files:
        rows, starts = [], []
        for group_rows in file.row_group_rows:
            low = min(max(first - position, 0), group_rows)
            high = min(max(last - position, low), group_rows)
            rows.append(high - low)
            starts.append(low)
            position += group_rows
        kept.append(replace(file, row_group_rows=tuple(rows), row_group_starts=tuple(starts)))
    if first >= last:
        raise ValueError(
            f"rows {shares[0]:g} to {shares[1]:g} of {total}: expected at least one row, got none; "
            "widen the range"
        )
    return tuple(kept)


def _list_files(root: Path) -> list[tuple[str, str]]:
    """Return (path, day) of every Parquet file under `root`, ordered by day and path."""
    if root.is_file():
        refuse_table(root.parent)
        paths = [] if _TEXT.search(root.name) else [str(root)]
        others = [root.name]
    elif root.is_dir():
        found = list_files(root)
        paths = [path for path in found if is_parquet(path)]
        others = [os.path.basename(path) for path in found if _TEXT.search(path)]
    else:
        raise ValueError(
            f"{printable(root)}: expected a folder or a Parquet file, got nothing there"
        )
    if not paths:
        text = f"text ({printable(others[0])})" if others else "none"
        raise ValueError(
            f"{printable(root)}: expected files named *.parquet, got {text}; make them of the raw "
            f"log: python -m pipelines.ingest {shlex.quote(printable(root))} --schema FILE "
            "--output DIR"
        )
    return sorted(((path, day_of(path)) for path in paths), key=lambda item: (item[1], item[0]))


def _of_days(
    found: list[tuple[str, str]], days: tuple[str, str], root: str
) -> list[tuple[str, str]]:
    """Keep the files of the days wanted."""
    first, last = days
    for day in days:
        try:
            if datetime.date.fromisoformat(day).isoformat() != day:
                raise ValueError
        except ValueError:
            raise ValueError(f"days: expected YYYY-MM-DD, got {day!r}") from None
    if first > last:
        raise ValueError(f"days: expected the first day not after the last, got {first} and {last}")
    without = [path for path, day in found if not day]
    if without:
        raise ValueError(
            f"{root}: days {first} to {last} were asked for, but {printable(without[0])} lies in "
            "no dt=YYYY-MM-DD folder; partition the log by day, or ask for no days"
        )
    available = {day for _, day in found}
    kept = [(path, day) for path, day in found if first <= day <= last]
    if not kept:
        raise ValueError(
            f"{root}: expected files of days {first} to {last}, got none; days available: "
            f"{describe_days(available)}; choose among them (--data.train-days, --data.test-days "
            "FIRST:LAST; a recipe has days of its own)"
        )
    wanted = datetime.date.fromisoformat(last) - datetime.date.fromisoformat(first)
    num_found = len({day for _, day in kept})
    if num_found <= wanted.days:
        _log.warning(
            "%s: %d of the %d days from %s to %s have no files",
            *(root, wanted.days + 1 - num_found, wanted.days + 1, first, last),
        )
    return kept


def _read_footer(path: str, day: str, schema: Schema) -> LogFile:
    """Read and check one footer."""
    try:
        with pq.ParquetFile(openable(path)) as file:
            metadata, columns = file.metadata, file.schema_arrow
        footer = _hash_footer(path)
    except (pa.ArrowException, OSError) as error:
        size = os.path.getsize(path) if os.path.exists(path) else 0
        raise ValueError(
            f"{printable(path)}: expected a Parquet file, got {size} bytes that cannot be read as "
            f"one ({error}); it is empty, truncated or damaged: write it again or remove it"
        ) from error
    check_columns(columns, schema, printable(path), dict(partition_keys(path)))
    rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    families = families_of(columns, schema)
    return LogFile(path=path, day=day, row_group_rows=rows, families=families, footer=footer)


def _hash_footer(path: str) -> str:
    """Return a hash of a file's footer: sizes, offsets and statistics of all its column chunks."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(file.read(length)).hexdigest()[:16]


def check_families(files: Sequence[LogFile]) -> None:
    """Check that each column is text in all files or in none; otherwise an id gets two embeddings.

    Raises:
        ValueError: a column is text in one file only; the message names it and both files.
    """
    seen: dict[str, tuple[str, str]] = {}
    for file in files:
        for name, family in file.families:
            first_family, first_path = seen.setdefault(name, (family, file.path))
            if family != first_family:
                raise ValueError(
                    f"{printable(file.path)}: column {name!r}: expected {first_family}, as in "
                    f"{printable(first_path)}, got {family}; the same id would get two "
                    "embeddings: write one of the files again"
                )


def families_of(columns: pa.Schema, schema: Schema) -> tuple[tuple[str, str], ...]:
    """Return the kind of each column that has values: text, date or number."""
    found = []
    for name in schema.columns:
        type_ = columns.field(name).type
        kind = kind_of(type_.value_type if is_list(type_) else type_)
        if kind != "null":
            found.append((name, kind if kind in ("text", "date") else "number"))
    return tuple(found)

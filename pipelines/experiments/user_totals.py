# SPDX-License-Identifier: MIT
"""Sums of a log's columns by user: the unit in which an experiment is analysed.

Rows of one user are not independent, so every statistic here is one of users. Files are read batch
by batch; memory grows with the number of users and days, not with rows.

Shapes: U users, C columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from trainer.data.discovery import day_of, is_parquet, list_files, openable, printable

pc: Any = pyarrow.compute
ROWS = "rows"
USERS = "users"
_USER, _ARM, _DAY = "user", "arm", "day"
_KEYS = [_USER, _ARM, _DAY]
# Before the name of a sum: a column of the log may be called `day`.
_SUM = "sum of "
# Grouped rows that are collected before they are merged.
_MERGE_ROWS = 2_000_000
_BATCH_ROWS = 131_072


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A ratio of two sums over users.

    Args:
        name: What it is called.
        numerator: A column: a label or an amount.
        denominator: A column, `rows` (of the log, where the numerator is not null) or `users`.
    """

    name: str
    numerator: str
    denominator: str

    @staticmethod
    def parse(text: str) -> Metric:
        """Return the metric that `NAME=COLUMN/COLUMN` describes.

        Raises:
            ValueError: The text has another form.
        """
        name, equals, ratio = text.partition("=")
        numerator, slash, denominator = ratio.partition("/")
        parts = [part.strip() for part in (name, numerator, denominator)]
        if not (equals and slash and all(parts)) or parts[1] in (ROWS, USERS):
            raise ValueError(
                f"metric: expected NAME=COLUMN/COLUMN, COLUMN/{ROWS} or COLUMN/{USERS}, such as "
                f"ctr=click/{ROWS}, got {text!r}"
            )
        return Metric(name=parts[0], numerator=parts[1], denominator=parts[2])

    def columns(self) -> tuple[str, str]:
        """Return the names of the two sums in `UserTotals.sums`."""
        below = self.denominator
        return self.numerator, f"{ROWS}:{self.numerator}" if below == ROWS else below


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where a log keeps what an analysis needs.

    Args:
        user: The column of the user.
        arm: The column of the arm; empty for a log from before the experiment.
        by_day: Whether days are kept apart.
    """

    user: str
    arm: str = "arm"
    by_day: bool = False


@dataclass(kw_only=True)
class UserTotals:
    """What a log holds of each user and, if asked for, day.

    Attributes:
        table: A row a user, arm and day: `user`, `arm`, `day` and a column a sum.
        sums: Names of the sums.
        rows: Rows of the log.
        left_out: Rows that count nowhere, by reason.
    """

    table: pa.Table
    sums: tuple[str, ...]
    rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def days(self) -> list[str]:
        """The days, in order."""
        return sorted(self.table[_DAY].unique().to_pylist())

    def until(self, day: str | None = None) -> tuple[pa.Array, pa.Array, np.ndarray]:
        """Return the totals of all days up to `day`, in order of user.

        Returns:
            (U,) users, (U,) arms and (U, C) float64 sums. A user of two arms has two rows.
        """
        table = self.table
        if day is not None:
            table = table.filter(pc.field(_DAY) <= day)
        table = _grouped(table, [_USER, _ARM], self.sums).sort_by([(_USER, "ascending")])
        sums = [table[_SUM + name].to_numpy() for name in self.sums]
        values = np.stack(sums, 1) if sums else np.zeros((table.num_rows, 0))
        return table[_USER].combine_chunks(), table[_ARM].combine_chunks(), values


def read_totals(
    paths: Sequence[str | Path], columns: Columns, metrics: Sequence[Metric]
) -> UserTotals:
    """Read Parquet files and folders of them, and sum by user.

    Raises:
        ValueError: No file, a file without a column or with a column of another type, or a value
            that is not a finite number.
    """
    files = files_of(paths)
    needed = list(dict.fromkeys(_needed(metrics)))
    names = _sum_names(metrics)
    totals = UserTotals(table=_empty(names), sums=tuple(names))
    waiting: list[pa.Table] = []
    size = 0
    for file in files:
        for batch in _batches(file, columns, needed):
            part = _of_batch(batch, file, columns, names, totals)
            waiting.append(part)
            size += part.num_rows
            if size > _MERGE_ROWS:
                waiting = [_grouped(_concat(waiting, file), _KEYS, names)]
                # Not smaller after merging: that many users there are.
                size = 0
    totals.table = _grouped(_concat(waiting, files[-1]), _KEYS, names)
    return totals


def files_of(paths: Sequence[str | Path]) -> list[str]:
    """Return the Parquet files of files and folders, each once.

    Raises:
        ValueError: A path that does not exist, a file of another kind, or no file.
    """
    found = {os.path.realpath(file): file for path in paths for file in _files(path)}
    if not found:
        raise ValueError(f"logs: no Parquet file in {', '.join(map(str, paths))}")
    return list(found.values())


def _needed(metrics: Sequence[Metric]) -> Iterator[str]:
    for metric in metrics:
        yield metric.numerator
        if metric.denominator not in (ROWS, USERS):
            yield metric.denominator


def _sum_names(metrics: Sequence[Metric]) -> list[str]:
    """Return the sums that the metrics take, each once; users are counted, not summed."""
    names = [name for metric in metrics for name in metric.columns() if name != USERS]
    return list(dict.fromkeys(names))


def _files(path: str | Path) -> list[str]:
    """Return the Parquet files of a file or folder."""
    if Path(path).is_file():
        return [str(path)]
    if not Path(path).is_dir():
        raise ValueError(f"{printable(str(path))}: expected a Parquet file or a folder, got none")
    found = list_files(path)
    refused = [file for file in found if not is_parquet(file)]
    if refused:
        raise ValueError(
            f"{printable(refused[0])}: expected Parquet files alone, got {len(refused)} others; "
            "turn them into Parquet with fullrank ingest, or move them away"
        )
    return found


def _batches(file: str, columns: Columns, needed: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the needed columns of a file.

    Raises:
        ValueError: The file is no Parquet, or lacks a column.
    """
    wanted = [columns.user, *([columns.arm] if columns.arm else []), *needed]
    try:
        parquet = pq.ParquetFile(openable(file))
        missing = [name for name in wanted if name not in parquet.schema_arrow.names]
        if missing:
            raise ValueError(
                f"{printable(file)}: no column {missing[0]!r}; it has "
                f"{', '.join(map(repr, parquet.schema_arrow.names[:20]))}"
            )
        yield from parquet.iter_batches(_BATCH_ROWS, columns=list(dict.fromkeys(wanted)))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{printable(file)}: not readable as Parquet ({error})") from error


def _of_batch(
    batch: pa.RecordBatch, file: str, columns: Columns, names: Sequence[str], totals: UserTotals
) -> pa.Table:
    """Return the sums of one batch by user and arm, and count what is left out."""
    totals.rows += batch.num_rows
    user = _plain(batch[columns.user])
    if not (pa.types.is_integer(user.type) or pa.types.is_large_string(user.type)):
        raise ValueError(
            f"{printable(file)}: {columns.user}: expected users as integers or text, got "
            f"{user.type}"
        )
    arm = pa.nulls(len(user), pa.large_string())
    keep = user.is_valid()
    _leave_out(totals, "no user", len(user) - _count(keep))
    if columns.arm:
        arm = _plain(batch[columns.arm]).cast(pa.large_string())
        _leave_out(totals, "no arm", _count(pc.and_(keep, arm.is_null())))
        keep = pc.and_(keep, arm.is_valid())
    day = day_of(file) if columns.by_day else ""
    if columns.by_day and not day:
        raise ValueError(
            f"{printable(file)}: looks by day need folders dt=YYYY-MM-DD; ingest the log first"
        )
    arrays = {_USER: user, _ARM: arm, _DAY: pa.repeat(pa.scalar(day, pa.large_string()), len(user))}
    for name in names:
        column = name.removeprefix(f"{ROWS}:")
        values = _numbers(batch[column], f"{printable(file)}: {column}")
        if name != column:
            values = values.is_valid().cast(pa.float64())
        arrays[_SUM + name] = values.fill_null(0.0)
    return _grouped(pa.table(arrays).filter(keep), _KEYS, names)


def _plain(array: pa.Array) -> pa.Array:
    """Return ids with dictionaries and short offsets resolved."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string(array.type) or pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    return array


def _numbers(array: pa.Array, what: str) -> pa.Array:
    """Return a column as float64.

    Raises:
        ValueError: It is not of numbers, or has one that is not finite.
    """
    kind = array.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (is_number or pa.types.is_boolean(kind)):
        raise ValueError(f"{what}: expected numbers or booleans, got {kind}")
    numbers = array.cast(pa.float64())
    if not pc.all(pc.is_finite(numbers), min_count=0).as_py():
        raise ValueError(f"{what}: expected finite numbers, got NaN or infinity; make them null")
    return numbers


def _grouped(table: pa.Table, keys: Sequence[str], names: Sequence[str]) -> pa.Table:
    """Return the sums of `names` over equal `keys`."""
    sums = [_SUM + name for name in names]
    grouped = table.group_by(list(keys)).aggregate([(name, "sum") for name in sums])
    grouped = grouped.select([*keys, *(f"{name}_sum" for name in sums)])
    return grouped.rename_columns([*keys, *sums])


def _concat(tables: Sequence[pa.Table], file: str) -> pa.Table:
    kinds = {str(table.schema.field(_USER).type) for table in tables}
    if len(kinds) > 1 and "large_string" in kinds:
        raise ValueError(
            f"{printable(file)}: users are text in some files and integers in others; write them "
            "as one type"
        )
    return pa.concat_tables(tables, promote_options="permissive")


def _empty(names: Sequence[str]) -> pa.Table:
    fields = {_USER: pa.int64(), _ARM: pa.large_string(), _DAY: pa.large_string()}
    return pa.schema(
        [*fields.items(), *((_SUM + name, pa.float64()) for name in names)]
    ).empty_table()


def _leave_out(totals: UserTotals, reason: str, rows: int) -> None:
    if rows:
        totals.left_out[reason] = totals.left_out.get(reason, 0) + rows


def _count(mask: pa.Array) -> int:
    return pc.sum(mask, min_count=0).as_py() or 0

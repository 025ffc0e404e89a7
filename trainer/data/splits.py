# SPDX-License-Identifier: MIT
"""Which rows train and which rows test: ranges of days, shares of rows, and a check for overlap."""

from __future__ import annotations

import datetime
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

# Runs of days that a message shows before it counts the rest.
_SHOWN = 6


class Rows(Protocol):
    """The part of `trainer.data.files.LogFile` that splits use."""

    @property
    def path(self) -> str: ...  # noqa: D102
    @property
    def day(self) -> str: ...  # noqa: D102
    @property
    def row_group_rows(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def row_group_starts(self) -> tuple[int, ...]: ...  # noqa: D102


def parse_days(text: str, name: str = "days") -> tuple[str, str] | None:
    """Return the first and last day of 'FIRST:LAST' or 'DAY', or None for an empty text.

    Raises:
        ValueError: not of that form, not a day of the calendar, or the last is before the first.
    """
    if not text:
        return None
    first, _, last = text.partition(":")
    days = (first, last or first)
    if not all(_date(day) for day in days):
        raise ValueError(
            f"{name}: expected FIRST:LAST or DAY with days as YYYY-MM-DD, got {text!r}"
        )
    if days[1] < days[0]:
        raise ValueError(f"{name}: the last day is before the first, got {text!r}; swap them")
    return days


def parse_rows(text: str, name: str = "rows") -> tuple[float, float]:
    """Return the shares (from, to) of 'FROM:TO', both in [0, 1]; (0, 1) for an empty text.

    Raises:
        ValueError: not of that form.
    """
    if not text:
        return 0.0, 1.0
    first, _, last = text.partition(":")
    try:
        shares = float(first or 0), float(last or 1)
    except ValueError:
        shares = (1.0, 0.0)
    if not 0 <= shares[0] < shares[1] <= 1:
        raise ValueError(f"{name}: expected FROM:TO with 0 <= FROM < TO <= 1 (0:0.8), got {text!r}")
    return shares


def days_within(days: Iterable[str], *ranges: tuple[str, str] | None) -> tuple[str, ...]:
    """Return those of `days` that lie in every range (first, last); None is every day."""
    within = [one for one in ranges if one]
    return tuple(day for day in days if day and all(first <= day <= last for first, last in within))


def describe_days(days: Iterable[str]) -> str:
    """Return days as ranges: '2026-01-01 to 2026-01-28, 2026-02-03'.

    The middle of a long list is left out. Names that are no days appear unchanged.
    """
    runs: list[list[str]] = []
    for day in sorted(set(days)):
        date = _date(day)
        before = _date(runs[-1][-1]) if runs else None
        if date and before and date - before == datetime.timedelta(days=1):
            runs[-1].append(day)
        else:
            runs.append([day])
    texts = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    if len(texts) > _SHOWN:
        left_out = sum(len(run) for run in runs[_SHOWN // 2 : -_SHOWN // 2])
        texts = [*texts[: _SHOWN // 2], f"{left_out} days more", *texts[-_SHOWN // 2 :]]
    return ", ".join(texts)


def check_overlap(
    train: Sequence[Rows], test: Sequence[Rows], names: tuple[str, str] = ("train", "test")
) -> None:
    """Refuse test rows that are training rows too: metrics on them do not measure generalisation.

    Args:
        train: the files that train, with their wanted rows.
        test: the files that test, with their wanted rows.
        names: what settings call the two: train, validation or test.

    Raises:
        ValueError: there are such rows; the message has their number and days.
    """
    trained: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for file in train:
        for group, start, stop in _intervals(file):
            trained[os.path.realpath(file.path), group].append((start, stop))
    shared: defaultdict[str, int] = defaultdict(int)
    total = 0
    for file in test:
        path = os.path.realpath(file.path)
        for group, start, stop in _intervals(file):
            total += stop - start
            for first, last in trained.get((path, group), ()):
                shared[file.day or file.path] += max(0, min(stop, last) - max(start, first))
    count = sum(shared.values())
    if count:
        places = describe_days(place for place, rows in shared.items() if rows)
        first, second = names
        sees = {"train": "training"}.get(first, first)
        raise ValueError(
            f"data: {count:,} of the {total:,} {second} rows are {sees} rows too ({places}); "
            f"expected rows that {sees} does not see: set data.{first}_days and data.{second}_days "
            f"(or {first}_rows and {second}_rows) so that they do not meet, or pass "
            "--data.allow-overlap to use them all the same"
        )


def _intervals(file: Rows) -> list[tuple[int, int, int]]:
    """Return (row group, first row, row after the last) of each wanted part of a file."""
    starts = file.row_group_starts or (0,) * len(file.row_group_rows)
    pairs = zip(starts, file.row_group_rows, strict=True)
    return [(group, start, start + rows) for group, (start, rows) in enumerate(pairs)]


def _date(text: str) -> datetime.date | None:
    """Return the day of 'YYYY-MM-DD', or None."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        return None
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None

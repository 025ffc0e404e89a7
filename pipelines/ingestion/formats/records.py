# SPDX-License-Identifier: MIT
"""Delimited text cut into records by RFC 4180, at any block size, with every line accounted for.

Parsers of CSV trust every quote: one that is opened by mistake takes all lines up to the next one
along, and no count shows it. Here a quoted field must be plausible: closed before a delimiter or a
line's end, within a number of bytes and lines, and not made of lines that each look like a row. A
line whose quoting is not plausible is bad by itself, and reading goes on with the next line.

Whole blocks are checked at once with NumPy; only blocks that hold an irregular quote are walked
through, and of these only the irregular lines.

Shapes: N lines, Q quotes of a block.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_CR, _LF, _QUOTE = 13, 10, 34
_QUOTED = re.compile(rb'"[^"]*+(?:""[^"]*+)*+"')
_SHOWN = 1_000
# What a line of a block is.
_FIRST, _MORE, _BAD, _BLANK = range(4)
FILLED = np.ones(256, np.uint8)  # what is not blank; a control character is not blank either
FILLED[list(b" \t\r\n")] = 0


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How records are written.

    Args:
        delimiter: the byte between columns.
        has_quotes: whether a quote at the start of a field opens it.
        columns: the number of columns of a row.
        max_field_bytes: bytes of a quoted field beyond which it is implausible.
        max_field_lines: lines of one beyond which it is.
        doubts_rows: whether a record is bad whose lines each have the columns of a row.
        max_line_bytes: bytes of a line beyond which it is not read.
        skips_spaces: whether a line of nothing but spaces is blank.
    """

    delimiter: int
    has_quotes: bool
    columns: int
    max_field_bytes: int
    max_field_lines: int
    doubts_rows: bool
    max_line_bytes: int
    skips_spaces: bool = False

    @classmethod
    def of_lines(cls, max_line_bytes: int) -> Dialect:
        """Return how text is written whose every line is a record: no quote goes over lines."""
        return cls(
            delimiter=0,
            has_quotes=False,
            columns=1,
            max_field_bytes=max_line_bytes,
            max_field_lines=1,
            doubts_rows=False,
            max_line_bytes=max_line_bytes,
            skips_spaces=True,
        )


@dataclass
class Records:
    """The records of a block.

    Args:
        text: the good records, whole.
        numbers: (B,) the positions of the good records in the file.
        malformed: (position, what is wrong, text) of the bad lines.
    """

    text: bytes | memoryview
    numbers: NDArray[np.int64]
    malformed: list[tuple[int, str, str]] = field(default_factory=list)


class Cutter:
    """Cuts blocks of a file into records, in order."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.saw_quote = False
        self._rest = b""
        self._position = 0
        self._is_skipping = False
        self._unquoted = re.compile(rb"[^\r\n" + re.escape(bytes([dialect.delimiter])) + rb"]*+")

    def cut(self, block: bytes, *, is_last: bool) -> Records:
        """Return the records that end in `block`; the rest waits for the next block."""
        data, malformed = self._rest + block, []
        if self._is_skipping:
            data = self._after_long_line(data)
        if is_last and data and data[-1:] not in (b"\n", b"\r"):
            data += b"\n"
        array = np.frombuffer(data, np.uint8)
        ends = line_ends(array, is_last=is_last)
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
        kinds = np.full(len(ends), _FIRST, np.int8)
        kinds[(ends == starts) | ((ends - starts == 1) & (array[starts] == _CR))] = _BLANK
        if self.dialect.skips_spaces and len(ends):
            stop = int(ends[-1]) + 1
            kinds[~filled_lines(array[:stop], starts)] = _BLANK
        whys: dict[int, str] = {}
        used = len(ends)
        self.saw_quote |= b'"' in data
        if self.dialect.has_quotes and b'"' in data:
            lines = _Lines(data, array, starts, ends)
            used = self._quoted(lines, kinds, whys, is_last)
        stop = int(ends[used - 1]) + 1 if used else 0
        self._rest = data[stop:]
        records = self._number(data, (starts[:used], ends[:used], kinds[:used]), whys)
        if len(self._rest) > self.dialect.max_line_bytes and used == len(ends):
            self._position += 1
            malformed.append((self._position, self._too_long(), _text(self._rest)))
            self._rest, self._is_skipping = b"", True
        records.malformed += malformed
        return records

    def _after_long_line(self, data: bytes) -> bytes:
        """Return what follows the line that is passed over, nothing if it goes on."""
        found = re.search(rb"\r\n?|\n", data)
        if found is None:
            return b""
        self._is_skipping = False
        return data[found.end() :]

    def _number(
        self,
        data: bytes,
        lines: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]],
        whys: dict[int, str],
    ) -> Records:
        """Give records and bad lines their positions, and join the good lines."""
        starts, ends, kinds = lines
        counted = (kinds == _FIRST) | (kinds == _BAD)
        positions = self._position + np.cumsum(counted)
        self._position += int(counted.sum())
        bad = np.flatnonzero(kinds == _BAD)
        malformed = [
            (int(positions[line]), whys[line], _text(data[starts[line] : ends[line]]))
            for line in bad.tolist()
        ]
        cuts = np.concatenate([[-1], bad, [len(kinds)]])
        view = memoryview(data)
        pieces = [
            view[starts[first + 1] : ends[last - 1] + 1]
            for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
            if last > first + 1
        ]
        text = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Records(text, positions[kinds == _FIRST], malformed)

    def _quoted(
        self, lines: _Lines, kinds: NDArray[np.int8], whys: dict[int, str], is_last: bool
    ) -> int:
        """Say what each line is where quotes count; return how many lines are decided."""
        if not len(lines.ends):
            return 0
        used = self._regular(lines, kinds, is_last)
        return self._walk(lines, kinds, whys, is_last) if used is None else used

    def _regular(self, lines: _Lines, kinds: NDArray[np.int8], is_last: bool) -> int | None:
        """Cut a block whose quotes are all regular; return the lines cut, None if any is not."""
        dialect, quotes = self.dialect, lines.quotes
        if not lines.are_regular(np.arange(len(quotes)), dialect.delimiter).all():
            return None
        inside = np.searchsorted(quotes, lines.ends) % 2 == 1  # (N,) line ends inside quotes
        last = np.flatnonzero(~inside)  # (R,) the last line of each record
        used = int(last[-1]) + 1 if len(last) else 0
        if used < len(kinds):
            waiting = len(lines.data) - int(lines.starts[used])
            if (
                is_last
                or waiting > dialect.max_field_bytes
                or len(kinds) - used > dialect.max_field_lines
            ):
                return None
        first = np.concatenate([[0], last[:-1] + 1])[: len(last)]
        sizes = last - first + 1
        if (sizes > 1).any():
            doubtful = sizes > dialect.max_field_lines
            doubtful |= lines.ends[last] - lines.starts[first] > dialect.max_field_bytes
            if dialect.doubts_rows and dialect.columns > 1:
                found = np.flatnonzero(lines.array == dialect.delimiter)
                bounds = np.append(lines.starts[:used], lines.ends[used - 1])
                delimiters = np.diff(np.searchsorted(found, bounds))  # (N,) of each line
                doubtful |= np.logical_and.reduceat(delimiters == dialect.columns - 1, first)
            if (doubtful & (sizes > 1)).any():
                return None
        kinds[1:][inside[:-1]] = _MORE  # blank lines inside quotes are text
        return used

    def _walk(
        self, lines: _Lines, kinds: NDArray[np.int8], whys: dict[int, str], is_last: bool
    ) -> int:
        """Cut a block with irregular quotes, irregular line by irregular line."""
        irregular = lines.irregular(self.dialect.delimiter)
        line, count = 0, len(kinds)
        while line < count:
            place = bisect.bisect_left(irregular, line)
            if place == len(irregular):
                return count
            line = irregular[place]
            size, why = self._record(lines, line, is_last)
            if not size and not why:
                if len(lines.data) - int(lines.starts[line]) <= self.dialect.max_line_bytes:
                    return line  # its end is in a later block
                why = self._too_long()
            if why:
                kinds[line], whys[line] = _BAD, why
                line += 1
            else:
                kinds[line] = _FIRST
                kinds[line + 1 : line + size] = _MORE
                line += size
        return count

    def _record(self, lines: _Lines, line: int, is_last: bool) -> tuple[int, str]:
        """Return of how many lines the record at `line` is, or why the line is bad.

        (0, "") where the block ends before the record does.
        """
        dialect, data = self.dialect, lines.data
        position, end = int(lines.starts[line]), len(data)
        while True:
            if data[position : position + 1] == b'"':
                found = _QUOTED.match(data, position, position + dialect.max_field_bytes + 2)
                if found is None or found.end() >= end:
                    is_over = end - position > dialect.max_field_bytes + 2
                    if is_over or is_last or len(lines.ends) - line > dialect.max_field_lines:
                        return 0, self._unclosed()
                    return 0, ""
                position = found.end()
                if data[position] not in (dialect.delimiter, _CR, _LF):
                    return 0, "text follows the quote that closes a field"
            else:
                found = self._unquoted.match(data, position)
                position = found.end() if found else position
            if position >= end:
                return 0, ""
            if data[position] != dialect.delimiter:
                break
            position += 1
        last = int(np.searchsorted(lines.ends, position))
        if last >= len(lines.ends):
            return 0, ""
        size = last - line + 1
        if size > dialect.max_field_lines:
            return 0, self._unclosed()
        if size > 1 and dialect.doubts_rows and self._like_rows(lines, line, last):
            return 0, f"a quoted field takes {size - 1} lines along that look like rows"
        return size, ""

    def _unclosed(self) -> str:
        limits = f"{self.dialect.max_field_bytes:,} bytes, {self.dialect.max_field_lines:,} lines"
        return f"a quote opens a field and does not close it within {limits}"

    def _too_long(self) -> str:
        return f"a row longer than {self.dialect.max_line_bytes:,} bytes"

    def _like_rows(self, lines: _Lines, first: int, last: int) -> bool:
        """Return whether each of the lines has as many delimiters as a row."""
        wanted, delimiter = self.dialect.columns - 1, bytes([self.dialect.delimiter])
        bounds = zip(lines.starts[first : last + 1], lines.ends[first : last + 1], strict=True)
        return wanted > 0 and all(
            lines.data.count(delimiter, start, end) == wanted for start, end in bounds
        )


class _Lines:
    """The lines of a block: (N,) positions of their first and last bytes, and (Q,) quotes."""

    def __init__(
        self,
        data: bytes,
        array: NDArray[np.uint8],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        self.data, self.array, self.starts, self.ends = data, array, starts, ends
        stop = int(ends[-1]) + 1 if len(ends) else 0
        self.quotes = np.flatnonzero(array[:stop] == _QUOTE)

    def are_regular(self, order: NDArray[np.int64], delimiter: int) -> NDArray[np.bool_]:
        """Return (Q,) whether quotes open and close fields, or are doubled, as RFC 4180 has it.

        order: (Q,) the number of each quote since a place that is outside of quotes; even ones
            open, odd ones close.
        """
        array, quotes = self.array, self.quotes
        before = np.where(quotes > 0, array[quotes - 1], _LF)
        after = array[quotes + 1]  # a line's end follows the last quote of a line
        doubled = np.diff(quotes) == 1
        opens = _ends_field(before, delimiter) | np.append([False], doubled)[: len(quotes)]
        closes = _ends_field(after, delimiter) | np.append(doubled, [False])[: len(quotes)]
        return np.where(order % 2 == 0, opens, closes)

    def irregular(self, delimiter: int) -> list[int]:
        """Return the lines that are not a record by themselves with regular quotes."""
        first = np.searchsorted(self.quotes, self.starts)
        counts = np.searchsorted(self.quotes, self.ends) - first
        line_of = np.repeat(np.arange(len(counts)), counts)
        order = np.arange(len(self.quotes)) - np.repeat(first, counts)
        wrong = np.bincount(line_of, ~self.are_regular(order, delimiter), len(counts)) > 0
        return np.flatnonzero(wrong | (counts % 2 == 1)).tolist()


def _ends_field(values: NDArray[np.uint8], delimiter: int) -> NDArray[np.bool_]:
    return (values == delimiter) | (values == _LF) | (values == _CR)


def filled_lines(array: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which lines, that begin at `starts`, hold something else than blanks."""
    return np.maximum.reduceat(FILLED[array], starts) > 0


def line_ends(array: NDArray[np.uint8], *, is_last: bool) -> NDArray[np.int64]:
    """Return (N,) the last byte of each line: LF, CR LF or CR.

    A CR at the end of a block that is not the last may belong to a LF that is still to come.
    """
    ends = array == _LF
    returns = np.flatnonzero(array == _CR)
    if len(returns):
        inner = returns[returns + 1 < len(array)]
        ends[inner[array[inner + 1] != _LF]] = True
        if is_last and array[-1] == _CR:
            ends[-1] = True
    return np.flatnonzero(ends)


def _text(line: bytes) -> str:
    return line[:_SHOWN].decode("utf-8", "replace").rstrip("\r\n")

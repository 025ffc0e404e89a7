# SPDX-License-Identifier: MIT
"""What every format of raw logs offers: a source whose columns are known, and its rows in batches.

A format is one file in `pipelines/ingestion/formats/`; nothing after it knows formats.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

QUOTING = ("double", "none")
MAX_FIELD_LINES = 64


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How raw files are read.

    Args:
        format: the name of a format, or empty to go by the file's name.
        columns: the names of the columns of a CSV without header.
        delimiter: the character between columns; empty for a comma, in tab-separated files a tab.
        quoting: `double` (RFC 4180), `none` (a quote is a character like any other), or empty:
            `none` between tabs, else `double`.
        null_values: texts that count as null.
        batch_rows: rows of a Parquet batch.
        block_bytes: bytes of text that are read at once; no line may be longer.
        encoding: of text files; a byte that is none of its characters is kept as an escape such as
            \\xff, because two broken ids must not become one.
        max_field_bytes: bytes of a text field beyond which its row is bad.
        max_field_lines: lines of a quoted field beyond which its row is bad. 0: 64, and a field is
            bad, too, if each of its lines has the columns of a row.
    """

    format: str = ""
    columns: tuple[str, ...] = ()
    delimiter: str = ""
    quoting: str = ""
    null_values: tuple[str, ...] = ("", "\\N", "NULL", "null")
    batch_rows: int = 65_536
    block_bytes: int = 8 << 20
    encoding: str = "utf-8"
    max_field_bytes: int = 64 << 10
    max_field_lines: int = 0

    def __post_init__(self) -> None:
        """Check the settings by themselves."""
        if not _is_text_encoding(self.encoding):
            raise ValueError(
                "encoding: expected the name of a text encoding that Python knows and that can "
                f"keep broken bytes, got {self.encoding!r}"
            )
        if self.quoting not in ("", *QUOTING):
            raise ValueError(f"quoting: expected one of {list(QUOTING)}, got {self.quoting!r}")
        if self.delimiter and not (
            len(self.delimiter) == 1 and self.delimiter.isascii() and self.delimiter not in '"\r\n'
        ):
            raise ValueError(
                "delimiter: expected one ASCII character that is no quote and ends no line, got "
                f"{self.delimiter!r}"
            )
        for name, least in (("block_bytes", 1), ("max_field_bytes", 1), ("max_field_lines", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")


def _is_text_encoding(name: str) -> bool:
    """Return whether text of this encoding can be read a block at a time.

    Python knows others by name as well: from text to text (rot13), from bytes to bytes (zip), and
    some that cannot keep a byte which is no text (idna).
    """
    try:
        decoder = codecs.getincrementaldecoder(name)("backslashreplace")
        return isinstance(decoder.decode(b"") + decoder.decode(b"", final=True), str)
    except (LookupError, ValueError, TypeError, AssertionError):
        return False


@dataclass
class RawRows:
    """B rows of one file.

    Args:
        records: the rows that have the file's columns.
        numbers: (B,) their positions in the file; the first data row is 1.
        malformed: (number, what is wrong, text) of the rows between these that cannot be read.
        doubts: (column, (B,) mask, what is wrong) of rows among `records` that are implausible.
    """

    records: pa.RecordBatch
    numbers: NDArray[np.int64]
    malformed: list[tuple[int, str, str]] = field(default_factory=list)
    doubts: list[tuple[str, NDArray[np.bool_], str]] = field(default_factory=list)


class Source(Protocol):
    """One raw file, opened.

    Attributes: path; is_text, whether values are text that the schema gives a type; schema, the
    columns' names and types; notes, what a user should know of how the file was read.
    """

    path: str
    is_text: bool
    schema: pa.Schema
    notes: list[str]

    def rows(self, columns: list[str]) -> Iterator[RawRows]:
        """Yield all rows in order, with `columns` only (all of which the file must have).

        Raises:
            ValueError: the file is damaged; it is named.
        """
        ...


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

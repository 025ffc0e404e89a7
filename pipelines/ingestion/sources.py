# SPDX-License-Identifier: MIT
"""Raw logs as record batches that know their rows' numbers, in bounded memory.

CSV and TSV columns are read as text, without Arrow's type guess, which looks at the first block
only; what they become is decided by the schema. Parquet is read with `iter_batches`, because
`dataset.to_batches` keeps what it has read.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.checkpoint.storage import Folder, locate

_PARQUET = (".parquet", ".parq", ".pq")
_TSV = (".tsv", ".tsv.gz", ".tsv.zst", ".tsv.bz2")
_TAKEN = "inside a quote that a row before opened"
# Malformed rows in a row, beyond which they are no longer taken for exceptions.
_MOST_WAITING = 1_000_000
_HEAD_BYTES = 64 << 10
_TEXT = (".csv", ".csv.gz", ".csv.zst", ".csv.bz2", ".txt", ".txt.gz", *_TSV)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """How raw files are read.

    format: `csv`, `tsv`, `parquet`, or empty to go by the file's name. columns: the names of the
    columns of a CSV without header. batch_rows: rows of a Parquet batch. block_bytes: bytes of a
    CSV block; no row may be longer. encoding: of text files; a byte that is none of its characters
    is kept as an escape such as \\xff, because two broken ids must not become one.
    """

    format: str = ""
    columns: tuple[str, ...] = ()
    delimiter: str = ""
    null_values: tuple[str, ...] = ("", "\\N", "NULL", "null")
    batch_rows: int = 65_536
    block_bytes: int = 8 << 20
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        """Check the format, the delimiter and the encoding."""
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise ValueError(f"encoding: expected a known name, got {self.encoding!r}") from error
        if self.format not in ("", "csv", "tsv", "parquet"):
            raise ValueError(f"format: expected csv, tsv or parquet, got {self.format!r}")
        if self.delimiter and len(self.delimiter) != 1:
            raise ValueError(f"delimiter: expected one character, got {self.delimiter!r}")

    def build(self, path: str) -> Source:
        """Open one raw file. See `Source` for what is raised."""
        return Source(path, self)


@dataclass
class RawRows:
    """B rows of one file. numbers: (B,) positions in the file, the first data row is 1.

    malformed: (number, what is wrong, text) of the rows before the last of these that have another
    number of columns, and are not among these.
    """

    records: pa.RecordBatch
    numbers: NDArray[np.int64]
    malformed: list[tuple[int, str, str]] = field(default_factory=list)


class Source:
    """One raw file, its columns known, its rows not read yet.

    Raises:
        ValueError: the file is empty, or is not what `config.format` or its name says it is.
    """

    def __init__(self, path: str, config: SourceConfig) -> None:
        self.path, self.config = path, config
        self.is_text = _format(path, config) != "parquet"
        self._check_magic()
        if not self.is_text and config.columns:
            raise ValueError(f"{path}: --columns names the columns of a CSV; Parquet has its own")
        self.schema = self._read_schema()

    def rows(self, columns: list[str]) -> Iterator[RawRows]:
        """Yield the rows in order, with `columns` only (all of which the file must have)."""
        try:
            yield from self._text_rows(columns) if self.is_text else self._parquet_rows(columns)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path}: {_first_line(error)}{self._way_out(error)}") from error

    def _open(self) -> Any:
        """Open the file; pyarrow opens what lies on a disk itself, and without Python's lock."""
        place = locate(self.path)
        return self.path if isinstance(place, Path) else place.open("rb")

    def _check_magic(self) -> None:
        with locate(self.path).open("rb") as file:
            first = file.read(4)
        if not first:
            raise ValueError(f"{self.path}: expected rows, got an empty file (0 bytes)")
        is_parquet = first == b"PAR1"
        if self.is_text and is_parquet:
            raise ValueError(
                f"{self.path}: expected text, got a Parquet file; use --format parquet"
            )
        if not self.is_text and not is_parquet:
            raise ValueError(
                f"{self.path}: expected a Parquet file, got something else (it does not begin with "
                "PAR1); use --format csv if it is text"
            )

    def _read_schema(self) -> pa.Schema:
        try:
            if self.is_text:
                return pa.schema([(name, pa.string()) for name in self._text_names()])
            with pq.ParquetFile(self._open()) as file:
                return file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            what = "CSV" if self.is_text else "Parquet"
            raise ValueError(
                f"{self.path}: cannot be read as {what}: {_first_line(error)}{self._way_out(error)}"
            ) from error

    def _text_names(self) -> list[str]:
        """Return the columns' names, from few bytes where the first rows fit into them."""
        try:
            with self._open_text([], [], min(_HEAD_BYTES, self.config.block_bytes)) as reader:
                return reader.schema.names
        except pa.ArrowInvalid:
            with self._open_text([], []) as reader:
                return reader.schema.names

    def _parquet_rows(self, columns: list[str]) -> Iterator[RawRows]:
        first = 1
        with pq.ParquetFile(self._open()) as file:
            for records in file.iter_batches(self.config.batch_rows, columns=columns):
                numbers = np.arange(first, first + records.num_rows)
                first += records.num_rows
                yield RawRows(records.select(columns), numbers)

    def _text_rows(self, columns: list[str]) -> Iterator[RawRows]:
        malformed: list[tuple[int, str, str]] = []
        seen = reported = 0
        with self._open_text(columns, malformed) as reader:
            for records in reader:
                # Arrow parses ahead in a thread of its own: how far `malformed` reaches by now is
                # chance, but it holds all that stands before this block's last row.
                known = list(malformed)
                heads = [index for index, one in enumerate(known) if one[1] != _TAKEN]
                waiting = np.array([known[index][0] for index in heads], np.int64)
                before = waiting - 1 - reported - np.arange(len(waiting))  # good rows before each
                good = np.arange(seen, seen + records.num_rows)
                numbers = good + 1 + reported + np.searchsorted(before, good, side="right")
                seen += records.num_rows
                ready = int(np.searchsorted(before, seen))
                reported += ready
                cut = heads[ready] if ready < len(heads) else len(known)
                del malformed[:cut]
                yield RawRows(records, numbers, known[:cut])
            if malformed:
                nothing = pa.RecordBatch.from_pylist([], reader.schema)
                yield RawRows(nothing, np.empty(0, np.int64), malformed)

    def _open_text(
        self, columns: list[str], malformed: list[tuple[int, str, str]], block_bytes: int = 0
    ) -> csv.CSVStreamingReader:
        header_rows = 0 if self.config.columns else 1

        def skip(row: csv.InvalidRow) -> str:
            what = f"{row.actual_columns} columns, expected {row.expected_columns}"
            # A quote that is never closed takes whole lines along: each is a row that is lost.
            lines = row.text.splitlines() or [""]
            if len(lines) > 1:
                what += f"; with {len(lines) - 1} more lines, as a quote in it is not closed"
            number = row.number - header_rows
            reasons = [what] + [_TAKEN] * (len(lines) - 1)
            malformed.extend([(number, *pair) for pair in zip(reasons, lines, strict=True)])
            # Arrow looks for a good row before it yields anything, to the end of the file.
            return "skip" if len(malformed) <= _MOST_WAITING else "error"

        decoder = codecs.getincrementaldecoder(self.config.encoding)("backslashreplace")

        def to_utf8(chunk: pa.Buffer) -> bytes:
            return decoder.decode(bytes(chunk)).encode()

        raw = pa.input_stream(self._open(), compression=_compression(self.path))
        return csv.open_csv(
            pa.TransformInputStream(raw, to_utf8),
            # Row numbers are known to a single parser only.
            csv.ReadOptions(
                use_threads=False,
                block_size=block_bytes or self.config.block_bytes,
                column_names=list(self.config.columns) or None,
            ),
            csv.ParseOptions(delimiter=self._delimiter(), invalid_row_handler=skip),
            csv.ConvertOptions(
                check_utf8=False,  # to_utf8 has seen to it
                column_types=dict.fromkeys(columns, pa.string()),
                include_columns=columns or None,
                null_values=list(self.config.null_values),
                strings_can_be_null=True,
                auto_dict_encode=False,
            ),
        )

    def _delimiter(self) -> str:
        tabs = _format(self.path, self.config) == "tsv"
        return self.config.delimiter or ("\t" if tabs else ",")

    def _way_out(self, error: Exception) -> str:
        text = str(error)
        if "straddling" in text:
            return f" (a row is longer than {self.config.block_bytes} bytes, or a quote never ends)"
        if "Expected" in text and "columns" in text:
            return f" (so have {_MOST_WAITING:,} rows; are --delimiter and --columns right?)"
        return ""


def list_sources(sources: list[str], format_: str = "") -> list[str]:
    """Return the files that files, folders, URLs and globs stand for, each once, by name.

    In folders, names that begin with '.' or '_' are passed over, and without `format_` also names
    that belong to no format.

    Raises:
        ValueError: a source is or holds no file.
    """
    found: dict[str, str] = {}
    for source in sources:
        path = Path(source)
        if "://" in source:
            root = locate(source)
            inside = [source] if root.is_file() else list(_remote(root, format_))
        elif path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if _is_log(file, path, format_)]
        elif path.exists():
            inside = [path]
        else:
            inside = [Path(name) for name in sorted(glob.glob(source, recursive=True))]
            inside = [file for file in inside if file.is_file()]
        if not inside:
            raise ValueError(f"{source}: expected a file, a folder of logs or a glob, got no file")
        for file in inside:
            found.setdefault(str(file) if "://" in source else os.path.abspath(file), str(file))
    return list(found.values())


def _remote(folder: Folder, format_: str) -> Iterator[str]:
    """Yield the logs below a URL, by name."""
    for path in sorted(folder.iterdir(), key=str) if folder.is_dir() else ():
        if path.name.startswith((".", "_")):
            continue
        if path.is_dir():
            yield from _remote(path, format_)
        elif format_ or path.name.endswith(_PARQUET + _TEXT):
            yield str(path)


def _compression(path: str) -> str | None:
    """Return what a file is compressed with by its name, None for nothing."""
    try:
        return pa.Codec.detect(path).name
    except (ValueError, TypeError):  # Arrow's own answer for a name without compression
        return None


def _is_log(file: Path, root: Path, format_: str) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    return file.is_file() and not hidden and bool(format_ or file.name.endswith(_PARQUET + _TEXT))


def _format(path: str, config: SourceConfig) -> str:
    if config.format:
        return config.format
    if path.endswith(_PARQUET):
        return "parquet"
    if path.endswith(_TSV):
        return "tsv"
    if path.endswith(_TEXT):
        return "csv"
    raise ValueError(
        f"{path}: its name tells no format ({', '.join(_PARQUET + _TEXT)}); say --format"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

# SPDX-License-Identifier: MIT
"""One Parquet file of scores: chosen columns of the log as they are, probabilities, vectors.

Columns of the log are read beside the loader, in the order of its batches, and joined by position.

Shapes: B examples, K tasks, D width of a vector.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.schema.plain import suggest
from embeddings.schema.schema import Schema
from trainer.data.discovery import openable
from trainer.data.files import LogFile
from trainer.data.loader import Loader
from trainer.data.reader import ColumnReader
from trainer.runtime.printable import printable

VERSION = "model_version"
VECTOR_COLUMNS = {name: f"{name}_vector" for name in ("representation", "item", "user")}
_GROUP_ROWS = 65_536
_ROWS = b"fullrank.rows"  # of a file's metadata: the fingerprint of the rows it was made of


def default_columns(schema: Schema, files: Sequence[LogFile]) -> tuple[str, ...]:
    """Return the columns of single ids that all files have."""
    wanted = dict.fromkeys(one.column for one in schema.sparse if one.kind == "id")
    for file in files:
        names = pq.read_schema(openable(file.path)).names
        wanted = {name: None for name in wanted if name in names}
    return tuple(wanted)


def scored_rows(folder: Path) -> str:
    """Return the fingerprint of the rows that the scores in a day's folder were made of.

    Raises:
        OSError, ValueError: its first file cannot be read, or has none.
    """
    try:
        held = pq.read_schema(folder / "part-00000.parquet").metadata
        return held[_ROWS].decode("ascii")
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: expected scores of `trainer.score`, got none") from error


class ScoredFile:
    """Writes the scores of this rank's rows; use it as a context.

    Args:
        path: of the new file.
        loader: of the rows, in the log's order.
        columns: of the log, passed through.
        tasks: names of the K labels.
        version: of the model.

    Raises:
        ValueError: a column is not in the log, has different types in its files, or has the name
            of one that is written.
    """

    def __init__(
        self, path: Path, loader: Loader, columns: Sequence[str], tasks: Sequence[str], version: str
    ) -> None:
        self._path, self._tasks, self._version = path, tasks, version
        self._names = [f"{task}_probability" for task in tasks]
        self._passed = _passed_fields(loader.files, columns)
        clash = {*self._passed.names} & {*self._names, *VECTOR_COLUMNS.values(), VERSION}
        if clash:
            raise ValueError(
                f"--columns: {min(clash)!r} is the name of a column of scores; rename it in the "
                "log or leave it out"
            )
        self._made_of = loader.fingerprint
        self._reader = ColumnReader(loader.schema, self._passed.names)
        self._rows = _rows(self._reader, loader)
        self._rest: pa.RecordBatch | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> ScoredFile:
        """Return the file."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what is left, and wait until it is on the disk; after an error, close the file."""
        if kind is not None:
            if self._writer is not None:
                self._writer.close()
            self._reader.close()
            return
        if self._writer is None and not self._waiting:
            self._waiting.append(self._batch(np.empty((0, len(self._tasks)), np.float32), {}))
        self._flush()
        if self._writer is not None:
            self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        self._reader.close()

    def add(self, probabilities: np.ndarray, vectors: Mapping[str, np.ndarray]) -> None:
        """Append the next B rows.

        Args:
            probabilities: (B, K) float32.
            vectors: (B, D) float32 by name; the same names in every call.
        """
        # A rank without rows still writes every column, so that a day's files read as one.
        if len(probabilities) or (self._writer is None and not self._waiting):
            self._waiting.append(self._batch(probabilities, vectors))
            if sum(one.num_rows for one in self._waiting) >= _GROUP_ROWS:
                self._flush()

    def _batch(
        self, probabilities: np.ndarray, vectors: Mapping[str, np.ndarray]
    ) -> pa.RecordBatch:
        rows = len(probabilities)
        arrays: list[Any] = self._take(rows)
        arrays += [pa.array(column) for column in np.ascontiguousarray(probabilities.T)]
        names = [*self._passed.names, *self._names]
        for name, matrix in vectors.items():
            flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1]))
            names.append(VECTOR_COLUMNS[name])
        one = pa.array(np.zeros(rows, np.int32))
        arrays.append(pa.DictionaryArray.from_arrays(one, pa.array([self._version])))
        return pa.RecordBatch.from_arrays(arrays, [*names, VERSION])

    def _take(self, rows: int) -> list[pa.Array]:
        """Return the next rows of the columns that are passed through."""
        if not self._passed.names:
            return []
        parts: list[pa.RecordBatch] = []
        while rows:
            part = self._rest if self._rest is not None else next(self._rows)
            parts.append(part.slice(0, rows))
            self._rest = part.slice(rows) if part.num_rows > rows else None
            rows -= parts[-1].num_rows
        table = pa.Table.from_batches([one.cast(self._passed) for one in parts], self._passed)
        return [
            one.combine_chunks() if one.num_chunks else pa.array([], one.type)
            for one in table.columns
        ]

    def _flush(self) -> None:
        """Write the rows that wait as one row group."""
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting = []
        if self._writer is None:
            schema = table.schema.with_metadata({_ROWS: self._made_of})
            self._writer = pq.ParquetWriter(
                self._path, schema, compression="zstd", write_page_checksum=True
            )
        self._writer.write_table(table.replace_schema_metadata({_ROWS: self._made_of}))


def _rows(reader: ColumnReader, loader: Loader) -> Iterator[pa.RecordBatch]:
    for interval in loader.intervals():
        yield from reader.read(interval)


def _passed_fields(files: Sequence[LogFile], columns: Sequence[str]) -> pa.Schema:
    """Return names and types of the columns to pass through, the same in all files."""
    found: dict[str, tuple[pa.DataType, str]] = {}
    for file in files:
        held = pq.read_schema(openable(file.path))
        for name in columns:
            if held.names.count(name) != 1:
                raise ValueError(
                    f"--columns: {printable(file.path)}: expected one column {name!r}, got "
                    f"{held.names.count(name)}{suggest(name, held.names)}; columns: {held.names}"
                )
            type_ = held.field(name).type
            first, path = found.setdefault(name, (type_, file.path))
            if first != type_:
                raise ValueError(
                    f"--columns: {name!r} is {type_} in {printable(file.path)} and {first} in "
                    f"{printable(path)}; leave it out, or write one of the files again"
                )
    return pa.schema([pa.field(name, type_) for name, (type_, _) in found.items()])

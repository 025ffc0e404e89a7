# SPDX-License-Identifier: MIT
"""Rows of Parquet row groups, streamed forward in uniform types.

`LogReader` decodes a few thousand rows at a time through `ParquetFile.iter_batches`. So memory
stays flat however large a row group or a log is; scanners that read ahead accumulate memory.

Each column that it yields has one type, whatever the file's type. Text is hashed to int64, ids of
any width are int64, other numbers are float64, times are int64 milliseconds. So rows of different
files can be concatenated without a promotion that changes ids, and they are cheap to permute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.schema.schema import Schema
from trainer.data.columns import RowError, is_list, kind_of, read_lists, to_integers, uses
from trainer.data.discovery import openable, printable
from trainer.data.files import RowInterval

_CHUNK_ROWS = 16_384  # decoded at a time
_READ_AHEAD_BYTES = 1 << 20  # of a column chunk; without it a whole column chunk is held in memory


class LogReader:
    """Reads intervals of rows forward; keeps the last row group open at its current position.

    An interval that begins later in the open row group is reached by decoding the rows between. An
    interval that begins before the current position opens the row group again.

    Args:
        schema: the columns to read.
    """

    def __init__(self, schema: Schema):
        self._columns = list(schema.columns)
        # A column that serves both as an id and as a number is kept as an integer.
        self._integers = {use.column for use in uses(schema) if "decimal" not in use.kinds}
        self._lists = {use.column for use in uses(schema) if use.is_list}
        self._file: pq.ParquetFile | None = None
        self._place = ("", -1)
        self._position = 0
        self._stream: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def read(self, interval: RowInterval) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `interval` in order, in batches of any size.

        Raises:
            ValueError: the file is damaged or has changed, or an id is not a whole number; the
                message names file and row group.
        """
        if self._place != (interval.path, interval.row_group) or interval.start < self._position:
            self._open(interval)
        while self._position < interval.stop:
            rows = self._rest if self._rest is not None else self._next(interval)
            skipped = min(max(interval.start - self._position, 0), rows.num_rows)
            taken = min(interval.stop - self._position, rows.num_rows) - skipped
            used = skipped + taken
            self._rest = rows.slice(used) if used < rows.num_rows else None
            self._position += used
            if taken:
                yield rows.slice(skipped, taken)

    def close(self) -> None:
        """Close the open file."""
        self._stream, self._rest, self._place = iter(()), None, ("", -1)
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self, interval: RowInterval) -> None:
        """Open the row group of `interval` at its first row."""
        try:
            if self._file is None or self._place[0] != interval.path:
                self.close()
                self._file = pq.ParquetFile(
                    openable(interval.path),
                    buffer_size=_READ_AHEAD_BYTES,
                    pre_buffer=False,
                    page_checksum_verification=True,  # of pages that were written with one
                )
            self._stream = self._file.iter_batches(
                batch_size=_CHUNK_ROWS,
                row_groups=[interval.row_group],
                columns=self._columns,
                use_threads=False,
            )
        except (pa.ArrowException, OSError, IndexError) as error:
            self.close()
            raise _damaged(interval, error) from error
        self._place, self._position = (interval.path, interval.row_group), 0
        self._rest = None

    def _next(self, interval: RowInterval) -> pa.RecordBatch:
        """Decode the next rows of the open row group."""
        try:
            rows = next(self._stream)
        except StopIteration:
            promised = f"it ends at row {self._position}, and row {interval.stop} was promised"
            self.close()
            raise _damaged(interval, promised) from None
        except (pa.ArrowException, OSError) as error:
            self.close()
            raise _damaged(interval, error) from error
        # Parquet also finds the field `id` of a struct `user` under the name "user.id".
        rows = rows.select(self._columns)
        if interval.start >= self._position + rows.num_rows:
            return rows  # skipped: not converted
        return self._convert(rows, interval)

    def _convert(self, rows: pa.RecordBatch, interval: RowInterval) -> pa.RecordBatch:
        """Return rows that were just decoded in uniform types."""
        names, columns = rows.schema.names, []
        for name, column in zip(names, rows.columns, strict=True):
            try:
                if name in self._lists and pa.types.is_null(column.type):
                    column = column.cast(pa.list_(pa.null()))
                columns.append(_uniform(column, name, name in self._integers))
            except RowError as error:
                row = error.row if name not in self._lists else read_lists(column).row_of(error.row)
                raise ValueError(
                    f"{error.message}, at row {self._position + row} of row group "
                    f"{interval.row_group} of {printable(interval.path)}"
                ) from error
        return pa.RecordBatch.from_arrays(columns, names)


class ColumnReader(LogReader):
    """Reads intervals of rows of any columns, in the types that they have in the file.

    Args:
        schema: of the same log.
        columns: to read.
    """

    def __init__(self, schema: Schema, columns: Sequence[str]):
        super().__init__(schema)
        self._columns = list(columns)

    def _convert(self, rows: pa.RecordBatch, interval: RowInterval) -> pa.RecordBatch:
        return rows


def _damaged(interval: RowInterval, reason: object) -> ValueError:
    """Return the error that names file and row group."""
    return ValueError(
        f"{printable(interval.path)}, row group {interval.row_group}: cannot be read ({reason}); "
        "the file is damaged, or has changed since its footer was read: write it again"
    )


def _uniform(array: pa.Array, column: str, is_integer: bool) -> pa.Array:
    """Convert a column to int64 or float64, or lists of them; nulls stay nulls."""
    if is_list(array.type):
        return _with_values(array, _uniform(array.values, column, is_integer))
    kind = kind_of(array.type)
    if pa.types.is_timestamp(array.type) and array.type.unit != "ms":
        array = array.cast(pa.timestamp("ms", array.type.tz), safe=False)
    if array.type == (pa.int64() if is_integer else pa.float64()):
        return array
    if is_integer or kind in ("text", "date", "timestamp"):
        values, missing = to_integers(array, f"column {column!r}")
        return pa.array(values, mask=missing)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    return array.cast(pa.float64(), safe=False)


def _with_values(lists: pa.Array, values: pa.Array) -> pa.Array:
    """Return the same lists, with the same nulls, over other values; always of type list."""
    if pa.types.is_fixed_size_list(lists.type):
        size = lists.type.list_size
        starts = np.arange(lists.offset, lists.offset + len(lists) + 1, dtype=np.int32) * size
        offsets = pa.array(starts)
    else:
        offsets = lists.offsets.cast(pa.int32())
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(offsets, values, mask=mask)

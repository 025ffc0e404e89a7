# SPDX-License-Identifier: MIT
"""Text with a delimiter between columns: CSV (RFC 4180) and tab-separated dumps.

Columns are read as text, without Arrow's type guess, which looks at the first block only; what they
become is decided by the schema. `records.py` cuts blocks into whole records, so that Arrow parses
each block by itself and no row depends on where a block ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from pipelines.ingestion.formats.records import Cutter, Dialect, Records
from pipelines.ingestion.formats.streams import check_text, read_text, with_last
from pipelines.ingestion.parsing import pc
from pipelines.ingestion.source import MAX_FIELD_LINES, RawRows, SourceConfig, first_line
from trainer.data.discovery import printable

_HEAD_BYTES = 64 << 10
_LINE = re.compile(rb"[^\r\n]*+(?:\r\n|\n|\r)")


class Delimited:
    """One file of delimited text, its columns known, its rows not read yet.

    Raises:
        ValueError: the file is empty, or is no text.
    """

    is_text = True

    def __init__(self, path: str, config: SourceConfig, delimiter: str) -> None:
        self.path, self.config = path, config
        self.notes: list[str] = []
        self._delimiter = config.delimiter or delimiter
        self._has_quotes = (config.quoting or self._usual_quoting()) == "double"
        check_text(path)
        self._header = b""
        names = list(config.columns) or self._read_names()
        self.schema = pa.schema([(name, pa.string()) for name in names])

    def rows(self, columns: list[str]) -> Iterator[RawRows]:
        """Yield the rows in order, with `columns` only."""
        cutter = Cutter(self._dialect())
        to_skip = len(self._header)
        for block, is_last in with_last(read_text(self.path, self.config)):
            part = block[to_skip:] if to_skip else block
            to_skip -= len(block) - len(part)
            records = cutter.cut(part, is_last=is_last)
            if len(records.numbers) or records.malformed:
                yield self._parse(records, columns)
        if cutter.saw_quote and not self._has_quotes and not self.config.quoting:
            self.notes.append(
                "tab-separated text: quotes are read as characters; --quoting double reads them as "
                "in CSV"
            )

    def _usual_quoting(self) -> str:
        return "none" if self._delimiter == "\t" else "double"

    def _dialect(self) -> Dialect:
        config = self.config
        return Dialect(
            delimiter=ord(self._delimiter),
            has_quotes=self._has_quotes,
            columns=len(self.schema.names),
            max_field_bytes=config.max_field_bytes,
            max_field_lines=config.max_field_lines or MAX_FIELD_LINES,
            doubts_rows=not config.max_field_lines,
            max_line_bytes=max(config.block_bytes, config.max_field_bytes),
        )

    def _read_names(self) -> list[str]:
        """Return the columns' names from the first line that is not blank."""
        head = b""
        for block, is_last in with_last(read_text(self.path, self.config)):
            head += block + (b"\n" if is_last else b"")
            found = self._first_record(head)
            if found:
                self._header, names = found
                return names
            if len(head) > max(_HEAD_BYTES, self.config.block_bytes):
                break
        raise ValueError(
            f"{printable(self.path)}: cannot be read as CSV: expected a line with the columns' "
            "names first, got none"
        )

    def _first_record(self, head: bytes) -> tuple[bytes, list[str]] | None:
        """Return the bytes up to the end of the header, and the names in it, if `head` has it."""
        stop, record = 0, b""
        while found := _LINE.match(head, stop):
            stop = found.end()
            record += found[0]
            whole = not self._has_quotes or record.count(b'"') % 2 == 0
            if record.strip(b"\r\n") and whole:
                try:
                    table = csv.read_csv(pa.BufferReader(record), parse_options=self._parsing())
                except pa.ArrowException as error:
                    raise ValueError(
                        f"{printable(self.path)}: cannot be read as CSV: {first_line(error)}"
                    ) from error
                return head[:stop], table.schema.names
            if not record.strip(b"\r\n"):
                record = b""
        return None

    def _parse(self, records: Records, columns: list[str]) -> RawRows:
        """Return the records of a block as columns of text."""
        malformed = list(records.malformed)

        def skip(row: csv.InvalidRow) -> str:
            what = f"{row.actual_columns} columns, expected {row.expected_columns}"
            number = int(records.numbers[row.number - 1])
            malformed.append((number, what, row.text.rstrip("\r\n")))
            bad.append(row.number - 1)
            return "skip"

        bad: list[int] = []
        schema = pa.schema([(name, pa.string()) for name in columns])
        if not records.text:
            return RawRows(pa.RecordBatch.from_pylist([], schema), records.numbers, malformed)
        try:
            table = csv.read_csv(
                pa.BufferReader(records.text),
                # Row numbers are known to a single parser only.
                csv.ReadOptions(
                    use_threads=False,
                    block_size=len(records.text) + 1,
                    column_names=self.schema.names,
                ),
                self._parsing(skip),
                csv.ConvertOptions(
                    check_utf8=False,  # `read_text` has seen to it
                    column_types=dict.fromkeys(columns, pa.string()),
                    include_columns=columns or None,
                    null_values=list(self.config.null_values),
                    strings_can_be_null=True,
                    auto_dict_encode=False,
                ),
            )
        except pa.ArrowException as error:
            raise ValueError(
                f"{printable(self.path)}, rows {records.numbers[0]:,} to "
                f"{records.numbers[-1]:,}: {first_line(error)}"
            ) from error
        numbers = np.delete(records.numbers, bad)
        if len(numbers) != table.num_rows:
            raise ValueError(
                f"{printable(self.path)}, rows {records.numbers[0]:,} to {records.numbers[-1]:,}: "
                f"expected {len(numbers):,} rows, the parser gave {table.num_rows:,}; write the "
                "file again, or as Parquet"
            )
        batch = table.combine_chunks().to_batches()
        found = batch[0] if batch else pa.RecordBatch.from_pylist([], table.schema)
        return RawRows(found.select(columns), numbers, malformed, self._doubts(found))

    def _doubts(self, found: pa.RecordBatch) -> list[tuple[str, np.ndarray, str]]:
        """Return the rows that have a field of implausible length."""
        doubts = []
        limit = self.config.max_field_bytes
        for name in dict.fromkeys(found.schema.names):
            lengths = pc.binary_length(found.column(found.schema.get_field_index(name)))
            if len(lengths) and (pc.max(lengths).as_py() or 0) > limit:
                mask = pc.greater(lengths, limit).fill_null(False)
                why = f"a field longer than {limit:,} bytes (--max-field-bytes)"
                doubts.append((name, mask.to_numpy(zero_copy_only=False), why))
        return doubts

    def _parsing(self, skip: object = None) -> csv.ParseOptions:
        return csv.ParseOptions(
            delimiter=self._delimiter,
            quote_char='"' if self._has_quotes else False,
            newlines_in_values=self._has_quotes,
            invalid_row_handler=skip,
        )

# SPDX-License-Identifier: MIT
"""Parquet files, read with `iter_batches`: `dataset.to_batches` keeps what it has read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.ingestion.formats.streams import open_raw
from pipelines.ingestion.source import RawRows, SourceConfig, first_line
from trainer.checkpoint.storage import locate
from trainer.data.discovery import printable


class Parquet:
    """One Parquet file.

    Raises:
        ValueError: the file is empty or not Parquet, or has names of columns from elsewhere.
    """

    is_text = False

    def __init__(self, path: str, config: SourceConfig) -> None:
        self.path, self.config = path, config
        self.notes: list[str] = []
        self._check_magic()
        if config.columns:
            raise ValueError(
                f"{printable(path)}: --columns names the columns of a CSV; Parquet has its own"
            )
        try:
            with pq.ParquetFile(open_raw(path)) as file:
                self.schema = file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{printable(path)}: cannot be read as Parquet: {first_line(error)}"
            ) from error

    def rows(self, columns: list[str]) -> Iterator[RawRows]:
        """Yield the rows in order, with `columns` only."""
        first = 1
        try:
            with pq.ParquetFile(open_raw(self.path), page_checksum_verification=True) as file:
                for records in file.iter_batches(self.config.batch_rows, columns=columns):
                    numbers = np.arange(first, first + records.num_rows)
                    first += records.num_rows
                    yield RawRows(records.select(columns), numbers)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{printable(self.path)}: rows from {first:,} on cannot be read: "
                f"{first_line(error)}; write the file again"
            ) from error

    def _check_magic(self) -> None:
        with locate(self.path).open("rb") as file:
            first = file.read(4)
        if not first:
            raise ValueError(f"{printable(self.path)}: expected rows, got an empty file (0 bytes)")
        if first != b"PAR1":
            raise ValueError(
                f"{printable(self.path)}: expected a Parquet file, got something else (it does not "
                "begin with PAR1); use --format csv if it is text"
            )

# SPDX-License-Identifier: MIT
"""Means and deviations of a log's dense columns, over its first rows.

Shapes: C dense columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from embeddings.schema.schema import Schema
from trainer.data.columns import RowError
from trainer.data.files import LogFile, RowInterval
from trainer.data.reader import LogReader
from trainer.data.transforms import dense_matrix

# Enough for a standard error of 0.4 % of a deviation, and read in a second.
_ROWS = 65_536


def dense_moments(files: Sequence[LogFile], schema: Schema, num_rows: int = _ROWS) -> Tensor:
    """Return (2, C) float64: mean and deviation of every dense column after its transform.

    Over the first `num_rows` rows of `files`, nulls left out; NaN for a column without values.

    Raises:
        ValueError: a number is infinite, or a file cannot be read.
    """
    parts = [
        _matrix(schema, rows, interval) for rows, interval in _first_rows(files, schema, num_rows)
    ]
    values = torch.from_numpy(np.concatenate(parts)).double()
    mean = values.nanmean(0)
    return torch.stack((mean, (values - mean).square().nanmean(0).sqrt()))


def _matrix(schema: Schema, rows: pa.RecordBatch, interval: RowInterval) -> np.ndarray:
    try:
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        return dense_matrix(schema.dense, columns, len(rows))
    except RowError as error:
        raise ValueError(
            f"{error.message}, in row group {interval.row_group} of {interval.path}"
        ) from error


def _first_rows(
    files: Sequence[LogFile], schema: Schema, num_rows: int
) -> Iterator[tuple[pa.RecordBatch, RowInterval]]:
    reader = LogReader(schema)
    for file in files:
        starts = file.row_group_starts or (0,) * len(file.row_group_rows)
        for row_group, (start, rows) in enumerate(zip(starts, file.row_group_rows, strict=True)):
            stop = start + min(rows, num_rows)
            if stop > start:
                interval = RowInterval(path=file.path, row_group=row_group, start=start, stop=stop)
                for records in reader.read(interval):
                    yield records, interval
            num_rows -= stop - start
    reader.close()

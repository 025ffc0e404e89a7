# SPDX-License-Identifier: MIT
"""The transforms of a schema: columns -> table rows, dense numbers, labels and weights.

Row 0 is the row of missing ids; values occupy rows 1 to E - 1 (see `SparseFeature`). Dynamic tables
take ids unchanged. The logarithmic buckets follow the FuxiCTR preprocessing of Criteo's counts:
floor(ln(x)^2).

Shapes: N values, E table rows, B rows, F sparse features, C dense features, K labels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from embeddings.schema.lifetime import MISSING_ID
from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature
from trainer.data.columns import Lists, RowError, Values, to_floats
from trainer.data.files import LogFile, RowInterval
from trainer.data.hashing import to_rows
from trainer.data.reader import LogReader

FIRST_DAY, LAST_DAY = 7_305, 47_481  # 1990-01-01 and 2099-12-31, as ingestion allows
HOURS_OF = {"hour_of_day": 24, "hour_of_week": 168}
_UNITS_PER_HOUR = {"s": 3_600, "ms": 3_600_000, "us": 3_600_000_000, "ns": 3_600_000_000_000}
_DAYS_SINCE_MONDAY = 3  # 1970-01-01 was a Thursday
# Gives the mean a standard error of 0.4 % of a deviation; takes a second to read.
_MOMENT_ROWS = 65_536
_SMALL = 1 << 14


def table_rows(
    feature: SparseFeature,
    values: Values,
    num_embeddings: int,
    outside: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Map N values of a column to N int64 rows of a table of E = `num_embeddings` rows.

    Args:
        feature: names the transform and the out-of-range policy.
        values: N values; null maps to row 0.
        num_embeddings: E, rows of the table.
        outside: if given, gains the positions of the values that policy `count` sent to row 0.

    Raises:
        RowError: a value cannot be mapped; `row` is its position in `values`.
    """
    owner = f"sparse feature {feature.name!r}"
    if feature.transform in _BUCKETS:
        return _buckets(feature.transform, values, owner, num_embeddings)
    ids, missing = values.integers(owner)
    if feature.transform == "hash":
        rows = to_rows(ids, num_embeddings)
    elif feature.transform == "identity":
        rows = _identity(feature, ids, missing, num_embeddings, outside)
    else:
        type_ = values.array.type
        unit = type_.unit if pa.types.is_timestamp(type_) else "ms"
        hours = ids // _UNITS_PER_HOUR[unit]
        if feature.transform == "hour_of_week":
            hours = hours + 24 * _DAYS_SINCE_MONDAY
        rows = hours % HOURS_OF[feature.transform] + 1
    if missing is not None:
        rows[missing] = 0
    return rows


def dynamic_ids(feature: SparseFeature, values: Values) -> np.ndarray:
    """Return the N int64 ids of a column of a dynamic table; null becomes `MISSING_ID`.

    Raises:
        RowError: a value is no id; `row` is its position in `values`.
    """
    ids, missing = values.integers(f"sparse feature {feature.name!r}")
    return ids if missing is None else np.where(missing, MISSING_ID, ids)


def id_factors(feature: SparseFeature, ids: Lists, weights: Lists | None) -> np.ndarray:
    """Return the (N,) float32 factors by which the vectors of a feature's N ids are multiplied.

    A factor is the id's weight, or 1 where the feature has none. Where a bag takes the mean, it is
    divided by the number of ids in the list. Ids that are not pooled have factor 1.

    So a weighted lookup only ever sums. TorchRec's own weighted mean is inconsistent: it divides by
    the sum of weights in a row-wise sharded table, but by the number of ids in a whole one.

    Args:
        feature: a bag or a sequence.
        ids: its lists, whole.
        weights: the lists of the weights, whole, if the feature has any.

    Raises:
        RowError: a list has more or fewer weights than ids, or a weight is not finite.
    """
    lengths = np.minimum(ids.lengths, feature.max_length)  # (B,)
    if weights is None:
        factors = np.ones(int(lengths.sum()), np.float32)
    else:
        factors = _weights(feature, ids, weights)
    if feature.kind == "bag" and feature.pooling == "mean":
        # (N,): each value is divided by the length of its own list.
        factors = factors / np.repeat(lengths, lengths).astype(np.float32)
    return factors


def to_days(times: Values) -> np.ndarray:
    """Return the days, since the epoch, of N times (milliseconds or timestamps); null is day 0."""
    type_ = times.array.type
    unit = type_.unit if pa.types.is_timestamp(type_) else "ms"
    return times.integers("timestamp")[0] // (24 * _UNITS_PER_HOUR[unit])


def dense_matrix(
    features: tuple[DenseFeature, ...], columns: Mapping[str, Values], dense: np.ndarray
) -> None:
    """Write the (B, C) float32 dense features; null is NaN.

    Args:
        features: C dense features.
        columns: columns of B rows, by name.
        dense: (B, C), to be filled.

    Raises:
        RowError: a number is infinite in float32.
    """
    with np.errstate(over="ignore"):
        for i, feature in enumerate(features):
            values = columns[feature.column]
            if feature.transform != "log1p":
                dense[:, i] = values.floats()
            elif values.are_integers:
                numbers, missing = values.integers(feature.name)
                dense[:, i] = _look_up("log1p", numbers, np.float32)
                if missing is not None:
                    dense[missing, i] = np.nan
            else:
                dense[:, i] = _signed_log1p(values.floats())
    infinite = np.isinf(dense)  # (B, C)
    if infinite.any():
        row, i = np.argwhere(infinite)[0]
        name = features[i].column
        got = columns[name].array[int(row)].as_py()
        raise RowError(f"column {name!r}: expected a finite 32-bit number, got {got!r}", row)


def label_matrices(
    labels: tuple[Label, ...],
    columns: Mapping[str, Values],
    targets: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Write (B, K) float32 labels in {0, 1} and their (B, K) weights, 0 where a label is null.

    Args:
        labels: K labels.
        columns: columns of B rows, by name.
        targets: (B, K), to be filled with labels.
        weights: (B, K), to be filled.

    Raises:
        RowError: a label is not 0, 1 or null, or a weight is not a number >= 0.
    """
    for i, label in enumerate(labels):
        values = columns[label.column].floats()  # (B,) float64
        present = ~np.isnan(values)  # (B,) bool
        bad = present & (values != 0) & (values != 1)
        if bad.any():
            row = int(np.argmax(bad))
            got = columns[label.column].array[row].as_py()
            raise RowError(
                f"column {label.column!r} (label): expected 0, 1 or null, got {got!r}", row
            )
        targets[:, i] = np.where(present, values, 0)
        weights[:, i] = present
        if label.weight:
            factors = columns[label.weight].floats()
            bad = ~((factors >= 0) & (factors <= np.finfo(np.float32).max))
            if bad.any():
                row = int(np.argmax(bad))
                got = columns[label.weight].array[row].as_py()
                raise RowError(
                    f"column {label.weight!r} (weight): expected a number >= 0, got {got!r}", row
                )
            weights[:, i] *= factors


def _weights(feature: SparseFeature, ids: Lists, lists: Lists) -> np.ndarray:
    """Return the (N,) float32 weights of a bag's newest ids, without a copy where possible."""
    who = f"sparse feature {feature.name!r}, column {feature.weights!r}"
    uneven = ids.lengths != lists.lengths
    if uneven.any():
        row = int(np.argmax(uneven))
        raise RowError(
            f"{who}: expected a weight for each of the {ids.lengths[row]} ids of column "
            f"{feature.column!r}, got {lists.lengths[row]}",
            row,
        )
    newest = lists.newest(feature.max_length)
    values = newest.values()
    if values.type == pa.float32() and not values.null_count:
        weights = values.to_numpy()
    else:
        with np.errstate(over="ignore"):
            weights = to_floats(values).astype(np.float32)
    bad = ~np.isfinite(weights)
    if bad.any():
        position = int(np.argmax(bad))
        raise RowError(
            f"{who}: expected finite 32-bit numbers, got {values[position].as_py()!r}",
            newest.row_of(position),
        )
    return weights


def _identity(
    feature: SparseFeature,
    ids: np.ndarray,
    missing: np.ndarray | None,
    num_embeddings: int,
    counted: list[np.ndarray] | None,
) -> np.ndarray:
    """Map v to row v + 1 and a value outside [0, E - 2] to row 0 or an error."""
    outside = (ids < 0) | (ids > num_embeddings - 2)
    if missing is not None:
        outside &= ~missing
    if outside.any():
        if feature.out_of_range == "error":
            position = int(np.argmax(outside))
            raise RowError(
                f"sparse feature {feature.name!r}, column {feature.column!r}, table "
                f"{feature.table!r} of {num_embeddings} rows: expected an integer in "
                f"[0, {num_embeddings - 2}], got {ids[position]} (raise num_embeddings, or set "
                "out_of_range to 'oov' or 'count')",
                position,
            )
        if counted is not None and feature.out_of_range == "count":
            counted.append(np.flatnonzero(outside))
    return np.where(outside, 0, ids + 1)


def _buckets(transform: str, values: Values, owner: str, num_embeddings: int) -> np.ndarray:
    """Map x to row 1 + its bucket, at most E - 1; negative numbers share the bucket of 0."""
    if values.are_integers:
        numbers, missing = values.integers(owner)
        rows = _look_up(transform, numbers, np.int64)
    else:
        numbers = values.floats()
        missing = np.isnan(numbers)
        buckets = _FUNCTIONS[transform](np.where(missing, 0.0, numbers))
        rows = np.minimum(buckets, num_embeddings - 2).astype(np.int64)
    np.minimum(rows, num_embeddings - 2, out=rows)
    rows += 1
    if missing is not None:
        rows[missing] = 0
    return rows


def _log_square(values: np.ndarray) -> np.ndarray:
    values = np.maximum(values, 0.0)
    return np.where(values > 2, np.square(np.log(np.maximum(values, 1.0))), values)


def _log_quarter(values: np.ndarray) -> np.ndarray:
    return 4 * np.log1p(np.maximum(values, 0.0))


def _signed_log1p(values: np.ndarray) -> np.ndarray:
    return np.copysign(np.log1p(np.abs(values)), values)


_BUCKETS = {"log_square": _log_square, "log_quarter": _log_quarter}
_FUNCTIONS = {**_BUCKETS, "log1p": _signed_log1p}


def _look_up(name: str, numbers: np.ndarray, type_: type[np.generic]) -> np.ndarray:
    """Apply a function to N int64; of 0 to `_SMALL` - 1, as most counts are, it is looked up."""
    # A negative number is a large one without its sign.
    places = np.minimum(numbers.view(np.uint64), np.uint64(_SMALL))
    large = np.flatnonzero(places == _SMALL)
    if 4 * len(large) > len(numbers):
        return _FUNCTIONS[name](numbers.astype(np.float64)).astype(type_)
    found = _of_small(name, type_).take(places.view(np.int64), mode="clip")
    if len(large):
        found[large] = _FUNCTIONS[name](numbers[large].astype(np.float64))
    return found


@functools.cache
def _of_small(name: str, type_: type[np.generic]) -> np.ndarray:
    """Return a function of 0 to `_SMALL`, the last of which stands for what is beyond."""
    return _FUNCTIONS[name](np.arange(_SMALL + 1, dtype=np.float64)).astype(type_)


def dense_moments(files: Sequence[LogFile], schema: Schema, num_rows: int = _MOMENT_ROWS) -> Tensor:
    """Return (2, C) float64: mean and deviation of every dense column after its transform.

    Nulls are left out. A column without values has NaN.

    Args:
        files: the log's files, in order.
        schema: names the dense columns.
        num_rows: rows of the start of `files` to read.

    Raises:
        ValueError: a number is infinite, or a file cannot be read.
    """
    parts = [
        _matrix_of(schema, rows, interval)
        for rows, interval in _first_rows(files, schema, num_rows)
    ]
    values = torch.from_numpy(np.concatenate(parts)).double()  # (rows, C)
    mean = values.nanmean(0)  # (C,)
    return torch.stack((mean, (values - mean).square().nanmean(0).sqrt()))


def _matrix_of(schema: Schema, rows: pa.RecordBatch, interval: RowInterval) -> np.ndarray:
    try:
        arrays = zip(rows.schema.names, rows.columns, strict=True)
        dense = np.empty((len(rows), len(schema.dense)), np.float32)
        dense_matrix(schema.dense, {name: Values(array) for name, array in arrays}, dense)
        return dense
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

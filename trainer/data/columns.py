# SPDX-License-Identifier: MIT
"""What each column of a log must look like, and Arrow columns as NumPy arrays.

The same declaration serves twice: footers are checked with it before anything is read, and records
are converted by it. A null is kept apart as a mask, because zero is an ordinary id.

Shapes: B rows, N values in the lists of B rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from embeddings.schema.plain import suggest
from embeddings.schema.schema import Schema
from trainer.data.hashing import hash_strings, is_text

_TRANSFORM_KINDS = {
    "hash": ("integer", "float", "text", "date"),
    "identity": ("integer", "float"),
    "log_square": ("integer", "float", "decimal"),
    "log_quarter": ("integer", "float", "decimal"),
    "hour_of_day": ("integer", "timestamp"),
    "hour_of_week": ("integer", "timestamp"),
    "length": ("integer", "float", "decimal", "text", "date", "timestamp"),
}
_NUMBER_KINDS = ("integer", "float", "decimal")


class RowError(ValueError):
    """A value that cannot become part of an example.

    Args:
        message: what is wrong, without the place.
        row: position of the value in the converted records.
    """

    def __init__(self, message: str, row: int):
        super().__init__(message, row)
        self.message = message
        self.row = int(row)

    def __str__(self) -> str:
        """Give the message and the row."""
        return f"{self.message}, at row {self.row}"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a column.

    Attributes:
        column: its name.
        owner: what uses it, for messages.
        kinds: the kinds of Arrow type that are accepted.
        is_list: whether it must hold lists.
    """

    column: str
    owner: str
    kinds: tuple[str, ...]
    is_list: bool = False

    @property
    def expected(self) -> str:
        """The accepted types, in words."""
        plural = [f"{kind}s" if kind != "text" else "strings" for kind in self.kinds]
        return ("a list of " if self.is_list else "") + " or ".join(plural)

    def takes(self, type_: pa.DataType) -> bool:
        """Return whether a column of this Arrow type can be used; a column of nulls always can."""
        kind = kind_of(type_)
        if self.is_list and kind == "list":
            return kind_of(type_.value_type) in (*self.kinds, "null")
        return kind == "null" or (kind in self.kinds and not self.is_list)


@functools.lru_cache(maxsize=256)
def kind_of(type_: pa.DataType) -> str:
    """Return the family of an Arrow type; types of one family are interchangeable."""
    if is_text(type_):
        return "text"
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pa.types.is_integer(type_) or pa.types.is_boolean(type_):
        return "integer"
    if pa.types.is_floating(type_):
        return "float"
    if is_list(type_):
        return "list"
    for kind in ("null", "timestamp", "date", "decimal"):
        if getattr(pa.types, f"is_{kind}")(type_):
            return kind
    return str(type_)


def is_list(type_: pa.DataType) -> bool:
    """Return whether `read_lists` accepts this Arrow type."""
    return (
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
    )


def uses(schema: Schema) -> list[Use]:
    """Return every use that `schema` makes of a column."""
    found = [
        Use(
            column=feature.column,
            owner=f"sparse feature {feature.name!r}",
            kinds=_TRANSFORM_KINDS[feature.transform],
            is_list=feature.kind != "id" or bool(feature.position) or feature.transform == "length",
        )
        for feature in schema.sparse
    ]
    for feature in schema.sparse:
        if feature.weights:
            owner = f"weights of sparse feature {feature.name!r}"
            found.append(
                Use(column=feature.weights, owner=owner, kinds=_NUMBER_KINDS, is_list=True)
            )
    for feature in schema.dense:
        owner = f"dense feature {feature.name!r}"
        found.append(Use(column=feature.column, owner=owner, kinds=_NUMBER_KINDS))
    for label in schema.labels if schema.labelled else ():
        for column, owner in ((label.column, "label"), (label.weight, "weight of label")):
            if column:
                found.append(
                    Use(column=column, owner=f"{owner} {label.name!r}", kinds=_NUMBER_KINDS)
                )
    for history, column in schema.history_actions.items():
        owner = f"actions of history {history!r}"
        found.append(Use(column=column, owner=owner, kinds=("integer",), is_list=True))
    if schema.user:
        found.append(Use(column=schema.user, owner="user", kinds=_TRANSFORM_KINDS["hash"]))
    if schema.timestamp:
        kinds = _TRANSFORM_KINDS["hour_of_day"]
        found.append(Use(column=schema.timestamp, owner="timestamp", kinds=kinds))
    return found


def check_columns(
    columns: pa.Schema, schema: Schema, source: str, partition: Mapping[str, str] | None = None
) -> None:
    """Check that the Arrow schema `columns` of the file (or records) `source` fits `schema`.

    Args:
        columns: names and types of the file's columns.
        schema: what the columns are used for.
        source: the file's path, for messages.
        partition: keys and values of folders such as country=US in the path; they are not read.

    Raises:
        ValueError: columns are missing, repeated or of a wrong type; the message names all of them.
    """
    problems = []
    for use in uses(schema):
        found = columns.get_all_field_indices(use.column)
        if not found:
            problems.append(
                f"column {use.column!r} ({use.owner}): expected {use.expected}, got no such column"
                + (
                    f" (the folder {use.column}={partition[use.column]} holds it, and names of "
                    "folders are not read: write the column into the files)"
                    if partition and use.column in partition
                    else suggest(use.column, columns.names)
                )
            )
        elif len(found) > 1:
            problems.append(
                f"column {use.column!r} ({use.owner}): expected once, got {len(found)} times"
            )
        elif not use.takes(columns.field(found[0]).type):
            got = columns.field(found[0]).type
            problems.append(
                f"column {use.column!r} ({use.owner}): expected {use.expected}, got {got}"
            )
    if problems:
        raise ValueError(
            f"{source}: "
            + "; ".join(problems)
            + ". Write the file again with these columns, or change "
            f"the schema. Columns of the file: {columns.names}"
        )


def to_integers(array: pa.Array, owner: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert N values to int64 and a mask of nulls (None if there are none); text is hashed.

    A column of integers with nulls often arrives as floats. A float must therefore be a whole
    number, so that it keeps its id as an integer. NaN is null. Unsigned 64-bit ids keep their bits.

    Args:
        array: N values.
        owner: what uses them, for messages.

    Raises:
        RowError: a float is not whole, or so large that it may stand for several ids; `row` is a
            position in `array`.
    """
    kind = kind_of(array.type)
    if kind == "text":
        array = hash_strings(array)
    elif isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    elif kind == "null":
        return np.zeros(len(array), np.int64), np.ones(len(array), np.bool_)
    if kind == "float":
        return _whole_numbers(to_floats(array), owner, exact_bits(array.type))
    if kind == "date":  # days since 1970, whichever way a file keeps them
        array = array.cast(pa.date32()).view(pa.int32())
    elif kind == "timestamp":
        array = array.view(pa.int64())
    elif kind == "integer" and pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if not array.null_count:
        return array.to_numpy().astype(np.int64, copy=False), None
    missing = array.is_null().to_numpy(zero_copy_only=False)
    return array.fill_null(0).to_numpy().astype(np.int64, copy=False), missing


def exact_bits(type_: pa.DataType) -> int:
    """Return b such that a float type represents all whole numbers below 2^b exactly."""
    if pa.types.is_float16(type_):
        return 11
    return 24 if pa.types.is_float32(type_) else 53


def to_floats(array: pa.Array) -> np.ndarray:
    """Convert N numbers to float64, null to NaN."""
    if pa.types.is_floating(array.type) and not array.null_count:
        return array.to_numpy().astype(np.float64, copy=False)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _whole_numbers(
    values: np.ndarray, owner: str, bits: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert float64 whole numbers to int64; NaN is null. From 2^bits on they merge ids."""
    missing = np.isnan(values)
    values = np.where(missing, 0.0, values)
    bad = (values != np.floor(values)) | (np.abs(values) >= 2.0**bits)
    if bad.any():
        row = int(np.argmax(bad))
        got = float(values[row])
        raise RowError(
            f"{owner}: expected whole numbers below 2^{bits} (from there on floats merge "
            f"neighbouring ids), got {got!r}",
            row,
        )
    return values.astype(np.int64), missing if missing.any() else None


class Values:
    """N values of a column, each kind of number worked out at most once.

    Args:
        array: the values.
    """

    def __init__(self, array: pa.Array):
        self.array = array
        self._integers: tuple[np.ndarray, np.ndarray | None] | None = None
        self._floats: np.ndarray | None = None

    def integers(self, owner: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Return int64 and a mask of nulls, not to be changed; as `to_integers`."""
        if self._integers is None:
            self._integers = to_integers(self.array, owner)
        return self._integers

    def floats(self) -> np.ndarray:
        """Return float64, not to be changed; as `to_floats`."""
        if self._floats is None:
            self._floats = to_floats(self.array)
        return self._floats

    @property
    def are_integers(self) -> bool:
        """Whether the column holds integers that int64 can tell apart."""
        type_ = self.array.type
        return pa.types.is_integer(type_) and not pa.types.is_uint64(type_)


@dataclass(frozen=True, kw_only=True)
class Lists:
    """The lists of B rows: row b holds `child[starts[b] : starts[b] + lengths[b]]`.

    Attributes:
        child: values of all lists; some may be unused.
        starts: (B,) int64.
        lengths: (B,) int64.
    """

    child: pa.Array
    starts: np.ndarray
    lengths: np.ndarray

    def newest(self, max_length: int) -> Lists:
        """Keep the last `max_length` values of each list."""
        lengths = np.minimum(self.lengths, max_length)
        starts = self.starts + (self.lengths - lengths)
        return Lists(child=self.child, starts=starts, lengths=lengths)

    def at(self, position: int) -> pa.Array:
        """Return the (B,) entries at `position` (-1 the newest), null where a list is shorter."""
        present = self.lengths >= -position
        return self.child.take(pa.array(self.starts + self.lengths + position, mask=~present))

    def values(self) -> pa.Array:
        """Return the (N,) values of all lists, row by row; no copy if `child` is already that."""
        total, ends = int(self.lengths.sum()), np.cumsum(self.lengths)
        if total == len(self.child) and np.array_equal(self.starts, ends - self.lengths):
            return self.child
        # (N,): offset from a value's position in the result to its position in `child`.
        first = np.repeat(self.starts - (ends - self.lengths), self.lengths)
        return self.child.take(pa.array(first + np.arange(total)))

    def row_of(self, value: int) -> int:
        """Return the row that holds the `value`-th of all values."""
        return int(self.rows_of(value))

    def rows_of(self, values: np.ndarray | int) -> np.ndarray:
        """Return the rows that hold some of all values, given by their positions."""
        return np.searchsorted(np.cumsum(self.lengths), values, side="right")


def read_lists(array: pa.Array) -> Lists:
    """View B lists (list, large_list, fixed_size_list); a null list is empty. Nothing is copied."""
    if pa.types.is_null(array.type):
        zeros = np.zeros(len(array), np.int64)
        return Lists(child=pa.nulls(0, pa.int64()), starts=zeros, lengths=zeros)
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        offsets = np.arange(array.offset, array.offset + len(array) + 1, dtype=np.int64) * size
    else:
        offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
    starts, lengths = offsets[:-1], np.diff(offsets)
    if array.null_count:  # a null list may own values: they are not read
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    first = int(offsets[0]) if len(offsets) else 0
    child = array.values.slice(first, int(offsets[-1]) - first if len(offsets) else 0)
    return Lists(child=child, starts=starts - first, lengths=lengths)

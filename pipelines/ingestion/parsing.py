# SPDX-License-Identifier: MIT
"""Text to numbers and times, a whole column at a time, with a mask of what could not be read.

Arrow's casts stop at the first bad value. `_cast_each` casts at once what looks right and halves
the column until the few bad values are alone, so that clean columns cost one cast. What a value
becomes never depends on its neighbours.

Shapes: N values; masks are (N,) bool arrays, True where a value is present but unreadable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
# Arrow makes its functions at import, where no type checker sees them.
pc: Any = pyarrow.compute
UNITS_MS = {"s": 1_000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
_INTEGER = r"^(-?\d{1,19}|0[xX][0-9a-fA-F]{1,16})$"
_CANONICAL = r"^\s*(0|-?[1-9]\d*)(\.0*)?\s*$"
_FLOAT = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?$|^[+-]?(?i:nan|inf|infinity)$"
_DATE_TIME = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?)?"
_ZONE = r"(Z|[+-]\d{2}(:?\d{2})?)$"


def parse_integers(text: pa.Array) -> tuple[pa.Array, Mask]:
    """Read N strings as int64; `5.0` and ` 5` are 5, and unsigned 64-bit ids keep their bits."""
    try:
        return text.cast(pa.int64()), np.zeros(len(text), np.bool_)
    except pa.ArrowInvalid:
        pass
    plain = pc.replace_substring_regex(_plain(text), pattern=r"^(-?\d+)\.0*$", replacement=r"\1")
    numbers = _cast_each(plain, pa.int64(), _INTEGER)
    unread = _unread(plain, numbers)
    if unread.any():
        large = _cast_each(plain, pa.uint64(), r"^\d{19,20}$")
        bits = pa.array(large.fill_null(0).to_numpy().view(np.int64))
        numbers = pc.coalesce(numbers, pc.if_else(large.is_valid(), bits, None))
    return numbers, _unread(plain, numbers)


def is_canonical(text: pa.Array) -> Mask:
    """Return (N,) whether each string is a whole number as numbers write it, or null.

    07, +7, 0x7 and -0 are not: as ids they are other names than 7 and 0.
    """
    leading = pc.and_(pc.starts_with(text, pattern="0"), pc.greater(pc.binary_length(text), 1))
    plain = pc.and_not(pc.ascii_is_decimal(text), leading)
    if pc.all(plain).as_py() is not False:  # the usual case costs no regular expression
        return np.ones(len(text), np.bool_)
    matches = pc.match_substring_regex(text, pattern=_CANONICAL)
    return matches.fill_null(True).to_numpy(zero_copy_only=False)


def to_text(values: pa.Array) -> tuple[pa.Array, Mask]:
    """Return N strings or byte strings as strings; bytes that are not UTF-8 become null."""
    try:
        return values.cast(pa.string()), np.zeros(len(values), np.bool_)
    except pa.ArrowInvalid:
        plain = values.cast(pa.large_binary())
        text = _halve(plain, pa.string())
        return text, _unread(plain, text)


def parse_floats(text: pa.Array) -> tuple[pa.Array, Mask]:
    """Read N strings as float64; `nan` is read as NaN."""
    try:
        return text.cast(pa.float64()), np.zeros(len(text), np.bool_)
    except pa.ArrowInvalid:
        pass
    plain = _plain(text)
    numbers = _cast_each(plain, pa.float64(), _FLOAT)
    return numbers, _unread(plain, numbers)


def parse_times(text: pa.Array, unit: str, pattern: str) -> tuple[pa.Array, Mask]:
    """Read N strings as int64 milliseconds since the epoch, UTC.

    With a strptime `pattern` all must follow it. Without one: numbers in `unit`, or ISO 8601 dates
    and times, UTC unless they carry a zone.
    """
    plain = _plain(text)
    if pattern:
        times = pc.strptime(plain, format=pattern, unit="s", error_is_null=True)
        milliseconds = pc.multiply(times.cast(pa.int64()), 1_000)
        return milliseconds, _unread(plain, milliseconds)
    numbers, unread = parse_integers(plain)
    times = scale_times(numbers, unit)
    if unread.any():
        decimal = _cast_each(plain, pa.float64(), r"^\d+\.\d*$")
        naive = _cast_each(plain, pa.timestamp("ns"), _DATE_TIME + "$")
        zoned = _cast_each(plain, pa.timestamp("ns", "UTC"), _DATE_TIME + _ZONE)
        times = pc.coalesce(
            times,
            scale_times(decimal, unit),
            scale_times(naive.cast(pa.int64()), "ns"),
            scale_times(zoned.cast(pa.int64()), "ns"),
        )
    return times, _unread(plain, times)


def scale_times(numbers: pa.Array, unit: str) -> pa.Array:
    """Turn N numbers of `unit` (s, ms, us, ns) into int64 milliseconds, rounded down.

    What is beyond 64 bits becomes the largest int64, which no calendar check lets through.
    """
    if unit == "ms" and pa.types.is_integer(numbers.type):
        return numbers
    missing = numbers.is_null().to_numpy(zero_copy_only=False)
    values = numbers.fill_null(0).to_numpy()
    if pa.types.is_integer(numbers.type):
        factor = round(UNITS_MS[unit]) or -round(1 / UNITS_MS[unit])
        if factor < 0:
            scaled = values // -factor
        else:
            far = np.abs(values) > np.iinfo(np.int64).max // factor
            scaled = np.where(far, np.iinfo(np.int64).max, np.where(far, 0, values) * factor)
    else:
        exact = np.floor(values * UNITS_MS[unit])
        far = ~(np.abs(exact) < 2.0**62)
        scaled = np.where(far, np.iinfo(np.int64).max, np.where(far, 0, exact).astype(np.int64))
    return pa.array(scaled, pa.int64(), mask=missing)


def looks_like(text: pa.Array) -> str:
    """Return what all of N strings are: `int`, `float` or `string`; if all are null, nothing.

    A number with a leading zero (a postal code) makes a string: 01234 and 1234 are different ids.
    """
    values = text.drop_null()
    if not len(values):
        return ""
    for kind, pattern in (("int", r"^(0|-?[1-9]\d{0,18})(\.0*)?$"), ("float", _FLOAT)):
        if pc.all(pc.match_substring_regex(values, pattern)).as_py():
            return kind
    return "string"


def _plain(text: pa.Array) -> pa.Array:
    return pc.replace_substring_regex(
        pc.ascii_trim_whitespace(text), pattern=r"^\+", replacement=""
    )


def _unread(text: pa.Array, values: pa.Array) -> Mask:
    return pc.and_(text.is_valid(), values.is_null()).to_numpy(zero_copy_only=False)


def _cast_each(text: pa.Array, to: pa.DataType, pattern: str) -> pa.Array:
    """Cast N strings, null where one does not match `pattern` or does not fit the type."""
    matches = pc.match_substring_regex(text, pattern)
    return _halve(pc.if_else(matches, text, pa.scalar(None, text.type)), to)


def _halve(text: pa.Array, to: pa.DataType) -> pa.Array:
    try:
        return text.cast(to)
    except pa.ArrowInvalid:
        if len(text) == 1:
            return pa.nulls(1, to)
    middle = len(text) // 2
    return pa.concat_arrays([_halve(text.slice(0, middle), to), _halve(text.slice(middle), to)])

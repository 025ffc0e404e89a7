# SPDX-License-Identifier: MIT
"""Columns of a raw log, converted to what the schema asks of them.

A column becomes int64 (ids, integers, times), float32 or float64 (numbers), int8 (labels), or a
list of those. Strings of ids become their XXH64. Whether a column holds strings or integers is
decided once for an output and kept, never file by file: the same id must get the same number
every day.

Shapes: B rows, N values in the lists of B rows; masks are (B,) bool arrays of bad rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.ingestion import parsing
from pipelines.ingestion.parsing import Mask, pc
from pipelines.ingestion.rules import Rule
from trainer.data.columns import exact_bits, is_list, kind_of, read_lists
from trainer.data.hashing import hash_strings

_EARLIEST_MS, _LATEST_MS = 631_152_000_000, 4_102_444_800_000  # 1990 and 2100


@dataclass
class Converted:
    """A converted column of B rows; `problems` are (mask of bad rows, reason)."""

    values: pa.Array
    problems: list[tuple[Mask, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Times:
    """How times that are numbers or text are written. `unit` None: not said, milliseconds."""

    unit: str | None = None
    pattern: str = ""

    def __post_init__(self) -> None:
        """Check the unit."""
        if self.unit is not None and self.unit not in parsing.UNITS_MS:
            raise ValueError(
                f"timestamp unit: expected one of {list(parsing.UNITS_MS)}, got {self.unit!r}"
            )


def kind_of_column(rule: Rule, type_: pa.DataType) -> str:
    """Return the kind a column of this Arrow type has, or an empty string if nulls only.

    Raises:
        ValueError: no column of the rule's role can be made of the type; the message has no place.
    """
    if rule.is_list != is_list(type_) and not pa.types.is_null(type_):
        wanted = "a list" if rule.is_list else "a single value a row"
        raise ValueError(f"expected {wanted}, got {type_}")
    family = kind_of(type_.value_type if is_list(type_) else type_)
    kinds = {"text": "string", "integer": "int", "date": "int", "float": "int", "decimal": "int"}
    if rule.role == "number":
        kinds.update(float="float", decimal="float", date="")
    if rule.role == "time":
        kinds["timestamp"] = "int"
    if family == "null":
        return ""
    if not kinds.get(family):
        raise ValueError(f"expected {_WANTED[rule.role]}, got {type_}")
    return kinds[family]


def convert(rule: Rule, kind: str, column: pa.Array, times: Times) -> Converted:
    """Convert B rows of a raw column to the rule's type and say which rows are bad."""
    if rule.is_list:
        lists = read_lists(column)
        done = _convert_values(rule, kind, lists.values(), times)
        offsets = np.concatenate([[0], np.cumsum(lists.lengths)]).astype(np.int32)
        owner = np.repeat(np.arange(len(column)), lists.lengths)
        problems = [(_rows_of(mask, owner, len(column)), why) for mask, why in done.problems]
        if rule.is_filled and done.values.null_count:
            missing = done.values.is_null().to_numpy(zero_copy_only=False)
            for mask, _ in done.problems:
                missing &= ~mask
            problems.append(
                (_rows_of(missing, owner, len(column)), f"missing {_WANTED[rule.role]}")
            )
        done = Converted(pa.ListArray.from_arrays(pa.array(offsets), done.values), problems)
    else:
        done = _convert_values(rule, kind, column, times)
        if rule.required and done.values.null_count:
            # A value that could not be read is null by now, but not missing.
            missing = done.values.is_null().to_numpy(zero_copy_only=False)
            for mask, _ in done.problems:
                missing &= ~mask
            done.problems.append((missing, f"missing {_WANTED[rule.role]}"))
    done.problems = [(mask, why) for mask, why in done.problems if mask.any()]
    return done


_WANTED = {
    "time": "a time",
    "label": "a label 0 or 1",
    "weight": "a weight >= 0",
    "integer": "an integer",
    "id": "an id (string or integer)",
    "number": "a number",
    "dense": "a number",
}


def _rows_of(mask: Mask, owner: NDArray[np.int64], num_rows: int) -> Mask:
    rows = np.zeros(num_rows, np.bool_)
    rows[owner[mask]] = True
    return rows


def _convert_values(rule: Rule, kind: str, values: pa.Array, times: Times) -> Converted:
    output = rule.output_type(kind)
    output = output.value_type if rule.is_list else output
    family = kind_of(values.type)
    if family == "null":
        return Converted(pa.nulls(len(values), output))
    if isinstance(values, pa.DictionaryArray) and family != "text":
        values = values.dictionary_decode()
    if rule.role == "id" and kind == "string":
        return _to_hashes(values, family)
    if family == "text":
        values, broken = parsing.to_text(values)
        converted = _convert_text(rule, values, times, output)
        converted.problems.insert(0, (broken, "bytes that are not UTF-8"))
        return converted
    if rule.role == "time":
        return _to_times(values, family, times)
    if pa.types.is_integer(output) and rule.role != "label":
        return _to_integers(rule, values, family)
    return _to_numbers(rule, values, family, output)


def _convert_text(rule: Rule, values: pa.Array, times: Times, output: pa.DataType) -> Converted:
    if rule.role == "time":
        return _to_times(values, "text", times)
    if pa.types.is_integer(output) and rule.role != "label":
        return _to_integers(rule, values, "text")
    return _to_numbers(rule, values, "text", output)


def _to_hashes(values: pa.Array, family: str) -> Converted:
    """Hash ids as texts; a number becomes the text that a CSV has in its place."""
    problems = []
    if family in ("float", "decimal"):
        values, problems = _whole(values)
    if family != "text":
        values = values.cast(pa.string())
    return Converted(hash_strings(values), problems)


def _whole(values: pa.Array) -> tuple[pa.Array, list[tuple[Mask, str]]]:
    """Return floats or decimals as int64, exactly; the others become null, with their reason."""
    if pa.types.is_decimal(values.type):
        try:
            return values.cast(pa.int64()), []
        except pa.ArrowInvalid:
            numbers, unread = parsing.parse_integers(values.cast(pa.string()))
            return numbers, [(unread, "not a whole number of 64 bits")]
    bits = exact_bits(values.type)
    values = _nan_to_null(values).cast(pa.float64())
    whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), 2.0**bits))
    reason = f"not a whole number below 2^{bits}, where floats tell neighbouring ids apart"
    problems = [(_mask(pc.invert(whole)), reason)]
    return pc.if_else(whole, values, None).cast(pa.int64()), problems


def _to_times(values: pa.Array, family: str, times: Times) -> Converted:
    unit, problems = times.unit or "ms", []
    if times.pattern and family == "integer":  # such as 14102100, which %y%m%d%H reads
        values, family = values.cast(pa.string()), "text"
    if family == "text":
        values, unread = parsing.parse_times(values, unit, times.pattern)
        problems.append((unread, "not a time"))
    elif family in ("timestamp", "date"):
        values = values.cast(pa.timestamp("ms", getattr(values.type, "tz", None)), safe=False)
        values = values.cast(pa.int64())
    else:
        values = values.cast(pa.float64() if family in ("float", "decimal") else pa.int64())
        values = parsing.scale_times(_nan_to_null(values), unit)
    outside = pc.or_(pc.less(values, _EARLIEST_MS), pc.greater_equal(values, _LATEST_MS))
    reason = f"a time before 1990 or after 2099 when read in {unit}; wrong --timestamp-unit?"
    problems.append((_mask(outside), reason))
    return Converted(values, problems)


def _to_integers(rule: Rule, values: pa.Array, family: str) -> Converted:
    problems = []
    if family == "text":
        text = values
        values, unread = parsing.parse_integers(text)
        problems.append((unread, "not an integer"))
        if rule.role == "id":
            other = ~unread & ~parsing.is_canonical(text)
            problems.append((other, "not an integer as numbers write it: 07 and 7 are two ids"))
            values = pc.if_else(pa.array(other), None, values)
    elif family in ("float", "decimal"):
        values, problems = _whole(values)
    elif pa.types.is_uint64(values.type):  # ids keep their bits
        missing = values.is_null().to_numpy(zero_copy_only=False)
        values = pa.array(values.fill_null(0).to_numpy().view(np.int64), mask=missing)
    else:
        if family == "date":  # days since 1970, whichever way a file keeps them
            values = values.cast(pa.date32(), safe=False).cast(pa.int32())
        values = values.cast(pa.int64())
    if rule.limit is not None:
        outside = pc.or_(pc.less(values, 0), pc.greater(values, rule.limit))
        problems.append((_mask(outside), f"outside [0, {rule.limit}], the rows of its table"))
    return Converted(values, problems)


def _to_numbers(rule: Rule, values: pa.Array, family: str, output: pa.DataType) -> Converted:
    problems = []
    if family == "text":
        text = values
        if rule.role == "label":
            text = pc.replace_substring_regex(text, pattern="^(?i:true)$", replacement="1")
            text = pc.replace_substring_regex(text, pattern="^(?i:false)$", replacement="0")
        values, unread = parsing.parse_floats(text)
        problems.append((unread, "not a number"))
    values = _nan_to_null(values.cast(pa.float64(), safe=False))
    if rule.role == "label":
        bad = pc.invert(pc.or_(pc.equal(values, 0), pc.equal(values, 1)))
        problems.append((_mask(bad), "a label other than 0 and 1"))
    else:
        largest = 3.4028234e38 if output == pa.float32() else 1.7e308
        lowest = 0.0 if rule.role == "weight" else -largest
        bad = pc.or_(pc.less(values, lowest), pc.greater(values, largest))
        reason = "not a finite weight >= 0" if rule.role == "weight" else "not a finite number"
        problems.append((_mask(bad), reason))
    return Converted(pc.if_else(bad, None, values).cast(output, safe=False), problems)


def _nan_to_null(values: pa.Array) -> pa.Array:
    if not pa.types.is_floating(values.type):
        return values
    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)


def _mask(flags: pa.Array) -> Mask:
    return flags.fill_null(False).to_numpy(zero_copy_only=False)

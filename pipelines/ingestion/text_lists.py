# SPDX-License-Identifier: MIT
"""Lists that a text column holds: `3|14|15`, `3, 14` or, as JSON and Python write them, `[3, 14]`.

Shapes: B rows, N entries of all lists.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from pipelines.ingestion.parsing import Mask, pc, to_text
from trainer.data.columns import read_lists

BRACKETED = r"(?s)^\s*\[.*\]\s*$"
_INSIDE = r"(?s)^\s*\[(.*)\]\s*$"
_QUOTED = r"""(?s)^"(.*)"$|^'(.*)'$"""
_NULL = r"^(null|None|NaN|nan)$"
# What only a parser of JSON takes apart: escapes, lists in lists, commas inside of quotes.
_IRREGULAR = r"""["\\\[\]]|^'|'$"""


def split_text(column: pa.Array, separator: str) -> tuple[pa.Array, Mask]:
    """Turn B strings into lists of strings, and say which rows (B,) cannot be read.

    Blanks around an entry are no part of it; an empty entry is null, an empty string an empty list.
    With a comma as separator, a text in brackets is read as JSON: without brackets and quotes.
    """
    text, broken = to_text(column)
    separator = separator.strip() or separator
    bracketed = np.zeros(len(text), np.bool_)
    if separator == ",":
        bracketed = _flags(pc.match_substring_regex(text, pattern=BRACKETED))
    inside = text
    if bracketed.any():
        inside = pc.replace_substring_regex(text, pattern=_INSIDE, replacement=r"\1")
    lists, irregular = _split(inside, separator, bracketed)
    if not irregular.any():
        return lists, broken
    rows = lists.to_pylist()
    for row in np.flatnonzero(irregular).tolist():
        found = _parse(text[row].as_py())
        broken[row] |= found is None
        rows[row] = found or []
    return pa.array(rows, pa.list_(pa.string())), broken


def _split(text: pa.Array, separator: str, bracketed: Mask) -> tuple[pa.Array, Mask]:
    """Split B strings; return the lists, and (B,) the rows in brackets that need a parser."""
    empty = pc.equal(pc.binary_length(pc.ascii_trim_whitespace(text)), 0)
    filled = pc.if_else(empty.fill_null(True), pa.scalar(None, text.type), text)
    read = read_lists(pc.split_pattern(filled, pattern=separator))
    values = pc.ascii_trim_whitespace(read.values())
    nothing = pa.scalar(None, values.type)
    irregular = np.zeros(len(text), np.bool_)
    if bracketed.any():
        owner = np.repeat(np.arange(len(text)), read.lengths)
        inside = pa.array(bracketed[owner])  # (N,) entries of rows in brackets
        plain = pc.replace_substring_regex(values, pattern=_QUOTED, replacement=r"\1\2")
        is_null = pc.match_substring_regex(values, pattern=_NULL)
        odd = pc.and_(inside, pc.match_substring_regex(plain, pattern=_IRREGULAR))
        irregular[owner[_flags(odd)]] = True
        values = pc.if_else(inside, pc.if_else(is_null, nothing, plain), values)
    values = pc.if_else(pc.equal(pc.binary_length(values), 0), nothing, values)
    offsets = np.concatenate([[0], np.cumsum(read.lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values), irregular


def _parse(text: str) -> list[str | None] | None:
    """Return the entries of a list in JSON as texts, None if it is none of single values."""
    try:
        found = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or any(isinstance(one, list | dict) for one in found):
        return None
    entries = [str(one).lower() if isinstance(one, bool) else one for one in found]
    return [None if one is None or one == "" else str(one) for one in entries]


def _flags(flags: pa.Array) -> Mask:
    return np.array(flags.fill_null(False).to_numpy(zero_copy_only=False))

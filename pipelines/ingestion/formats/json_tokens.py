# SPDX-License-Identifier: MIT
"""Lines of JSON checked and prepared for a parser, a whole block at once with NumPy.

A parser of JSON guesses types: 2^53 + 1 beside 1.5 becomes a float and loses a digit. Here every
number, `true` and `false` gets quotes, so that each value is read as its text. On the way each line
is proven to be one object, so that a bad line costs only itself.

Shapes: N bytes, L lines that are not blank, Q quotes, S structural bytes, T bare words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.ingestion.formats.records import FILLED, filled_lines, line_ends
from pipelines.ingestion.parsing import pc

MAX_DEPTH = 64
_QUOTE, _BACKSLASH, _COLON, _CLOSE = b'"\\:}'
_VALUE = r"^(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null)$"
_NOT_FINITE = r"^[+-]?(NaN|nan|Infinity|inf)$"
_SPACE, _BARE, _STRUCTURE = 0, 1, 2
_CLASS = np.full(256, _BARE, np.uint8)
_CLASS[list(b' \t\r\n"')] = _SPACE
_CLASS[list(b"{}[]:,")] = _STRUCTURE
_DEPTH = np.zeros(256, np.int64)
_DEPTH[list(b"{[")], _DEPTH[list(b"}]")] = 1, -1


@dataclass(frozen=True, kw_only=True)
class Quoted:
    """The lines of a block, those that are not one object taken out.

    Args:
        text: the other lines, every value in quotes.
        bounds: (G + 1,) where each of these G lines begins in `text`, and the end.
        lines: (G,) their numbers among the L lines of the block.
        bad: (line, what is wrong, text) of the lines taken out.
        source: the block.
        spans: (G, 2) where each of the G lines begins and ends in it.
    """

    text: memoryview
    bounds: NDArray[np.int64]
    lines: NDArray[np.int64]
    bad: list[tuple[int, str, bytes]]
    source: bytes | memoryview
    spans: NDArray[np.int64]

    def line(self, place: int) -> bytes:
        """Return one of the G lines as the file has it."""
        start, stop = self.spans[place].tolist()
        return bytes(self.source[start:stop])


def quote_values(text: bytes | memoryview, max_line_bytes: int) -> Quoted:
    """Check the lines of a block, each of them whole, and put quotes around bare values."""
    array = np.frombuffer(text, np.uint8)
    block = _Block(array)
    block.check_lengths(max_line_bytes)
    cuts = block.check()  # (2T,) where quotes go
    lines = np.flatnonzero(~block.is_bad)
    places = cuts + np.arange(len(cuts))
    out = np.full(len(array) + len(cuts), _QUOTE, np.uint8)
    is_old = np.ones(len(out), np.bool_)
    is_old[places] = False
    out[is_old] = array
    starts = (block.starts + np.searchsorted(cuts, block.starts, "left"))[lines]
    stops = (block.ends + np.searchsorted(cuts, block.ends, "right"))[lines] + 1
    bounds = np.concatenate([[0], np.cumsum(stops - starts)])
    if bounds[-1] != len(out):  # lines are bad or blank
        change = np.zeros(len(out) + 1, np.int8)
        change[starts] += 1
        change[stops] -= 1
        out = out[np.cumsum(change[:-1], dtype=np.int8) > 0]
    bad = [
        (line, why, bytes(text[block.starts[line] : block.ends[line]]))
        for line, why in sorted(block.whys.items())
    ]
    spans = np.stack([block.starts, block.ends], 1)[lines]
    return Quoted(text=out.data, bounds=bounds, lines=lines, bad=bad, source=text, spans=spans)


class _Block:
    """The lines of a block and what is wrong with them; the first thing found is kept."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array
        ends = line_ends(array, is_last=True)
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
        if len(ends):
            is_filled = filled_lines(array, starts)
            starts, ends = starts[is_filled], ends[is_filled]
        self.starts, self.ends = starts, ends  # (L,)
        self.is_bad = np.zeros(len(ends), np.bool_)
        self.whys: dict[int, str] = {}

    def check_lengths(self, limit: int) -> None:
        """Find the lines that are too long, wherever the block that holds them begins."""
        long = np.flatnonzero(self.ends - self.starts > limit)
        self._blame(long, f"a row longer than {limit:,} bytes")

    def check(self) -> NDArray[np.int64]:
        """Find the bad lines; return where the quotes of the bare values go."""
        array = self.array
        is_inside = self._strings()
        controls = np.flatnonzero(is_inside & (array < ord(" ")))
        self._blame(self._line_of(controls), "not JSON: a control character in a string")
        classes = np.where(is_inside, _SPACE, _CLASS[array])  # (N,)
        structure = np.flatnonzero(classes == _STRUCTURE)  # (S,)
        self._check_objects(structure)
        cuts = self._words(classes == _BARE, structure)
        self._check_alone(structure)
        return cuts

    def _strings(self) -> NDArray[np.bool_]:
        """Return (N,) the bytes inside strings, their first quote among them."""
        array = self.array
        quotes = np.flatnonzero(array == _QUOTE)  # (Q,)
        slashes = np.flatnonzero(array == _BACKSLASH)
        if len(slashes) and len(quotes):
            begins = np.concatenate([[True], np.diff(slashes) > 1])
            begins = np.maximum.accumulate(np.where(begins, slashes, 0))  # of each one's run
            place = np.maximum(np.searchsorted(slashes, quotes) - 1, 0)
            follows = slashes[place] == quotes - 1
            quotes = quotes[~(follows & ((quotes - begins[place]) % 2 == 1))]
        counts = np.searchsorted(quotes, self.ends) - np.searchsorted(quotes, self.starts)
        unclosed = np.flatnonzero(counts % 2 == 1)
        self._blame(unclosed, "not JSON: a string is not closed")
        turns = np.zeros(len(array), np.uint8)
        turns[quotes] = 1
        turns[self.ends[unclosed]] = 1
        return (np.cumsum(turns, dtype=np.uint8) & 1).astype(np.bool_)

    def _check_objects(self, structure: NDArray[np.int64]) -> None:
        """Check that each line's brackets make one object."""
        first = np.searchsorted(structure, self.starts)
        counts = np.searchsorted(structure, self.ends) - first
        self._blame(np.flatnonzero(counts == 0), "not a JSON object")
        some = np.flatnonzero(counts)
        if not len(some):
            return
        first, counts = first[some], counts[some]
        steps = _DEPTH[self.array[structure]]
        depth = np.cumsum(steps)
        depth -= np.repeat(depth[first] - steps[first], counts)  # (S,) within the line
        last = first + counts - 1
        is_object = (self.array[structure[first]] == ord("{")) & (depth[last] == 0)
        is_object &= self.array[structure[last]] == _CLOSE
        depth[last] += 1
        is_object &= np.minimum.reduceat(depth, first) >= 1
        self._blame(some[~is_object], "not one JSON object")
        too_deep = np.maximum.reduceat(depth, first) > MAX_DEPTH
        self._blame(some[too_deep], f"nested more than {MAX_DEPTH} deep")

    def _check_alone(self, structure: NDArray[np.int64]) -> None:
        """Check that a line has nothing but blanks before its first bracket and after its last.

        Arrow's parser takes each value of a line for a row, and a null before an object ends the
        process.
        """
        lines = np.flatnonzero(~self.is_bad)
        starts, ends = self.starts[lines], self.ends[lines]
        heads = structure[np.searchsorted(structure, starts)] if len(lines) else starts
        tails = structure[np.searchsorted(structure, ends) - 1] if len(lines) else ends
        if (heads == starts).all() and (tails == ends - 1).all():
            return
        before = np.concatenate([[0], np.cumsum(FILLED[self.array], dtype=np.int64)])  # (N + 1,)
        is_alone = (before[heads] == before[starts]) & (before[ends] == before[tails + 1])
        self._blame(lines[~is_alone], "not one JSON object")

    def _words(self, is_bare: NDArray[np.bool_], structure: NDArray[np.int64]) -> NDArray[np.int64]:
        """Check the bare words; return (2T,) the bounds of those that are no null."""
        if not is_bare.any():
            return np.empty(0, np.int64)
        # Where bare words begin and end, in turn. The block ends with a line's end, which is none.
        bounds = np.flatnonzero(is_bare[1:] != is_bare[:-1]) + 1
        bounds = np.concatenate([[0], bounds]) if is_bare[0] else bounds
        starts, ends = bounds[::2], bounds[1::2]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.array[is_bare])]
        words = pa.Array.from_buffers(pa.string(), len(starts), buffers)  # (T,)
        firsts = self.array[starts]
        is_plain = _flags(pc.ascii_is_decimal(words))
        is_plain &= (firsts != ord("0")) | (ends - starts == 1)
        others = np.flatnonzero(~is_plain)
        texts = words.take(pa.array(others))
        wrong = others[~_flags(pc.match_substring_regex(texts, pattern=_VALUE))]
        if len(wrong):
            texts = words.take(pa.array(wrong))
            not_finite = _flags(pc.match_substring_regex(texts, pattern=_NOT_FINITE))
            why = "not JSON: NaN and Infinity are no JSON numbers; write null"
            self._blame(self._line_of(starts[wrong[not_finite]]), why)
            why = "not JSON: a bare word that is no number, true, false or null"
            self._blame(self._line_of(starts[wrong]), why)
        after = np.append(structure, len(self.array) - 1)[np.searchsorted(structure, ends)]
        keys = self.array[after] == _COLON
        self._blame(self._line_of(starts[keys]), "not JSON: a key without quotes")
        is_value = firsts != ord("n")
        return np.stack([starts[is_value], ends[is_value]], 1).ravel()

    def _line_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.ends, places)

    def _blame(self, lines: NDArray[np.int64], why: str) -> None:
        fresh = np.unique(lines)
        fresh = fresh[~self.is_bad[fresh]]
        self.is_bad[fresh] = True
        self.whys.update(dict.fromkeys(fresh.tolist(), why))


def _flags(flags: pa.Array) -> NDArray[np.bool_]:
    return np.array(flags.to_numpy(zero_copy_only=False), np.bool_)

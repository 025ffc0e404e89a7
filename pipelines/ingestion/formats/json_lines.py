# SPDX-License-Identifier: MIT
"""JSON Lines: one object a line.

Each value is read as its text, and an array as a list of texts; what they become is decided by the
schema, as with CSV. A key that a line lacks is null. `records.py` cuts blocks into lines,
`json_tokens.py` checks them, Arrow parses a block at once. Where a block does not parse, Arrow says
at which line; what is before and after it is read again. Keys that nobody reads are not looked at,
beyond their syntax.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from pipelines.ingestion.formats.json_tokens import Quoted, quote_values
from pipelines.ingestion.formats.records import Cutter, Dialect, Records
from pipelines.ingestion.formats.streams import check_text, read_text, with_last
from pipelines.ingestion.source import RawRows, SourceConfig, first_line
from trainer.data.discovery import printable

_HEAD_BYTES = 1 << 20
_TYPES = {
    "text": pa.string(),
    "list": pa.list_(pa.string()),
    "nested": pa.struct([]),
    "null": pa.null(),
}
_CHANGED = re.compile(r"Column\(/(.*?)((?:/\[\])*)\) changed from (\w+) to (\w+)")
_TWICE = re.compile(r"Column\(/(.*)\) was specified twice")
_ROW = re.compile(r" in row (\d+)$")
_TEXT_SHOWN = 1_000
# Of one block, to find its bad lines: about two seconds.
_MOST_READS = 8000
_CROWDED = " (in this line or one near it: too many bad lines to read each alone)"


class JsonLines:
    """One file of JSON objects, its keys known from its first lines, its rows not read yet.

    `config.columns` adds keys that the first lines lack.

    Raises:
        ValueError: the file is empty, is no text, or does not hold one object a line.
    """

    is_text = True

    def __init__(self, path: str, config: SourceConfig) -> None:
        self.path, self.config = path, config
        self.notes: list[str] = []
        self._max_line_bytes = max(config.block_bytes, config.max_field_bytes)
        check_text(path)
        found = self._read_shapes()
        shapes = found | {name: "null" for name in config.columns if name not in found}
        self.schema = pa.schema([(name, _TYPES[shape]) for name, shape in shapes.items()])
        self._open = {name for name, shape in shapes.items() if shape == "null"}
        self._types = {
            name: pa.string() if shape == "null" else _TYPES[shape]
            for name, shape in shapes.items()
        }

    def rows(self, columns: list[str]) -> Iterator[RawRows]:
        """Yield the rows in order, with `columns` only."""
        nested = [name for name in columns if self._types[name] == _TYPES["nested"]]
        if nested:
            raise ValueError(
                f"{printable(self.path)}: column {nested[0]!r}: expected a value or a list of "
                "values, got objects or lists inside of it; write what is needed as a column of "
                "its own, as in jq -c '. + {city: .address.city}'"
            )
        cutter = Cutter(Dialect.of_lines(self._max_line_bytes))
        for block, is_last in with_last(read_text(self.path, self.config)):
            records = cutter.cut(block, is_last=is_last)
            if len(records.numbers) or records.malformed:
                yield self._parse(records, columns)

    def _read_shapes(self) -> dict[str, str]:
        """Return what the keys of the first lines hold mostly: `text`, `list`, `nested`, `null`."""
        parts, size, limit = [], 0, max(_HEAD_BYTES, self.config.block_bytes)
        is_whole = True
        for block, is_last in with_last(read_text(self.path, self.config)):
            parts.append(block)
            size += len(block)
            if size >= limit:
                is_whole = is_last
                break
        head = b"".join(parts)
        if head.lstrip()[:1] == b"[":
            raise ValueError(
                f"{printable(self.path)}: expected one JSON object a line, got an array; write "
                "its entries as lines: jq -c '.[]' FILE > FILE.jsonl"
            )
        cut = head.rfind(b"\n", 0, _HEAD_BYTES) + 1
        if len(head) > _HEAD_BYTES and cut:
            head = head[:cut]
        elif not is_whole:
            head = head[: head.rfind(b"\n") + 1]
        found = _shapes(head)
        if found:
            return found
        raise ValueError(
            f"{printable(self.path)}: expected one JSON object a line, got none; write objects of "
            "several lines as one line each: jq -c . FILE > FILE.jsonl"
        )

    def _parse(self, records: Records, columns: list[str]) -> RawRows:
        """Return the lines of a block as columns of text and lists of text."""
        quoted = quote_values(records.text, self._max_line_bytes)
        numbers = records.numbers
        malformed = list(records.malformed)
        malformed += [(int(numbers[line]), why, _shown(text)) for line, why, text in quoted.bad]
        read = _Reader(quoted, self._explicit(columns))
        if not read.all() and self._settle(quoted):
            read = _Reader(quoted, self._explicit(columns))
            read.all()
        if read.failed:
            read.around(0, len(quoted.lines))
        for place, why in read.bad:
            malformed.append((int(numbers[quoted.lines[place]]), why, _shown(quoted.line(place))))
        kept = np.delete(quoted.lines, [place for place, _ in read.bad])
        table = pa.concat_tables(read.tables) if read.tables else read.schema.empty_table()
        batch = table.combine_chunks().to_batches()
        found = batch[0] if batch else pa.RecordBatch.from_pylist([], read.schema)
        return RawRows(self._of_known_type(found, columns), numbers[kept], malformed)

    def _explicit(self, columns: list[str]) -> pa.Schema:
        names = columns or self.schema.names[:1]
        types = {name: self._types[name] for name in names}
        return pa.schema(
            [(n, pa.string() if t == _TYPES["nested"] else t) for n, t in types.items()]
        )

    def _settle(self, quoted: Quoted) -> bool:
        """Look whether a column that was null so far holds lists; return whether one does."""
        if not self._open:
            return False
        found = _shapes(bytes(quoted.text))
        lists = {name for name in self._open if found.get(name) == "list"}
        self._types |= dict.fromkeys(lists, _TYPES["list"])
        self._open -= lists
        return bool(lists)

    def _of_known_type(self, found: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
        """Return `columns`; those that have been null so far have no type yet."""
        arrays = []
        for name in columns:
            array = found.column(name)
            if name in self._open and array.null_count == len(array):
                array = pa.nulls(len(array))
            else:
                self._open.discard(name)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, names=columns)


class _Reader:
    """Reads the lines of a block with Arrow.

    Attributes: tables, of the good lines in order; bad, (place among the lines, what is wrong).
    """

    def __init__(self, quoted: Quoted, schema: pa.Schema) -> None:
        self.quoted, self.schema = quoted, schema
        self.tables: list[pa.Table] = []
        self.bad: list[tuple[int, str]] = []
        self.failed = False
        self._reads = 0
        self._row = -1  # the line that the last read stopped at, as Arrow counts

    def all(self) -> bool:
        """Read the whole block at once; return whether every line is good."""
        if len(self.quoted.lines):
            self.failed = bool(self._read(0, len(self.quoted.lines)))
        return not self.failed

    def around(self, first: int, stop: int) -> None:
        """Read the lines before, between and after the bad ones, at which Arrow stops.

        Where it does not say at which line, the lines are halved. After `_MOST_READS` reads of a
        block all other lines are bad, as in `halve`.
        """
        while first < stop and self._reads <= _MOST_READS:
            why = self._read(first, stop)
            if not why:
                return
            bad = first + self._row
            if not first <= bad < stop:
                self.halve(first, stop)
                return
            if bad > first and self._read(first, bad):
                self.halve(first, bad)  # a line with two objects in it counts twice
                first = bad
                continue
            self.bad.append((bad, why))
            first = bad + 1
        rest = "not read: too many bad lines near it to read each line alone"
        self.bad += [(line, rest) for line in range(first, stop)]

    def halve(self, first: int, stop: int) -> None:
        """Read the halves of lines that do not parse together, down to single bad lines.

        After `_MOST_READS` reads of a block, all lines of a part that does not parse are bad: a
        block that is mostly damaged must not take minutes.
        """
        middle = (first + stop) // 2
        for begin, end in ((first, middle), (middle, stop)):
            why = self._read(begin, end) if end > begin else ""
            if why and (end - begin == 1 or self._reads > _MOST_READS):
                why += _CROWDED if end - begin > 1 else ""
                self.bad += [(line, why) for line in range(begin, end)]
            elif why:
                self.halve(begin, end)

    def _read(self, first: int, stop: int) -> str:
        """Read some lines; return what is wrong with one of them, if anything is."""
        self._reads += 1
        bounds = self.quoted.bounds
        text = self.quoted.text[bounds[first] : bounds[stop]]
        try:
            table = pj.read_json(
                pa.BufferReader(pa.py_buffer(text)),
                pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
                pj.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior="ignore"),
            )
        except pa.ArrowException as error:
            message = first_line(error)
            found = _ROW.search(message)
            self._row = int(found[1]) if found else -1
            return _reason(message)
        if table.num_rows != stop - first:
            return "not one JSON object"
        self.tables.append(table.select(self.schema.names))
        return ""


def _reason(message: str) -> str:
    """Return what Arrow says of a line, in the words of the other reasons."""
    if found := _CHANGED.search(message):
        name, inside, expected, got = found.groups()
        where = " in its list" if inside else ""
        return f"column {name!r}: expected {_named(expected)}{where}, got {_named(got)}"
    if found := _TWICE.search(message):
        return f"key {found[1]!r} appears more than once"
    if "Column()" in message:
        return "not one JSON object"
    message = _ROW.sub("", message.removeprefix("JSON parse error: "))
    return f"not JSON: {message.rstrip('.')}"


def _named(word: str) -> str:
    words = {"string": "a single value", "array": "a list", "object": "an object"}
    return words.get(word, word)


def _shapes(text: bytes) -> dict[str, str]:
    """Return the keys of objects in lines, and what most of their values that are no null are."""
    counts: dict[str, Counter[str]] = {}
    decode = json.JSONDecoder(parse_int=str).decode
    for line in text.splitlines():
        try:
            found = decode(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        for name, value in found.items() if isinstance(found, dict) else ():
            if name not in counts:
                counts[name] = Counter()
            if value is not None:
                counts[name][_shape(value)] += 1
    return {name: seen.most_common(1)[0][0] if seen else "null" for name, seen in counts.items()}


def _shape(value: object) -> str:
    if isinstance(value, list):
        return "nested" if any(isinstance(one, list | dict) for one in value) else "list"
    return "nested" if isinstance(value, dict) else "text"


def _shown(text: bytes) -> str:
    return text[:_TEXT_SHOWN].decode("utf-8", "replace").rstrip("\r\n")

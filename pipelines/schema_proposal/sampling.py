# SPDX-License-Identifier: MIT
"""A sample of a log, read a column at a time: little memory and time, however large the log is.

Rows come from row groups spread evenly over the whole log (of text files: from the beginning of
some), so that a day that differs is seen. Parquet footers say how many rows there are; of text
files it is reckoned from the bytes that the sample took, and unknown where they are compressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from pipelines.ingestion.formats import open_source
from pipelines.ingestion.formats.streams import compression_of
from pipelines.ingestion.parsing import looks_like, parse_integers
from pipelines.ingestion.source import SourceConfig, first_line
from pipelines.ingestion.sources import list_sources
from pipelines.ingestion.text_lists import BRACKETED, split_text
from trainer.data.columns import is_list, kind_of, read_lists
from trainer.data.discovery import day_of, openable, printable

pc: Any = pyarrow.compute
_ROWS = 131_072
_FILES = 64
_TEXT_FILES = 8
_PLACES = 64
# A column of the sample stops at so many bytes: long histories are sampled less.
_COLUMN_BYTES = 64 << 20
_SEPARATORS = ("|", ";", ",")
_DELIMITERS = (";", "\t", "|", ",")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Columns of some rows of a log.

    columns: arrays by name; all start at the same row, and a long one may end earlier. unread: the
    columns that were left out, with the reason. rows: of the sample. total_rows: of the log, 0
    where nothing tells. lists: the separator of each text column that holds lists. is_text:
    whether the log has to be ingested first.
    """

    columns: dict[str, pa.Array]
    unread: dict[str, str]
    rows: int
    total_rows: int
    read_files: int
    files: int
    days: int
    is_text: bool = False
    lists: dict[str, str]

    @property
    def scale(self) -> float:
        """Rows of the log to one of the sample."""
        return max(self.total_rows / self.rows, 1.0) if self.rows else 1.0


def read_sample(paths: list[str], config: SourceConfig | None = None, rows: int = _ROWS) -> Sample:
    """Read about `rows` rows of the files, folders and globs `paths`.

    Raises:
        ValueError: no file, text and Parquet mixed, a file that is damaged, or no rows.
    """
    config = config or SourceConfig()
    found = sorted(list_sources(paths, config.format), key=lambda path: (day_of(path), path))
    days = len({day_of(path) for path in found} - {""})
    kept = [found[i] for i in _spread(len(found), _FILES)]
    text = [path for path in kept if open_source(path, config).is_text]
    if text and len(text) < len(kept):
        other = next(path for path in kept if path not in text)
        raise ValueError(
            f"{text[0]} is text and {other} is Parquet: expected one kind of files; pass one of "
            "them, or a glob"
        )
    sample = _read_text(kept, config, rows) if text else _read_parquet(kept, rows)
    if not sample.rows:
        raise ValueError(
            f"{paths[0]}: expected rows, got {len(found)} files without any; check the log"
        )
    total = round(sample.total_rows * len(found) / len(kept))
    values = {**vars(sample), "total_rows": total, "files": len(found), "days": days}
    return Sample(**values)


def _spread(length: int, count: int) -> list[int]:
    """Return at most `count` positions below `length`, evenly spread, both ends among them."""
    if length <= count:
        return list(range(length))
    return sorted({round(i) for i in np.linspace(0, length - 1, count)})


def _read_parquet(paths: list[str], rows: int) -> Sample:
    try:
        files = [pq.ParquetFile(openable(path), memory_map=True) for path in paths]
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a file of {Path(paths[0]).parent} is no Parquet: {error}") from error
    groups = [
        (file, number, file.metadata.row_group(number).num_rows)
        for file in files
        for number in range(file.metadata.num_row_groups)
    ]
    groups = [group for group in groups if group[2]]
    total = sum(group[2] for group in groups)
    whole = total <= rows
    chosen = groups if whole else [groups[i] for i in _spread(len(groups), _PLACES)]
    each = -(-rows // max(len(chosen), 1))
    pieces = [(file, number, size if whole else min(size, each)) for file, number, size in chosen]
    columns, unread = {}, {}
    for name in dict.fromkeys(name for file in files for name in file.schema_arrow.names):
        array = _read_column(name, files, paths, pieces)
        if isinstance(array, str):
            unread[name] = array
        else:
            columns[name] = array
    for file in files:
        file.close()
    return Sample(
        columns=columns,
        unread=unread,
        rows=sum(size for _, _, size in pieces),
        total_rows=total,
        read_files=len(paths),
        files=len(paths),
        days=0,
        lists={},
    )


def _read_column(
    name: str,
    files: list[pq.ParquetFile],
    paths: list[str],
    pieces: list[tuple[pq.ParquetFile, int, int]],
) -> pa.Array | str:
    """Return a column of the sample, or why it cannot be used."""
    types = []
    if not name:
        return "it has no name"
    for file, path in zip(files, paths, strict=True):
        times = file.schema_arrow.names.count(name)
        if times > 1:
            return f"{Path(path).name} has {times} columns of that name"
        if name not in file.schema_arrow.names:
            return f"{Path(path).name} has no such column, and every file must"
        types.append(file.schema_arrow.field(name).type)
    known = [i for i, type_ in enumerate(types) if kind_of(_entry(type_)) != "null"]
    if not known:
        return "it holds nothing but nulls"
    family = {_family(types[i]) for i in known}
    if len(family) > 1:
        other = next(i for i in known if _family(types[i]) != _family(types[known[0]]))
        return (
            f"it is {types[known[0]]} in {Path(paths[known[0]]).name} and {types[other]} in "
            f"{Path(paths[other]).name}"
        )
    if not family <= _READABLE:
        return f"nothing reads a column of type {types[known[0]]}"
    chunks, size = [], 0
    for file, number, rows in pieces:
        batches = file.iter_batches(rows, row_groups=[number], columns=[name])
        column = next(batches).column(name)  # a struct's field may have the same path
        size += column.nbytes
        chunks.append(_plain(column))
        if size > _COLUMN_BYTES:
            break
    if not chunks:
        return "there are no rows"
    held = (chunk.type for chunk in chunks if kind_of(_entry(chunk.type)) != "null")
    type_ = next(held, chunks[0].type)
    if any(chunk.type != type_ for chunk in chunks):
        wide = type_
        if any("float" in (kind_of(one), kind_of(_entry(one))) for one in types):
            wide = pa.large_list(pa.float64()) if is_list(type_) else pa.float64()
        chunks = [chunk.cast(wide, safe=False) for chunk in chunks]
    return pa.concat_arrays(chunks)


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionaries, in lists neither, and without views."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    if column.type in views:
        return column.cast(views[column.type])
    if is_list(column.type) and (
        column.type.value_type in views or pa.types.is_dictionary(column.type.value_type)
    ):
        lists = read_lists(column)
        ends = pa.array(np.concatenate([[0], np.cumsum(lists.lengths)]))
        mask = column.is_null() if column.null_count else None
        return pa.LargeListArray.from_arrays(ends, _plain(lists.values()), mask=mask)
    return column


# No id is a decimal, so that a column that is one in some files is none that all have.
_SCALARS = ("number", "decimal", "text")
_READABLE = {*_SCALARS, "date", "timestamp", *(f"list of {one}" for one in _SCALARS)}


def _entry(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if is_list(type_) else type_


def _family(type_: pa.DataType) -> str:
    kind = kind_of(type_)
    if kind == "list":
        return f"list of {_family(type_.value_type)}"
    return "number" if kind in ("integer", "float") else kind


def _read_text(paths: list[str], config: SourceConfig, rows: int) -> Sample:
    """Read the beginnings of some text files; what looks like numbers or lists becomes them."""
    chosen = [paths[i] for i in _spread(len(paths), _TEXT_FILES)]
    batches, taken, total, compressed, unread = [], 0, 0.0, False, {}
    for path in chosen:
        source, got, size = open_source(path, config), 0, 0
        nested = [field.name for field in source.schema if pa.types.is_struct(field.type)]
        unread |= dict.fromkeys(nested, "it holds objects, or lists in lists")
        for part in source.rows([name for name in source.schema.names if name not in nested]):
            records = part.records.slice(0, -(-rows // len(chosen)) - got)
            batches.append(records)
            got, size = got + len(records), size + records.nbytes
            if got * len(chosen) >= rows:
                # Text lies in memory about as in its file: an offset more, a separator less.
                total += max(got, got * Path(path).stat().st_size / max(size, 1))
                compressed |= bool(compression_of(path))
                break
        else:
            total += got
        taken += got
    names = set(batches[0].schema.names) if batches else set()
    if any(set(batch.schema.names) != names for batch in batches):
        raise ValueError(f"{chosen[0]} and others: expected the same columns in every file")
    if len(names) == 1:
        (only,) = names
        other = next((one for one in _DELIMITERS if one in only), "")
        if other:
            said = "tab" if other == "\t" else other
            raise ValueError(
                f"{printable(chosen[0])}: expected columns, got one with the name {only[:80]!r}; "
                f"say --delimiter '{said}'"
            )
    tables = [pa.Table.from_batches([b.select(batches[0].schema.names)]) for b in batches]
    try:  # a column of JSON has no type where all is null
        table = pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise ValueError(
            f"{printable(chosen[0])} and others: expected columns of the same types in every file: "
            f"{first_line(error)}"
        ) from error
    columns, lists = {}, {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        array = column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)
        if pa.types.is_null(array.type):
            unread[name] = "it holds nothing but nulls"
            continue
        columns[name], separator = _typed_column(array)
        lists |= {name: separator} if separator else {}
    return Sample(
        columns=columns,
        unread=unread,
        rows=taken,
        total_rows=0 if compressed else round(total * len(paths) / len(chosen)),
        read_files=len(chosen),
        files=len(paths),
        days=0,
        is_text=True,
        lists=lists,
    )


def _typed_column(array: pa.Array) -> tuple[pa.Array, str]:
    """Return a column of texts, or of lists of them, with its type, and what separates lists."""
    separator = "" if is_list(array.type) else separator_of(array)
    if separator:
        array, _ = split_text(array, separator)
    if is_list(array.type):
        lists = read_lists(array)
        ends = pa.array(np.concatenate([[0], np.cumsum(lists.lengths)]).astype(np.int32))
        mask = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(ends, _typed(lists.values()), mask=mask), separator
    return _typed(array), separator


def _typed(text: pa.Array) -> pa.Array:
    """Return strings as the numbers that they look like, all of them or none."""
    kind = looks_like(text)
    if kind == "int":
        return parse_integers(text)[0]
    return text.cast(pa.float64()) if kind == "float" else text


def _share(flags: pa.Array) -> float:
    return pc.mean(flags.cast(pa.float64())).as_py()


def separator_of(text: pa.Array) -> str:
    """Return what separates the entries of lists in a text column, or nothing if it has none.

    Lists are short entries, separated in a fifth of the rows: a title may hold a comma. A bar is in
    little else, and young users' histories have one entry: there a hundredth is enough.
    """
    if pa.types.is_binary(text.type) or pa.types.is_large_binary(text.type):
        return ""
    values = text.drop_null()
    if len(values) and _share(pc.match_substring_regex(values, pattern=BRACKETED)) > 0.9:
        return ","  # as JSON and Python write lists
    for separator in _SEPARATORS if len(values) else ():
        parts = pc.split_pattern(values, pattern=separator)
        several = pc.greater(pc.list_value_length(parts), 1)
        entries = pc.utf8_length(pc.list_flatten(parts))
        least = 0.01 if separator == "|" else 0.2
        if pc.mean(several).as_py() >= least and pc.mean(entries).as_py() <= 24:
            spaced = pc.mean(pc.match_substring(values, pattern=separator + " ")).as_py()
            if spaced < 0.1:
                return separator
    return ""

# SPDX-License-Identifier: MIT
"""The values of a column of a log, counted, and the slices that they make.

The most frequent ids are slices, the others one more; numbers that are not ids are cut into bins of
about equal rows. Texts that ingestion has hashed are named by what it notes of them.

Shapes: B examples, V values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embeddings.schema.lifetime import MISSING_ID
from embeddings.schema.plain import suggest
from embeddings.schema.schema import Schema
from models.batch import Batch
from trainer.data.columns import Values, kind_of, to_floats, to_integers
from trainer.data.files import LogFile
from trainer.data.transforms import FIRST_DAY, LAST_DAY, to_days

DAY = "day"
_TOP = 20
_BINS = 10
_MAX_DAYS = 1_000
_MAX_VALUES = 1_000_000
_IDS = ("text", "date")
_RESERVED = ("others", "null")
# What `pipelines.ingest` writes beside a day's files; `texts` are the hashes by column and text.
_NOTES = "_manifest.json"


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """How a column's values map to slices.

    Args:
        column: The column's name.
        names: Of the slices, in order; the last one is of nulls.
        keys: Ids in ascending order. Other ids belong to the last slice but one.
        codes: The slice of each id of `keys`.
        edges: Between bins of numbers, in place of keys and codes.
    """

    column: str
    names: tuple[str, ...]
    keys: NDArray[np.int64]
    codes: NDArray[np.int64]
    edges: NDArray[np.float64] | None = None

    def of(self, batch: Batch) -> NDArray[np.int64]:
        """Return the slice (B,) of each row of a batch of the column's own loader."""
        null = len(self.names) - 1
        if self.edges is not None:
            values = batch.dense[:, 0].double().numpy()
            return np.where(np.isnan(values), null, np.searchsorted(self.edges, values, "right"))
        values = batch.sparse.values().numpy()
        place = np.minimum(np.searchsorted(self.keys, values), len(self.keys) - 1)
        found = np.where(self.keys[place] == values, self.codes[place], null - 1)
        return np.where(values == MISSING_ID, null, found)


def find_slices(column: str, files: Sequence[LogFile], schema: Schema) -> Slicing:
    """Count a column's values in the test files and choose the slices.

    Raises:
        ValueError: there is no such column, it has no single value a row, a number is not finite,
            or it is text in one file and a number in another.
    """
    kind = _kind(column, files)
    used = {one.column for one in schema.sparse if one.transform in ("hash", "identity")}
    as_ids = kind in _IDS or (kind == "integer" and column in {*used, schema.user})
    values, counts = _count(column, files, kind)
    if kind == "float" and not (np.abs(values) <= np.finfo(np.float32).max).all():
        bad = values[np.argmax(np.abs(values))]
        raise ValueError(
            f"--slice-by {column}: expected finite 32-bit numbers, got {bad:g} in the test rows; "
            "choose another column, or write such values as nulls"
        )
    unsigned = kind == "integer" and _unsigned(column, files)
    if not as_ids and len(values) > _TOP:
        if unsigned:  # as numbers, for which the loader takes them
            values = values.view(np.uint64).astype(np.float64)
            values, counts = values[order := np.argsort(values)], counts[order]
        shares = np.cumsum(counts) / counts.sum()
        edges = _narrow(np.interp(np.linspace(0, 1, _BINS + 1)[1:-1], shares, values))
        ends = _written(edges)
        names = [f"below {ends[0]}", *(f"{a} to {b}" for a, b in itertools.pairwise(ends))]
        return _bins(column, edges, [*names, f"from {ends[-1]}"])
    if kind == "float":  # few: each is a slice
        values = _narrow(values)
        return _bins(column, values[1:], _written(values))
    top = np.argsort(-counts, kind="stable")[:_TOP]
    ids = values[top]
    if kind in _IDS:
        labels = _names(column, files, ids)
    else:
        texts = _noted(column, files)
        shown = (ids.view(np.uint64) if unsigned else ids).astype(str).tolist()
        labels = [texts.get(id_) or own for id_, own in zip(ids.tolist(), shown, strict=True)]
    order = np.argsort(ids)
    return Slicing(
        column=column,
        names=(*(repr(one) if one in _RESERVED else one for one in labels), *_RESERVED),
        keys=ids[order] if len(ids) else np.array([MISSING_ID]),
        codes=order if len(ids) else np.zeros(1, np.int64),
    )


def has_column(column: str, files: Sequence[LogFile]) -> bool:
    """Return whether the first file has a column of that name."""
    return any(column in pq.read_schema(file.path).names for file in files[:1])


def find_days(column: str, files: Sequence[LogFile]) -> NDArray[np.int64]:
    """Return the days since 1970, ascending, of the test files' times.

    Raises:
        ValueError: a day is not between 1990 and 2099, or there are too many to be slices.
    """
    days = np.empty(0, np.int64)
    for chunk in _chunks(column, files):
        days = np.union1d(days, to_days(Values(chunk.drop_null())))
    wrong = days[(days < FIRST_DAY) | (days > LAST_DAY)]
    if len(wrong):
        raise ValueError(
            f"--slice-by {DAY}: column {column!r} (the schema's timestamp) gives a day "
            f"{wrong[0]:,} days after 1970-01-01, which is not between 1990 and 2099; times are "
            "milliseconds since 1970, or timestamps"
        )
    if len(days) > _MAX_DAYS:
        raise ValueError(
            f"--slice-by {DAY}: expected at most {_MAX_DAYS:,} days, got {len(days):,} in column "
            f"{column!r} (the schema's timestamp); choose fewer test rows"
        )
    return days


def _kind(column: str, files: Sequence[LogFile]) -> str:
    """Return what a column holds in all files: text, date, integer, float, or nothing but nulls.

    Raises:
        ValueError: as `find_slices`.
    """
    kinds: dict[str, str] = {}
    for file in files:
        columns = pq.read_schema(file.path)
        times = columns.names.count(column)
        if not times:
            days = " (`day` needs dt=YYYY-MM-DD folders or a schema's timestamp)"
            days = days if column == DAY else ""
            raise ValueError(
                f"--slice-by {column}: {file.path} has no such column"
                f"{suggest(column, columns.names)}{days}; columns: {columns.names}"
            )
        type_ = columns.field(column).type if times == 1 else f"{times} columns of that name"
        kind = kind_of(type_) if isinstance(type_, pa.DataType) else ""
        if kind not in ("integer", "float", "decimal", "null", *_IDS):
            raise ValueError(
                f"--slice-by {column}: expected a column of ids or numbers, one a row, got "
                f"{type_} in {file.path}; choose another"
            )
        kinds.setdefault("float" if kind == "decimal" else kind, file.path)
    kinds.pop("null", None)
    if len(kinds) > 1 and kinds.keys() != {"integer", "float"}:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise ValueError(
            f"--slice-by {column}: expected one kind of values, got {one} in {first} and {other} "
            f"in {second}; choose another, or write one of the files again"
        )
    return "float" if "float" in kinds else next(iter(kinds), "null")


def _unsigned(column: str, files: Sequence[LogFile]) -> bool:
    """Return whether the column is of 64-bit numbers without a sign, whose bits ids keep."""
    return all(pq.read_schema(file.path).field(column).type == pa.uint64() for file in files)


def _bins(column: str, edges: NDArray[np.float64], names: Sequence[str]) -> Slicing:
    """Return slices of numbers between edges."""
    empty = np.empty(0, np.int64)
    return Slicing(column=column, names=(*names, "null"), keys=empty, codes=empty, edges=edges)


def _narrow(values: NDArray) -> NDArray[np.float64]:
    """Return the distinct values as the loader has them, in single precision."""
    return np.unique(values.astype(np.float32)).astype(np.float64)


def _written(values: NDArray[np.float64]) -> list[str]:
    """Return numbers in as few digits as tell them apart."""
    return next(
        texts
        for digits in range(6, 18)
        if len({*(texts := [f"{value:.{digits}g}" for value in values])}) == len(values)
    )


def _chunks(column: str, files: Sequence[LogFile]) -> Iterator[pa.Array]:
    for file in files:
        with pq.ParquetFile(file.path) as source:
            for batch in source.iter_batches(columns=[column]):
                yield batch.column(0)


def _count(column: str, files: Sequence[LogFile], kind: str) -> tuple[NDArray, NDArray]:
    """Return the distinct values of a column, ascending, and how many rows have each.

    Beyond a million values the rarer half is given up: they are no slices of their own.
    """
    exact = kind != "float"
    values, counts = np.empty(0, np.int64 if exact else np.float64), np.empty(0, np.int64)
    for chunk in _chunks(column, files):
        present = chunk.drop_null()
        found = to_integers(present, column)[0] if exact else to_floats(present)
        found = found if exact else found[~np.isnan(found)]
        new, times = np.unique(found, return_counts=True)
        values, place = np.unique(np.concatenate([values, new]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, times])).astype(np.int64)
        if len(values) > _MAX_VALUES:
            kept = np.sort(np.argsort(-counts, kind="stable")[: _MAX_VALUES // 2])
            values, counts = values[kept], counts[kept]
    return values, counts


def _names(column: str, files: Sequence[LogFile], ids: NDArray[np.int64]) -> list[str]:
    """Return the texts (or dates) that have these ids."""
    names: dict[int, str] = {}
    for chunk in _chunks(column, files):
        present = chunk.drop_null()
        found, first = np.unique(to_integers(present, column)[0], return_index=True)
        wanted = np.isin(found, ids)
        texts = present.take(pa.array(first[wanted])).to_pylist()
        names |= dict(zip(found[wanted].tolist(), map(str, texts), strict=True))
        if len(names) == len(ids):
            break
    return [names[one] for one in ids.tolist()]


def _noted(column: str, files: Sequence[LogFile]) -> dict[int, str]:
    """Return the texts of a column's hashes that stand beside the files."""
    texts: dict[int, str] = {}
    for folder in sorted({Path(file.path).parent for file in files}):
        if not (folder / _NOTES).is_file():
            continue
        try:
            found = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
        except ValueError:  # a mark of someone else's
            continue
        if isinstance(found, dict) and isinstance(found.get("texts"), dict):
            texts |= {number: text for text, number in found["texts"].get(column, {}).items()}
    return texts

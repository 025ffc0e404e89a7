# SPDX-License-Identifier: MIT
"""Decide once, for an output and all its days, which id columns are strings and which integers.

The same id must become the same number every day, so files do not decide separately. The newest
manifest of the output has priority, then Parquet footers, then the first rows of text files. A file
that disagrees is an error before anything is written.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from embeddings.schema.plain import suggest
from pipelines.ingestion.casting import kind_of_column
from pipelines.ingestion.parsing import looks_like
from pipelines.ingestion.partition import read_manifests
from pipelines.ingestion.rules import Rule
from pipelines.ingestion.source import Source
from pipelines.ingestion.text_lists import split_text
from trainer.data.columns import is_list
from trainer.data.discovery import printable
from trainer.data.hashing import is_text

_SAMPLED_FILES = 8
_SAMPLED_ROWS = 100_000


def check_columns(source: Source, columns: list[str]) -> None:
    """Check that a raw file has each of `columns` once.

    Raises:
        ValueError: a column is missing or repeated; all of them are named.
    """
    names = source.schema.names
    missing = [f"{column!r}{suggest(column, names)}" for column in columns if column not in names]
    repeated = [repr(column) for column in columns if names.count(column) > 1]
    if missing:
        way_out = "; is --delimiter right, or are --columns needed?" if source.is_text else ""
        raise ValueError(
            f"{printable(source.path)}: missing columns: {'; '.join(missing)}; the file has "
            f"{names}{way_out}"
        )
    if repeated:
        raise ValueError(
            f"{printable(source.path)}: columns that appear more than once: {repeated}"
        )


def decide_kinds(
    sources: list[Source],
    rules: dict[str, Rule],
    said: dict[str, str],
    recorded: dict[str, str],
    separator: str,
) -> dict[str, str]:
    """Return `string`, `int` or `float` for every column whose rule leaves it open.

    Args:
        said: kinds given by the user, for any file.
        recorded: kinds of the days in the output.

    Raises:
        ValueError: what is said, what is recorded and what the Parquet files hold disagree.
    """
    for column, kind in said.items():
        if recorded.get(column, kind) != kind:
            raise ValueError(
                f"--type {column}={kind}: the days in the output were written with "
                f"{recorded[column]}, and the same id would get two numbers; choose another output"
            )
    kinds = {column: kind for column, kind in recorded.items() if column in rules} | said
    holder = dict.fromkeys(recorded, "the days already in the output")
    for source in sources:
        for column, rule in () if source.is_text else rules.items():
            kind = _kind_in_file(source, rule, separator)
            if not rule.has_kind or not kind or column in said:
                continue
            if column not in kinds:
                kinds[column], holder[column] = kind, printable(source.path)
            elif kinds[column] != kind and rule.role != "number":
                raise ValueError(
                    f"{printable(source.path)}: column {column!r}: expected {kinds[column]}, as in "
                    f"{holder[column]}, got {source.schema.field(column).type}; the same id would "
                    f"get two numbers; convert the file, or say --type {column}={kinds[column]}"
                )
            elif kinds[column] != kind and column not in recorded:
                kinds[column] = "float"
    undecided = [name for name, rule in rules.items() if rule.has_kind and name not in kinds]
    return {**kinds, **_sample(sources, rules, undecided, separator)}


def recorded_kinds(output: Path) -> dict[str, str]:
    """Return the kinds that the newest complete day of `output` was written with."""
    manifests = read_manifests(output)
    return dict(next(reversed(manifests.values())).get("kinds", {})) if manifests else {}


def _kind_in_file(source: Source, rule: Rule, separator: str) -> str:
    """Return the kind that a file's type gives; nothing where lists are text or all is null."""
    if _is_text_list(source, rule) and separator:
        return ""
    try:
        return kind_of_column(rule, source.schema.field(rule.column).type)
    except ValueError as error:
        way_out = "; say --list-separator if it is one" if _is_text_list(source, rule) else ""
        raise ValueError(
            f"{printable(source.path)}: column {rule.column!r}: {error}{way_out}"
        ) from error


def _is_text_list(source: Source, rule: Rule) -> bool:
    return rule.is_list and is_text(source.schema.field(rule.column).type)


def _sample(
    sources: list[Source], rules: dict[str, Rule], columns: list[str], separator: str
) -> dict[str, str]:
    """Look at the first rows of text files; what holds nothing but nulls counts as strings."""
    seen: dict[str, set[str]] = {column: set() for column in columns}
    wanted = [
        (source, names)
        for source in sources
        if (names := [c for c in columns if source.is_text or _is_text_list(source, rules[c])])
    ]
    for source, names in wanted[:_SAMPLED_FILES]:
        rows = next(source.rows(names), None)
        if rows is None:
            continue
        for column in names:
            text: pa.Array = rows.records.column(column).slice(0, _SAMPLED_ROWS)
            if rules[column].is_list and is_text(text.type) and separator:
                text = split_text(text, separator)[0].flatten()
            elif is_list(text.type):
                text = text.flatten()
            seen[column].add(looks_like(text))
    return {column: _join(looks - {""}, rules[column]) for column, looks in seen.items()}


def _join(looks: set[str], rule: Rule) -> str:
    if rule.role == "number":
        return "int" if looks == {"int"} else "float"
    return "int" if looks == {"int"} else "string"

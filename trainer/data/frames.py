# SPDX-License-Identifier: MIT
"""Columns of any kind (Arrow, pandas, polars, lists) as one Arrow table that a collator takes.

Data frames hand over their columns by the Arrow C stream interface, which pyarrow reads without
knowing the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from embeddings.schema.schema import Schema
from trainer.data.columns import uses
from trainer.data.files import LogFile, families_of


def to_table(columns: Any, schema: Schema) -> pa.Table:
    """Return the columns that `schema` reads, in types that a collator takes.

    Args:
        columns: a table or record batch of Arrow, a mapping of names to lists or arrays, or any
            data frame with `__arrow_c_stream__` (pandas, polars).
        schema: names the columns; others are left out.

    Raises:
        ValueError: it is nothing of the kind, or columns differ in length.
    """
    if isinstance(columns, pa.RecordBatch):
        columns = pa.Table.from_batches([columns])
    elif isinstance(columns, Mapping):
        wanted = {str(name): columns[name] for name in columns if name in schema.columns}
        try:
            columns = pa.table(wanted)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(
                f"columns: expected equally long lists or arrays of one type each, got {error}"
            ) from error
    elif not isinstance(columns, pa.Table):
        if not hasattr(columns, "__arrow_c_stream__"):
            raise ValueError(
                "columns: expected an Arrow table, a data frame of pandas or polars, or a mapping "
                f"of names to lists, got {type(columns).__name__}"
            )
        columns = pa.table(columns)
    columns = columns.select([name for name in schema.columns if name in columns.column_names])
    lists = {use.column for use in uses(schema) if use.is_list}
    types = [_plain_type(one.type, one.name in lists) for one in columns.schema]
    if types != columns.schema.types:
        fields = zip(columns.column_names, types, strict=True)
        columns = columns.cast(pa.schema([pa.field(*one) for one in fields]))
    return columns


def as_file(columns: pa.Table, schema: Schema, name: str) -> LogFile:
    """Return what `check_families` compares of columns: which are text and which are numbers.

    Args:
        columns: with every column of `schema`.
        schema: names the columns.
        name: of them, for messages.
    """
    return LogFile(path=name, row_group_rows=(), families=families_of(columns.schema, schema))


def _plain_type(type_: pa.DataType, is_list: bool) -> pa.DataType:
    """Return the type of the same values that readers of Parquet know: no views."""
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if pa.types.is_binary_view(type_):
        return pa.large_binary()
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_):
        return pa.large_list(_plain_type(type_.value_type, False))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = _plain_type(type_.value_type, False)
        return type_ if inner == type_.value_type else pa.large_list(inner)
    return pa.list_(pa.null()) if is_list and pa.types.is_null(type_) else type_

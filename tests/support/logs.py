# SPDX-License-Identifier: MIT
"""Tiny logs in Parquet. Column `row` numbers the rows, so that tests can say which were read."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature, Table
from models.batch import Batch
from trainer.data.files import LogFile
from trainer.data.hashing import mix64
from trainer.data.loader import Loader, LoaderConfig

SCHEMA = Schema(
    tables=(
        Table(name="item", num_embeddings=100, embedding_dim=8),
        Table(name="tag", num_embeddings=50, embedding_dim=8),
        Table(name="age", num_embeddings=20, embedding_dim=8),
        Table(name="place", num_embeddings=6, embedding_dim=8),
    ),
    sparse=(
        SparseFeature(name="item", table="item", side="item"),
        SparseFeature(name="tags", table="tag", kind="bag", max_length=2),
        SparseFeature(name="place", table="place", transform="identity"),
        SparseFeature(name="clicks", table="item", kind="sequence", max_length=3, history="h"),
        SparseFeature(
            name="ages",
            table="age",
            transform="log_square",
            kind="sequence",
            max_length=3,
            history="h",
        ),
    ),
    dense=(DenseFeature(name="price", transform="log1p"),),
    labels=(Label(name="click"),),
    user="row",
)


def records(num_rows: int, first: int = 0) -> pa.Table:
    """Return rows from `first` on of an endless log; each depends on its number alone."""
    rows = np.arange(first, first + num_rows)
    clicks = [[f"i{(row + k) % 37}" for k in range(row % 6)] for row in rows.tolist()]
    return pa.table(
        {
            "row": pa.array(rows, pa.int64()),
            "item": pa.array(
                [f"i{row % 37}" if row % 11 else None for row in rows.tolist()], pa.string()
            ),
            "tags": pa.array(
                [[f"t{row % 7}"] * (row % 4) if row % 5 else None for row in rows.tolist()],
                pa.list_(pa.string()),
            ),
            "place": pa.array(rows % 5, pa.int8()),
            "clicks": pa.array(clicks, pa.list_(pa.string())),
            "ages": pa.array(
                [[row + k for k in range(row % 6)] for row in rows.tolist()], pa.list_(pa.int32())
            ),
            "price": pa.array(rows / 7.0, pa.float32()),
            "click": pa.array(rows % 3 == 0),
        }
    )


def write_log(folder: Path, layout: Sequence[Sequence[int]], days: Sequence[str] = ()) -> Path:
    """Write a file for each list of row group sizes, rows numbered on, in the partitions `days`."""
    first = 0
    for i, groups in enumerate(layout):
        parent = folder / f"dt={days[i]}" if days else folder
        parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(parent / f"part-{i}.parquet", records(0).schema) as writer:
            for rows in groups:
                writer.write_table(records(rows, first), row_group_size=max(rows, 1))
                first += rows
    return folder


def rows_of(batches: Iterable[Batch]) -> list[int]:
    """Return the numbers of the real rows that batches hold, in order."""
    groups = [batch.groups[: batch.num_examples].numpy() for batch in batches]
    mixed = np.concatenate(groups) if groups else np.empty(0, np.int64)
    return [_number()[group] for group in mixed.tolist()]


@functools.cache
def _number() -> dict[int, int]:
    """Map the group of each of the first 2,000 rows to its number."""
    return {group: row for row, group in enumerate(mix64(np.arange(2000)).view(np.int64).tolist())}


def loaders(
    files: Sequence[LogFile], config: LoaderConfig, world_size: int, seed: int = 1
) -> list[Loader]:
    """Return the loader of every rank."""
    return [
        config.build(files, SCHEMA, rank=rank, world_size=world_size, seed=seed)
        for rank in range(world_size)
    ]


def same(first: Batch, second: Batch) -> bool:
    """Return whether two batches are equal bit for bit."""
    pairs = [(first.sparse.values(), second.sparse.values())]
    pairs.append((first.sparse.lengths(), second.sparse.lengths()))
    for name in ("labels", "weights", "groups", "actions"):
        pairs.append((getattr(first, name), getattr(second, name)))
    return all(torch.equal(a, b) for a, b in pairs) and np.array_equal(
        first.dense.numpy(), second.dense.numpy(), equal_nan=True
    )

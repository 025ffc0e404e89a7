# SPDX-License-Identifier: MIT
"""Hashed logistic regression on a log, streamed: the figure that any tower must beat.

Every feature of the schema becomes ids, hashed with its name into 2^20 weights: ids and entries of
lists as they are, numbers as buckets (four to a factor of e), a missing value as an id of its own.
One pass of Adagrad over the training rows in batches, L2 on the weights that a batch touches.

  python -m tests.benchmarks.logistic dlrm.movielens --data.path DATA/ml100k/data.parquet

takes a recipe and overrides as `trainer.train` does (its tower is not read), and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from embeddings.schema.schema import Schema
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.config.fit_to_log import choose_split
from trainer.data.columns import Values, kind_of, read_lists, to_floats, to_integers
from trainer.data.files import LogFile, discover, keep_rows
from trainer.data.hashing import hash_strings, mix64
from trainer.data.splits import parse_days, parse_rows
from trainer.data.transforms import label_matrices
from trainer.metrics.metrics import Metrics
from trainer.recipes.load import load_recipe
from trainer.runtime.atomic_files import json_ready

BUCKETS = 2**20
_BATCH = 1_024


def ids(name: str, column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (N,) weights that a column's values use, and the rows they are of."""
    rows = np.arange(len(column))
    if kind_of(column.type) == "list":
        lists = read_lists(column)
        rows, column = np.repeat(rows, lists.lengths), lists.values()
    kind = kind_of(column.type)
    if kind in ("float", "decimal"):
        values = to_floats(column)
        missing = np.isnan(values)
        codes = np.floor(4 * np.log1p(np.maximum(np.where(missing, 0, values), 0))).astype(np.int64)
    elif kind == "timestamp":
        return np.empty(0, np.int64), np.empty(0, np.int64)
    else:
        codes, missing = to_integers(column, name)
    codes = codes if missing is None else np.where(missing, -(2**62), codes)
    salt = hash_strings(pa.array([name])).to_numpy()[0]
    return (mix64(codes ^ salt) % np.uint64(BUCKETS)).astype(np.int64), rows


def batches(
    files: Sequence[LogFile], schema: Schema, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield weights used, the offsets of rows among them, labels and weights of the first label."""
    features = dict.fromkeys(one.column for one in (*schema.sparse, *schema.dense))
    features.pop(schema.timestamp, None)
    for file in files:
        starts = file.row_group_starts or (0,) * len(file.row_group_rows)
        with pq.ParquetFile(file.path) as source:
            for group, (start, count) in enumerate(zip(starts, file.row_group_rows, strict=True)):
                if not count:
                    continue
                table = source.read_row_group(group, columns=list(schema.columns))
                for records in table.slice(start, count).to_batches(max_chunksize=rows):
                    columns = dict(zip(records.schema.names, records.columns, strict=True))
                    parts = [ids(name, columns[name]) for name in features]
                    used, owner = (np.concatenate(part) for part in zip(*parts, strict=True))
                    order = np.argsort(owner, kind="stable")
                    offsets = np.searchsorted(owner[order], np.arange(len(records)))
                    labels, weights = (np.empty((len(records), 1), np.float32) for _ in range(2))
                    values = {name: Values(column) for name, column in columns.items()}
                    label_matrices(schema.labels[:1], values, labels, weights)
                    arrays = (used[order], offsets, labels, weights)
                    yield tuple(map(torch.from_numpy, arrays))  # type: ignore[misc]


def split_files(config: TrainConfig, train: bool) -> tuple[LogFile, ...]:
    """Return the files of the training or test rows, as a run would read them."""
    data, name = config.data, "train" if train else "test"
    path = data.path if train else data.test_path or data.path
    files = discover(path, parse_days(getattr(data, f"{name}_days")), config.schema)
    return keep_rows(files, parse_rows(getattr(data, f"{name}_rows")))


def measure(config: TrainConfig, learning_rate: float, l2: float, epochs: int) -> dict[str, Any]:
    """Train on the training rows, test on the test rows; return the metrics of the first label."""
    weight = torch.zeros(BUCKETS, 1)
    squares = torch.full((BUCKETS,), 1e-8)
    bias, bias_squares = torch.zeros(1), torch.full((1,), 1e-8)
    for _ in range(epochs):
        for used, offsets, labels, weights in batches(
            split_files(config, True), config.schema, _BATCH
        ):
            scores = torch.nn.functional.embedding_bag(used, weight, offsets, mode="sum") + bias
            errors = weights * (scores.sigmoid() - labels) / weights.sum().clamp(min=1e-9)
            lengths = torch.diff(offsets, append=torch.tensor([len(used)]))
            touched, place = used.unique(return_inverse=True)
            gradient = torch.zeros(len(touched)).index_add_(
                0, place, errors[:, 0].repeat_interleave(lengths)
            )
            gradient += l2 * weight[touched, 0]
            squares[touched] += gradient.square()
            weight[touched, 0] -= learning_rate * gradient / squares[touched].sqrt()
            bias_squares += errors.sum().square()
            bias -= learning_rate * errors.sum() / bias_squares.sqrt()
    metrics = Metrics([config.schema.labels[0].name], grouped=False)
    for used, offsets, labels, weights in batches(
        split_files(config, False), config.schema, 8 * _BATCH
    ):
        scores = torch.nn.functional.embedding_bag(used, weight, offsets, mode="sum") + bias
        groups = torch.zeros(len(labels), dtype=torch.int64)
        metrics.update(scores.sigmoid(), labels, weights, groups)
    return metrics.compute()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and print the metrics as JSON."""
    parser = argparse.ArgumentParser(description="Hashed logistic regression on a recipe's log.")
    parser.add_argument("recipe", help="whose schema, days and rows count")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="(default: 0.05)")
    parser.add_argument("--l2", type=float, default=1e-6, help="(default: 1e-6)")
    parser.add_argument("--epochs", type=int, default=1, help="passes (default: 1)")
    given, overrides = parser.parse_known_args(arguments)
    recipe = load_recipe(given.recipe)
    config, _ = choose_split(apply_overrides(recipe, overrides), recipe.data, Path())
    found = measure(config, given.learning_rate, given.l2, given.epochs)
    print(json.dumps(json_ready(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""What dynamic tables cost beside hashed ones: whole training steps on one process and one thread.

    python -m tests.benchmarks.dynamic [--rounds 9] [--batch-size 1024] [--steps 10]

DLRM on batches of the shape of Globo's log, whose articles follow a power law over a million, so
that new ones come in every step and full tables let others go. The article tables of `dlrm.globo`
are hashed or dynamic with as many rows: by LRU, or by days with ids that wait for their second
occurrence. Prints rows per second, and how many times as long as with hashed tables a step takes.

Shapes: B examples per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import Schema
from models.batch import Batch
from tests.benchmarks.timing import Line, interleave, single_threaded
from trainer.build import build_training
from trainer.data.hashing import to_rows
from trainer.recipes.load import load_recipe
from trainer.runtime import runtime

ARTICLES, MEAN_HISTORY = 1_000_000, 4.0
ROWS = 16_384
TARGET = 1.25
WAYS: dict[str, DynamicConfig | None] = {
    "hashed": None,
    "dynamic, lru": DynamicConfig(),
    "dynamic, ttl, 2 occurrences": DynamicConfig(min_occurrences=2, eviction="ttl", ttl_days=3),
}


def schema_of(dynamic: DynamicConfig | None) -> Schema:
    """Return Globo's schema with article tables of `ROWS` rows."""
    schema = load_recipe("dlrm.globo").schema
    tables = tuple(
        dataclasses.replace(table, num_embeddings=ROWS, dynamic=dynamic)
        if table.name in ("article", "hist_article")
        else table
        for table in schema.tables
    )
    return dataclasses.replace(schema, tables=tables)


def make_batch(schema: Schema, size: int, seed: int) -> Batch:
    """Return a batch of `size` examples; of one seed, the same ids for every way."""
    generator = np.random.default_rng(seed)
    history = np.minimum(generator.poisson(MEAN_HISTORY, size), 10).astype(np.int32)
    values, lengths = [], []
    for feature in schema.sparse:
        table = schema.table(feature.table)
        counts = np.ones(size, np.int32) if feature.kind == "id" else history
        number = int(counts.sum())
        if "article" in feature.table:
            ids = np.floor(ARTICLES ** generator.random(number)).astype(np.int64) + seed
            values.append(ids if table.dynamic else to_rows(ids, table.num_embeddings))
        else:
            values.append(generator.integers(1, table.num_embeddings, number))
        lengths.append(counts)
    labels = torch.from_numpy(generator.integers(0, 2, (size, 1)).astype(np.float32))
    return Batch(
        sparse=KeyedJaggedTensor(
            keys=[feature.name for feature in schema.sparse],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        ),
        dense=torch.empty(size, len(schema.dense)),
        labels=labels,
        weights=torch.ones_like(labels),
        groups=torch.zeros(size, dtype=torch.int64),
        actions=torch.empty(0, dtype=torch.int64),
        day=20_000 + seed // 100,
    )


def trainer_of(
    started: runtime.Runtime, dynamic: DynamicConfig | None, batch_size: int, steps: int
) -> Callable[[], None]:
    """Return what trains `steps` steps on batches it has not seen; they are made before."""
    config = load_recipe("dlrm.globo")
    schema = schema_of(dynamic)
    pipeline = build_training(dataclasses.replace(config, schema=schema), started).pipeline
    made = [make_batch(schema, batch_size, seed) for seed in range(120)]
    batches = itertools.cycle(made)

    def train() -> None:
        for _ in range(steps):
            pipeline.progress(batches)

    return train


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    single_threaded()
    started = runtime.start(runtime.RuntimeConfig(device="cpu", num_threads=1))
    try:
        ways = {
            name: trainer_of(started, way, options.batch_size, options.steps)
            for name, way in WAYS.items()
        }
        times = interleave(ways, rounds=options.rounds)
    finally:
        started.stop()
    for name in WAYS:
        rate = options.batch_size * options.steps / times.median(name)
        print(f"{name:<32} {rate:>10,.0f} rows/s of CPU time")
    for name in list(WAYS)[1:]:
        ratio = times.ratio(name, "hashed")
        print(Line(name=f"{name}, over hashed", ratio=ratio, bound="at most", target=TARGET))


if __name__ == "__main__":
    main()

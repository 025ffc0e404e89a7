# SPDX-License-Identifier: MIT
"""What a plan says that tables take of a rank's memory, against what they take."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.sharding import ShardingConfig
from tests.support.processes import Processes
from trainer.distributed.parallelize import ParallelConfig, parallelize
from trainer.runtime.memory import table_bytes
from trainer.runtime.runtime import Runtime

SCHEMA = Schema(
    tables=(
        Table(name="user", num_embeddings=400_000, embedding_dim=16),
        Table(name="item", num_embeddings=250_000, embedding_dim=32),
        Table(name="tag", num_embeddings=150_000, embedding_dim=64),
    ),
    sparse=(
        SparseFeature(name="user", table="user"),
        SparseFeature(name="clicks", table="item", kind="sequence", max_length=4, history="h"),
        SparseFeature(name="tags", table="tag", kind="bag", max_length=4),
    ),
    labels=(Label(name="click"),),
)
NUM_EXAMPLES = 64


def _resident() -> int:
    """Return the process's bytes in memory, what it has freed given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * resource.getpagesize()


def _features(schema: Schema) -> KeyedJaggedTensor:
    sizes = [max(1, feature.max_length) for feature in schema.sparse]
    return KeyedJaggedTensor(
        keys=[feature.name for feature in schema.sparse],
        values=torch.arange(1, NUM_EXAMPLES * sum(sizes) + 1),
        lengths=torch.tensor(sizes).repeat_interleave(NUM_EXAMPLES),
    )


class _Model(torch.nn.Module):
    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embeddings = EmbeddingLayer(schema, torch.device("meta"), seed=1)
        self.rest = torch.nn.Linear(2, 2)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.embeddings(features)


def _build(runtime: Runtime, schema: Schema, kind: Any, sparse: SparseOptimizerConfig) -> Any:
    sharding = ShardingConfig(tables={table.name: kind for table in schema.tables})
    config = ParallelConfig(sharding=sharding, find_unused_parameters=True)
    parallel = parallelize(_Model(schema), config, sparse, runtime, batch_size=NUM_EXAMPLES)
    for _ in range(2):
        found = parallel.module(_features(schema))
        total = found.pooled.sum() + sum(rows.values().sum() for rows in found.sequences.values())
        total.backward()
    # A state that no id has touched is memory that the system has not handed out yet.
    for parts in parallel.fused_optimizer.state_dict()["state"].values():
        for state in parts.values():
            for shard, _, _ in local_shards(state):
                shard.add_(0)
    return parallel


def _measure(runtime: Runtime, kind: Any, sparse: SparseOptimizerConfig) -> tuple[int, int]:
    """Return the bytes that a plan says of this rank, and by how much the process grew."""
    small = Schema(
        tables=tuple(dataclasses.replace(t, num_embeddings=1000) for t in SCHEMA.tables),
        sparse=SCHEMA.sparse,
        labels=SCHEMA.labels,
    )
    _build(runtime, small, kind, sparse)  # what is loaded once is no table's
    before = _resident()
    parallel = _build(runtime, SCHEMA, kind, sparse)
    return parallel.plan.rank_bytes[runtime.rank], _resident() - before


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("table_wise", "rowwise_adagrad"),
        ("table_wise", "adagrad"),
        ("row_wise", "rowwise_adagrad"),
        ("row_wise", "sgd"),
    ],
)
def test_a_plans_bytes_of_each_rank_are_within_10_percent_of_what_its_process_grows_by(
    processes: Processes, kind: str, optimizer: Any
) -> None:
    sparse = SparseOptimizerConfig(kind=optimizer)
    outcomes = processes.run(_measure, kind, sparse)
    for planned, measured in outcomes:
        assert planned > 20e6
        assert planned == pytest.approx(measured, rel=0.1)
    needed = sum(table_bytes(table, sparse) for table in SCHEMA.tables)
    assert needed == pytest.approx(sum(measured for _, measured in outcomes), rel=0.1)

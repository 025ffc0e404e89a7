# SPDX-License-Identifier: MIT
"""Lookups and exchanges of a running step, counted; coalesced equals one lookup per table."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.coalesce import unpool
from embeddings.sharding.counters import Counters
from embeddings.sharding.sharding import ShardingConfig
from tests.support.processes import Processes
from tests.support.tables import shard_tables
from tests.support.training import Outcome, Recipe, Session, train, whole_tables
from trainer.distributed.train_pipeline import Pipeline
from trainer.runtime.runtime import Runtime

NUM_EXAMPLES = 64
WHOLE = ShardingConfig(sharding_types=("table_wise",))


def _schema(num_features: int, bags: bool, narrow: int = 4) -> Schema:
    """Return features with a table each, of widths 8 and `narrow`; every fifth a bag if `bags`."""
    tables, features = [], []
    for i in range(num_features):
        width = 8 if i % 3 else narrow
        tables.append(Table(name=f"t{i}", num_embeddings=5 + i % 40, embedding_dim=width))
        kind: dict[str, Any] = {"kind": "bag", "max_length": 3, "pooling": "mean"}
        features.append(
            SparseFeature(name=f"f{i}", table=f"t{i}", **(kind if bags and i % 5 == 4 else {}))
        )
    return Schema(tables=tuple(tables), sparse=tuple(features), labels=(Label(name="click"),))


def _part(schema: Schema, name: str) -> Schema:
    """Return the schema of one feature and its table."""
    (feature,) = (feature for feature in schema.sparse if feature.name == name)
    return Schema(tables=(schema.table(feature.table),), sparse=(feature,), labels=schema.labels)


class Layers(nn.Module):
    """Tables in one layer, or in one layer each."""

    def __init__(self, schema: Schema, coalesced: bool) -> None:
        super().__init__()
        schemas = [schema] if coalesced else [_part(schema, f.name) for f in schema.sparse]
        meta = torch.device("meta")
        self.layers = nn.ModuleList(EmbeddingLayer(part, meta, seed=3) for part in schemas)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.cat([layer(features).pooled for layer in self.layers], dim=1)


def _features(schema: Schema, rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    values, lengths = [], []
    for feature in schema.sparse:
        rows = schema.table(feature.table).num_embeddings
        sizes = torch.ones(NUM_EXAMPLES, dtype=torch.int64)
        if feature.kind == "bag":
            sizes = torch.randint(0, 4, (NUM_EXAMPLES,), generator=generator)
        lengths.append(sizes)
        values.append(torch.randint(0, rows, (int(sizes.sum()),), generator=generator))
    names = [feature.name for feature in schema.sparse]
    return KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=torch.cat(lengths))


def _run(
    runtime: Runtime,
    num_features: int,
    bags: bool,
    coalesced: bool,
    config: ShardingConfig = WHOLE,
    narrow: int = 4,
) -> Any:
    """Take three steps; return the last's counts and vectors, the shards after it, the first's."""
    schema = _schema(num_features, bags, narrow)
    model = Layers(schema, coalesced)
    if config.unpool_ids:
        model.layers = nn.ModuleList(unpool(cast(EmbeddingLayer, one)) for one in model.layers)
    for layer in model.layers:
        fuse_optimizer(layer, SparseOptimizerConfig(learning_rate=0.1))
    sharded = shard_tables(model, config, runtime, NUM_EXAMPLES)

    def step(number: int) -> Tensor:
        vectors = sharded(_features(schema, runtime.rank, number))
        (vectors * torch.linspace(-1, 1, vectors.shape[1])).sum().backward()
        return vectors.detach()

    first, _ = step(0), step(1)
    with Counters(sharded) as counts:
        vectors = step(2)
    shards = {
        (name, row, column): shard.detach().clone()
        for layer in model.layers
        for name, weight in cast(EmbeddingLayer, layer).table_weights().items()
        for shard, row, column in local_shards(weight)
    }
    return counts.to_dict(), vectors, shards, first


@pytest.mark.dist
@pytest.mark.parametrize(("num_features", "bags"), [(26, False), (391, True)])
def test_lookups_and_collectives_are_at_most_8_percent_of_one_per_feature(
    processes: Processes, num_features: int, bags: bool
) -> None:
    outcomes = processes.run(_run, num_features, bags, True)
    schema = _schema(num_features, bags)
    for rank, (counts, *_) in enumerate(outcomes):
        assert counts["lookups"] >= 1
        # An exchange each of splits, ids, vectors and gradients, times a feature each.
        assert 4 <= counts["collectives"] <= 0.08 * 4 * num_features
        ids = _features(schema, rank, 2).values().numel()
        assert counts["ids_in"] == counts["ids_sent"] == ids
        assert counts["bytes_sent"] > 0
    # Of all ranks together: one lookup per feature would be one on the rank that has its table.
    assert sum(counts["lookups"] for counts, *_ in outcomes) <= 0.08 * num_features
    total = sum(_features(schema, rank, 2).values().numel() for rank in range(2))
    assert sum(counts["ids_looked_up"] for counts, *_ in outcomes) == total


@pytest.mark.dist
def test_coalesced_lookups_equal_one_lookup_per_table_bit_for_bit(processes: Processes) -> None:
    together, apart = (processes.run(_run, 26, True, coalesced) for coalesced in (True, False))
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one[1], other[1])
        # What is compared with is what it says: a lookup and its exchanges for every table.
        assert one[0]["collectives"] <= 0.08 * other[0]["collectives"]
    tables = [
        {k: v for outcome in outcomes for k, v in outcome[2].items()}
        for outcomes in (together, apart)
    ]
    assert tables[0].keys() == tables[1].keys() and len(tables[0]) == 26
    for key, shard in tables[0].items():
        assert torch.equal(shard, tables[1][key]), key
    assert sum(outcome[0]["lookups"] for outcome in apart) == 26


def _count_tiny(runtime: Runtime, sharding: ShardingConfig) -> dict[str, int]:
    session = Session(runtime, Recipe(sharding=sharding, num_steps=6))
    pipeline = Pipeline(session.parallel, session.precision, runtime.device)
    with pytest.raises(RuntimeError, match="take one step before counting"):
        Counters(session.parallel.module).__enter__()
    batches = session.batches()
    for _ in range(2):
        pipeline.progress(batches)
    with Counters(session.parallel.module) as counts:
        pipeline.progress(batches)
    counted = counts.to_dict()
    pipeline.progress(batches)
    assert counts.to_dict() == counted  # nothing is in the way any more
    return counted


TABLES = ("user", "item", "tag", "action")


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_ids_travel_once_and_training_is_the_same_with_deduplication(
    processes: Processes, kind: Any
) -> None:
    plain, dedup = (
        ShardingConfig(dedup=on, tables={name: kind for name in TABLES}) for on in (False, True)
    )
    before, after = processes.run(_count_tiny, plain), processes.run(_count_tiny, dedup)
    for one, other in zip(before, after, strict=True):
        assert one["ids_in"] == other["ids_in"] == one["ids_sent"]
        assert other["ids_sent"] < other["ids_in"]
        assert other["bytes_sent"] < one["bytes_sent"]
        assert other["lookups"] == one["lookups"]
    looked_up = [sum(c["ids_looked_up"] for c in counts) for counts in (before, after)]
    assert looked_up[1] < looked_up[0]
    expected: list[Outcome] = processes.run(train, Recipe(sharding=plain))
    found: list[Outcome] = processes.run(train, Recipe(sharding=dedup))
    # Lists are pooled by another kernel, and gradients of one id are summed in another order.
    assert found[0].losses[0] == pytest.approx(expected[0].losses[0], rel=1e-6)
    for name, weight in whole_tables(expected).items():
        torch.testing.assert_close(whole_tables(found)[name], weight, rtol=1e-5, atol=1e-6)

# SPDX-License-Identifier: MIT
"""Single ids read one vector per id: the same results, ids that travel once, bad ids refused."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer
from embeddings.lookups import unique_ids
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.sharding.coalesce import single_id_tables, unpool
from embeddings.sharding.sharding import ShardingConfig
from tests.embeddings.sharding.test_counters import (
    NUM_EXAMPLES,
    WHOLE,
    Layers,
    _features,
    _part,
    _run,
    _schema,
)
from tests.support.processes import Processes
from tests.support.tables import shard_tables
from trainer.distributed.parallelize import ParallelConfig, parallelize
from trainer.runtime.runtime import Runtime

UNPOOLED = ShardingConfig(sharding_types=("table_wise",), unpool_ids=True)
DEDUP = ShardingConfig(sharding_types=("table_wise",), unpool_ids=True, dedup=True)


@pytest.mark.dist
@pytest.mark.parametrize(("num_features", "bags"), [(26, False), (391, True)])
def test_unpooled_single_ids_read_the_same_bit_for_bit_and_travel_once(
    processes: Processes, num_features: int, bags: bool
) -> None:
    # Unpooled, every width is a lookup of its own: Criteo's features have one, the others two.
    narrow = 8 if num_features == 26 else 4
    pooled, unpooled, dedup = (
        processes.run(_run, num_features, bags, True, config, narrow)
        for config in (WHOLE, UNPOOLED, DEDUP)
    )
    for one, other, third in zip(pooled, unpooled, dedup, strict=True):
        assert one[0]["ids_in"] == other[0]["ids_in"] == third[0]["ids_in"]
        assert other[0]["ids_sent"] == other[0]["ids_in"]
        assert third[0]["ids_sent"] < 0.75 * third[0]["ids_in"]
        assert third[0]["bytes_sent"] < other[0]["bytes_sent"]
        for found in (other, third):
            # An exchange each of splits, lengths, ids, vectors and gradients, times a feature each.
            assert found[0]["collectives"] <= 0.08 * 5 * num_features
            assert torch.equal(found[3], one[3])
            # After training all is the same but for the order in which gradients of one id add up.
            torch.testing.assert_close(found[1], one[1], rtol=1e-5, atol=1e-6)
    for outcomes in (unpooled, dedup):
        assert sum(counts["lookups"] for counts, *_ in outcomes) <= 0.08 * num_features


def test_only_tables_of_single_ids_are_unpooled_and_one_must_be_there() -> None:
    schema = _schema(6, bags=True)
    assert single_id_tables(schema) == {"t0", "t1", "t2", "t3", "t5"}
    layer = unpool(EmbeddingLayer(schema, torch.device("meta"), seed=3))
    assert layer.bags is not None
    assert [table.name for table in layer.bags.embedding_bag_configs()] == ["t4"]
    assert list(layer.collections) == ["dim4", "dim8"]
    with pytest.raises(ValueError, match="unpool_ids: has no effect"):
        unpool(EmbeddingLayer(_part(schema, "f4"), torch.device("meta")))


def _without_effect(runtime: Runtime) -> str:
    schema = _schema(3, bags=False)
    model = nn.Module()
    model.embeddings = EmbeddingLayer(schema, torch.device("meta"))
    config = ParallelConfig(sharding=ShardingConfig(dedup=True))
    try:
        parallelize(model, config, SparseOptimizerConfig(), runtime)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_deduplication_of_pooled_tables_alone_is_refused_with_a_way_out(
    processes: Processes,
) -> None:
    (message,) = processes.run(_without_effect, world_size=1)
    assert message.startswith("parallel.sharding.dedup: has no effect, every table is pooled; set")


def _bad_id(runtime: Runtime, config: ShardingConfig, row: int) -> str:
    """Read an id that its table does not have on rank 0 and return what stopped each rank."""
    schema = _schema(6, bags=False)
    model = Layers(schema, coalesced=True)
    model.layers = nn.ModuleList(unpool(cast(EmbeddingLayer, one)) for one in model.layers)
    fuse_optimizer(model, SparseOptimizerConfig())
    sharded = shard_tables(model, config, runtime, NUM_EXAMPLES)
    features = _features(schema, 0, 0)
    features.values()[0] = row
    try:
        sharded(features)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("row", [-1, 5, 10**12])
def test_deduplication_passes_no_bad_id_on_as_the_id_of_another_row_or_feature(
    processes: Processes, row: int
) -> None:
    (message,) = processes.run(_bad_id, DEDUP, row, world_size=1)
    assert "idx" in message or str(row) in message, message


@pytest.mark.parametrize(
    "ids",
    [[3, 3, 0, 3], [0], [], [7, -1, 7], [10**12, 1, 10**12], [2**63 - 1, -(2**63), 5, 5]],
    ids=["repeated", "missing", "empty", "negative", "huge", "64 bits"],
)
def test_unique_ids_of_features_are_put_back_exactly_whatever_their_values(ids: list[int]) -> None:
    values = torch.tensor([*ids, *reversed(ids)], dtype=torch.int64)
    size = max(1, len(ids))
    lengths = torch.zeros(2 * size, dtype=torch.int64)
    lengths[0] = lengths[size] = len(ids)
    features = KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths)
    unique, reverse, often = unique_ids(features)
    assert torch.equal(often, torch.bincount(reverse, minlength=len(often)))
    assert torch.equal(unique.values()[reverse], values)
    for name, own in (("a", ids), ("b", ids)):
        found = unique[name].values().tolist()
        assert len(found) == len(set(found)) and set(found) == set(own)

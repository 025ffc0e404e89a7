# SPDX-License-Identifier: MIT
"""Statistics of tables against counts made by hand, unsharded and on two ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.counters import Counters
from embeddings.sharding.sharding import ShardingConfig
from embeddings.stats import (
    Hits,
    IdWindow,
    dynamic_numbers,
    merge_numbers,
    rank_numbers,
    shard_stats,
)
from tests.support.processes import Processes
from tests.support.tiny import SCHEMA, make_batch
from tests.support.training import Recipe, Session
from trainer.runtime.runtime import Runtime

PAIR = Schema(
    tables=(Table(name="t", num_embeddings=100, embedding_dim=4),),
    sparse=(SparseFeature(name="a", table="t"), SparseFeature(name="b", table="t")),
    labels=(Label(name="click"),),
)


def _batch(a: list[int], b: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor(a + b),
        lengths=torch.ones(2 * len(a), dtype=torch.int64),
    )


def test_ids_of_all_features_of_a_table_are_counted_together() -> None:
    window = IdWindow(PAIR, top=2)
    assert window.stats() == {}
    window.update(_batch([0, 7, 7], [7, 5, 9]))
    window.update(_batch([0, 5, 1], [2, 3, 4]))
    stats = window.stats()["t"]
    assert (stats.ids, stats.distinct) == (12, 7)
    assert stats.missing == pytest.approx(2 / 12)
    assert stats.top_share == pytest.approx((3 + 2) / 12)


def test_the_window_forgets_the_oldest_batches() -> None:
    window = IdWindow(PAIR, batches=1)
    window.update(_batch([0], [0]))
    window.update(_batch([1], [2]))
    assert window.stats()["t"].missing == 0


def test_a_day_of_unseen_ids_alone_shows_as_missing() -> None:
    window = IdWindow(PAIR)
    window.update(_batch([0, 0], [0, 0]))
    stats = window.stats()["t"]
    assert (stats.missing, stats.distinct, stats.top_share) == (1.0, 0, 1.0)


def test_norms_without_optimizer_state_are_of_all_rows() -> None:
    layer = EmbeddingLayer(SCHEMA, seed=1)
    stats = shard_stats(layer)
    assert sorted(stats) == ["action", "item", "tag", "user"]
    for table in SCHEMA.tables:
        ((weight, _, _),) = local_shards(layer.table_weights()[table.name])
        found, norms = stats[table.name], weight.detach().norm(dim=1)
        assert (found.rows, found.touched, found.occupancy) == (table.num_embeddings, None, None)
        assert found.mean_norm == pytest.approx(norms.mean().item())
        assert found.max_norm == pytest.approx(norms.max().item())
        assert found.bytes == table.num_embeddings * table.embedding_dim * 4
    sampled = shard_stats(layer, sample=10)["item"]
    assert sampled.mean_norm != stats["item"].mean_norm


def _touch(runtime: Runtime, kind: Any) -> Any:
    tables = {table.name: kind for table in SCHEMA.tables}
    session = Session(runtime, Recipe(sharding=ShardingConfig(tables=tables)))
    for step in range(2):
        session.backward(session.batch(step))
        session.precision.apply()
    layer = session.parallel.model.get_submodule("embeddings")
    assert isinstance(layer, EmbeddingLayer)
    return shard_stats(layer, session.parallel.fused_optimizer.state_dict()["state"])


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_touched_rows_of_all_ranks_are_the_rows_of_the_batches(
    processes: Processes, kind: Any
) -> None:
    outcomes = processes.run(_touch, kind)
    lists = [make_batch(16, step).sparse.to_dict() for step in range(2)]
    for table in SCHEMA.tables:
        names = [feature.name for feature in SCHEMA.sparse if feature.table == table.name]
        seen = {i for batch in lists for name in names for i in batch[name].values().tolist()}
        parts = [outcome[table.name] for outcome in outcomes if table.name in outcome]
        assert sum(part.rows for part in parts) == table.num_embeddings
        assert sum(part.touched for part in parts) == len(seen)
        assert all(0 < part.occupancy <= 1 and part.max_norm > 0 for part in parts)


def _use(runtime: Runtime, recipe: Recipe) -> Any:
    """Train two steps, count the third, evaluate a batch; return counts and this rank's numbers."""
    session = Session(runtime, recipe)
    layer = session.parallel.model.get_submodule("embeddings")
    assert isinstance(layer, EmbeddingLayer)
    window = IdWindow(recipe.schema)
    for step in range(2):
        session.backward(session.batch(step))
        session.precision.apply()
        window.update(session.batch(step).sparse)
    with Counters(session.parallel.module) as counts:
        session.backward(session.batch(2))
    session.parallel.module.eval()
    with Hits(layer) as hits, torch.no_grad():
        session.parallel.module(session.batch(3))
    states = session.parallel.fused_optimizer.state_dict()["state"]
    numbers = rank_numbers(
        shard_stats(layer, states), window.stats(), hits.numbers(), dynamic_numbers(layer)
    )
    return counts.to_dict(), numbers


def _ids(step: int, table: str) -> list[int]:
    batch = make_batch(16, step).sparse.to_dict()
    names = [feature.name for feature in SCHEMA.sparse if feature.table == table]
    return [i for name in names for i in batch[name].values().tolist()]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_hits_of_all_ranks_are_the_ids_whose_rows_were_trained(
    processes: Processes, kind: Any
) -> None:
    tables = {table.name: kind for table in SCHEMA.tables}
    outcomes = processes.run(_use, Recipe(sharding=ShardingConfig(tables=tables)))
    merged = merge_numbers([numbers for _, numbers in outcomes])
    for table in SCHEMA.tables:
        trained = {i for step in range(2) for i in _ids(step, table.name)}
        asked = [i for i in _ids(3, table.name) if i]
        numbers = merged[table.name]
        assert numbers["lookups"] == len(asked)
        assert numbers["hits"] == sum(i in trained for i in asked)
        assert numbers["hit_rate"] == numbers["hits"] / numbers["lookups"]
        assert numbers["occupancy"] == len(trained) / table.num_embeddings
        seen = _ids(0, table.name) + _ids(1, table.name)
        assert numbers["ids"] == len(seen)
        assert numbers["missing"] == pytest.approx(seen.count(0) / len(seen))
        assert [rank["rank"] for rank in numbers["ranks"]] == [0, 1]


@pytest.mark.dist
def test_dynamic_tables_are_counted_and_add_what_they_count_themselves(
    processes: Processes,
) -> None:
    tables = tuple(
        dataclasses.replace(table, num_embeddings=200, dynamic=DynamicConfig())
        if table.name == "user"
        else table
        for table in SCHEMA.tables
    )
    schema = dataclasses.replace(SCHEMA, tables=tables)
    outcomes = processes.run(_use, Recipe(schema=schema))
    merged = merge_numbers([numbers for _, numbers in outcomes])
    ids = [*_ids(0, "user"), *_ids(1, "user"), *_ids(2, "user")]
    assert merged["user"]["dynamic_ids"] == len(ids)
    assert merged["user"]["dynamic_admitted"] <= len(set(ids))
    assert merged["user"]["dynamic_evicted"] == merged["user"]["dynamic_failed"] == 0
    assert "dynamic_ids" not in merged["item"]
    assert merged["user"]["touched"] == merged["user"]["dynamic_admitted"]
    assert 0 < merged["user"]["hit_rate"] <= 1
    assert merged["user"]["missing"] == 0  # 0 is an id like any other there
    for rank, (counts, _) in enumerate(outcomes):
        assert counts["ids_in"] == make_batch(16, 2, 8 * rank, 8 * rank + 8).sparse.values().numel()
        assert counts["lookups"] > 0 and counts["bytes_sent"] > 0


@pytest.mark.dist
def test_ids_that_share_the_row_of_ids_without_one_are_no_hits(processes: Processes) -> None:
    # No id comes 99 times: all share the rows of their buckets, which training does update.
    tables = tuple(
        dataclasses.replace(table, num_embeddings=16, dynamic=DynamicConfig(min_occurrences=99))
        if table.name == "user"
        else table
        for table in SCHEMA.tables
    )
    schema = dataclasses.replace(SCHEMA, tables=tables)
    outcomes = processes.run(_use, Recipe(schema=schema))
    merged = merge_numbers([numbers for _, numbers in outcomes])
    assert merged["user"]["lookups"] > 0 and merged["user"]["hits"] == 0
    assert merged["user"]["touched"] == 0

# SPDX-License-Identifier: MIT
"""The unsharded layer: who reads which table, in which order, from which initial rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import (
    EmbeddingLayer,
    draw_rows,
    local_shards,
    tables_of_collections,
)
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from tests.support.tiny import SCHEMA, make_batch


def _schema(*features: SparseFeature, width: int = 4) -> Schema:
    tables = sorted({feature.table for feature in features})
    return Schema(
        tables=tuple(Table(name=t, num_embeddings=10, embedding_dim=width) for t in tables),
        sparse=features,
        labels=(Label(name="click"),),
    )


def _features(**lists: list[list[int]]) -> KeyedJaggedTensor:
    flat = [ids for examples in lists.values() for ids in examples]
    return KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor([i for ids in flat for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in flat], dtype=torch.int64),
    )


def _weight(layer: EmbeddingLayer, table: str) -> Tensor:
    return layer.get_parameter(next(n for n, _ in layer.named_parameters() if f".{table}." in n))


def test_pooled_columns_come_in_the_order_of_the_schema() -> None:
    layer = EmbeddingLayer(SCHEMA)
    batch = make_batch(6, seed=1)
    embeddings = layer(batch.sparse)
    assert layer.pooled_names == ("item", "user", "tags")
    assert layer.pooled_dims == (16, 8, 4)
    lists = batch.sparse.to_dict()
    items, users = lists["item"].values(), lists["user"].values()
    assert torch.equal(embeddings.pooled[:, :16], _weight(layer, "item")[items])
    assert torch.equal(embeddings.pooled[:, 16:24], _weight(layer, "user")[users])
    for row, ids in zip(embeddings.pooled[:, 24:], lists["tags"].to_dense(), strict=True):
        expected = _weight(layer, "tag")[ids.long()].mean(0) if len(ids) else torch.zeros(4)
        torch.testing.assert_close(row, expected)


def test_sequences_keep_one_vector_per_event_in_order() -> None:
    layer = EmbeddingLayer(SCHEMA)
    batch = make_batch(6, seed=1)
    sequences = layer(batch.sparse).sequences
    assert list(sequences) == ["clicks", "acts"]
    for name, table in (("clicks", "item"), ("acts", "action")):
        ids = batch.sparse[name]
        assert torch.equal(sequences[name].values(), _weight(layer, table)[ids.values()])
        assert torch.equal(sequences[name].lengths(), ids.lengths())


def test_an_item_and_a_history_of_items_read_and_train_one_weight() -> None:
    schema = _schema(
        SparseFeature(name="item", table="t"),
        SparseFeature(name="clicks", table="t", kind="sequence", max_length=3, history="h"),
    )
    layer = EmbeddingLayer(schema)
    assert len(list(layer.parameters())) == 1
    embeddings = layer(_features(item=[[3], [4]], clicks=[[3, 5], []]))
    (embeddings.pooled.sum() + embeddings.sequences["clicks"].values().sum()).backward()
    gradient = _weight(layer, "t").grad
    assert gradient is not None
    assert gradient[:, 0].tolist() == [0, 0, 0, 2, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_bag_pools_alike_whether_or_not_a_sequence_shares_its_table(
    pooling: Any, shared: bool
) -> None:
    bag = SparseFeature(name="bag", table="t", kind="bag", max_length=3, pooling=pooling)
    other = SparseFeature(name="seq", table="t", kind="sequence", max_length=3, history="h")
    layer = EmbeddingLayer(_schema(bag, other) if shared else _schema(bag))
    assert (layer.bags is None) == shared
    pooled = layer(_features(bag=[[1, 2, 2], [], [7]], seq=[[1], [2], []])).pooled
    weight = _weight(layer, "t")
    total = torch.stack([weight[1] + 2 * weight[2], torch.zeros(4), weight[7]])
    expected = total / torch.tensor([[3.0], [1.0], [1.0]]) if pooling == "mean" else total
    torch.testing.assert_close(pooled, expected)


def test_bags_of_one_table_may_be_pooled_in_different_ways() -> None:
    schema = _schema(
        SparseFeature(name="a", table="t", kind="bag", max_length=3, pooling="sum"),
        SparseFeature(name="b", table="t", kind="bag", max_length=3, pooling="mean"),
        SparseFeature(name="c", table="u"),
    )
    assert tables_of_collections(schema) == {"t"}
    layer = EmbeddingLayer(schema)
    pooled = layer(_features(a=[[1, 2]], b=[[1, 2]], c=[[9]])).pooled
    torch.testing.assert_close(pooled[0, :4], 2 * pooled[0, 4:8])
    assert torch.equal(pooled[0, 8:], _weight(layer, "u")[9])


def test_sequences_alone_leave_no_pooled_columns() -> None:
    schema = _schema(
        SparseFeature(name="seq", table="t", kind="sequence", max_length=3, history="h")
    )
    embeddings = EmbeddingLayer(schema)(_features(seq=[[1, 2], [], []]))
    assert embeddings.pooled.shape == (3, 0)


def test_ids_alone_leave_no_sequences() -> None:
    embeddings = EmbeddingLayer(_schema(SparseFeature(name="a", table="t")))(_features(a=[[1]]))
    assert embeddings.sequences == {}
    assert embeddings.pooled.shape == (1, 4)


def test_empty_lists_everywhere_give_zeros_and_no_events() -> None:
    layer = EmbeddingLayer(SCHEMA)
    empty: list[list[int]] = [[], []]
    embeddings = layer(
        _features(item=[[1], [2]], user=[[3], [4]], tags=empty, clicks=empty, acts=empty)
    )
    assert torch.equal(embeddings.pooled[:, 24:], torch.zeros(2, 4))
    assert embeddings.sequences["clicks"].values().shape == (0, 16)


def test_rows_depend_on_seed_table_and_number_alone() -> None:
    table = Table(name="t", num_embeddings=3000, embedding_dim=8, init_std=0.5)
    whole = torch.empty(3000, 8)
    draw_rows(whole, table, seed=7)
    part = torch.empty(1500, 4)
    draw_rows(part, table, seed=7, first_row=777, first_column=4)
    assert torch.equal(part, whole[777:2277, 4:])
    grown = torch.empty(5000, 8)
    draw_rows(grown, dataclasses.replace(table, num_embeddings=5000), seed=7)
    assert torch.equal(grown[:3000], whole)
    other = torch.empty(3000, 8)
    draw_rows(other, table, seed=8)
    assert not torch.equal(other, whole)
    draw_rows(other, dataclasses.replace(table, name="u"), seed=7)
    assert not torch.equal(other, whole)
    assert whole.std().item() == pytest.approx(0.5, rel=0.02)
    assert len(whole[:, 0].unique()) == 3000


def test_layers_of_one_seed_are_equal_and_default_to_the_process_seed() -> None:
    torch.manual_seed(5)
    first = EmbeddingLayer(SCHEMA)
    second = EmbeddingLayer(SCHEMA, seed=5)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_allocating_tables_leaves_the_process_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    for device in (torch.device("meta"), torch.device("cpu")):
        torch.manual_seed(5)
        EmbeddingLayer(SCHEMA, device)
        assert torch.equal(torch.rand(3), expected)


def test_on_meta_nothing_is_allocated() -> None:
    layer = EmbeddingLayer(SCHEMA, torch.device("meta"))
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_every_table_has_one_weight_by_name() -> None:
    layer = EmbeddingLayer(SCHEMA)
    weights = layer.table_weights()
    assert sorted(weights) == ["action", "item", "tag", "user"]
    for table in SCHEMA.tables:
        ((shard, row, column),) = local_shards(weights[table.name])
        assert shard.shape == (table.num_embeddings, table.embedding_dim)
        assert (row, column) == (0, 0)

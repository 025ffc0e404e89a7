# SPDX-License-Identifier: MIT
"""Bags whose ids have weights: sharded, unsharded and written out; what travels, and what does not.

Tables have prime numbers of rows. `term` has a bag with weights, one without and a single id;
`item` and `shelf` are read by sequences too, so their bags are pooled behind the exchange; `ad` is
dynamic; `wide` and `shelf` are cut by column in one of the plans.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, Embeddings, local_shards
from embeddings.dynamic.dynamic import draw_vectors, dynamic_parts
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.counters import Counters
from embeddings.sharding.loads import table_loads
from embeddings.sharding.sharding import ShardingConfig, plan_tables
from tests.support.processes import Processes
from tests.support.tables import shard_tables
from trainer.runtime.runtime import Runtime

BAG: dict[str, Any] = {"kind": "bag", "max_length": 4}
SCHEMA = Schema(
    tables=(
        Table(name="plain", num_embeddings=7, embedding_dim=4, init_std=0.1),
        Table(name="term", num_embeddings=31, embedding_dim=8, init_std=0.1),
        Table(name="wide", num_embeddings=101, embedding_dim=256, init_std=0.1),
        Table(name="item", num_embeddings=13, embedding_dim=16, init_std=0.1),
        Table(name="shelf", num_embeddings=17, embedding_dim=256, init_std=0.1),
        Table(
            name="ad",
            num_embeddings=64,
            embedding_dim=8,
            init_std=0.1,
            dynamic=DynamicConfig(),
        ),
    ),
    sparse=(
        SparseFeature(name="tags", table="plain", **BAG),
        SparseFeature(name="terms", table="term", weights="w", pooling="sum", **BAG),
        SparseFeature(name="words", table="term", pooling="mean", **BAG),
        SparseFeature(name="term", table="term"),
        SparseFeature(name="means", table="wide", weights="w", pooling="mean", **BAG),
        SparseFeature(name="item", table="item"),
        SparseFeature(name="basket", table="item", weights="w", pooling="mean", **BAG),
        SparseFeature(name="clicks", table="item", kind="sequence", max_length=4, history="h"),
        SparseFeature(name="cart", table="shelf", weights="w", pooling="sum", **BAG),
        SparseFeature(name="seen", table="shelf", kind="sequence", max_length=4, history="h"),
        SparseFeature(name="ads", table="ad", weights="w", pooling="mean", **BAG),
    ),
    labels=(Label(name="click"),),
)
NUM_EXAMPLES = 12
SGD = SparseOptimizerConfig(kind="sgd", learning_rate=0.1)
ADAGRAD = SparseOptimizerConfig(learning_rate=0.1)
TABLES = ("plain", "term", "wide", "item", "shelf")
ROW_WISE: dict[str, Any] = {"tables": dict.fromkeys(TABLES, "row_wise")}
PLANS: dict[str, dict[str, Any]] = {
    "table_wise": {"tables": dict.fromkeys(TABLES, "table_wise")},
    "mixed": {
        "tables": {**ROW_WISE["tables"], "wide": "column_wise", "shelf": "column_wise"}
        | {"plain": "table_wise"}
    },
    "dedup": {**ROW_WISE, "dedup": True},
}


class Tables(nn.Module):
    """The tables of a schema in one layer, or in a layer each."""

    def __init__(self, device: str = "cpu", apart: bool = False, schema: Schema = SCHEMA) -> None:
        super().__init__()
        parts = [only(schema, table.name) for table in schema.tables] if apart else [schema]
        self.layers = nn.ModuleList(EmbeddingLayer(p, torch.device(device), 3) for p in parts)

    def forward(self, features: KeyedJaggedTensor) -> list[Embeddings]:
        return [layer(features) for layer in self.layers]


def only(schema: Schema, table: str) -> Schema:
    features = tuple(feature for feature in schema.sparse if feature.table == table)
    return dataclasses.replace(schema, tables=(schema.table(table),), sparse=features)


def pooled_of(found: list[Embeddings]) -> Tensor:
    """Return the pooled vectors in the schema's order, whether they come from one layer or more."""
    if len(found) == 1:
        return found[0].pooled
    parts: dict[str, Tensor] = {}
    for table, part in zip(SCHEMA.tables, found, strict=True):
        names = [f.name for f in only(SCHEMA, table.name).sparse if f.kind != "sequence"]
        parts |= zip(names, part.pooled.split(table.embedding_dim, 1), strict=True)
    return torch.cat([parts[f.name] for f in SCHEMA.sparse if f.kind != "sequence"], 1)


def loss_of(found: list[Embeddings]) -> Tensor:
    """Return a number in which everything that was looked up has a weight of its own."""
    parts = [pooled_of(found)]
    parts += [rows.values() for part in found for rows in part.sequences.values()]
    return sum((x * torch.linspace(-1, 1, x.shape[1])).sum() for x in parts)  # type: ignore


def lists_of(step: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Return each feature's ids and weights in the examples of a step; 0 and negative ones, too."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for feature in SCHEMA.sparse:
        sizes = torch.ones(NUM_EXAMPLES, dtype=torch.int64)
        if feature.kind != "id":
            sizes = torch.randint(0, 5, (NUM_EXAMPLES,), generator=generator)
        rows = SCHEMA.table(feature.table).num_embeddings
        ids = torch.randint(0, rows, (int(sizes.sum()),), generator=generator)
        # Of any sign, but no two that cancel: Adagrad would make a step of what rounding leaves.
        weights = torch.randn(len(ids), generator=generator)
        if feature.name == "means":
            weights[: len(ids) // 2] = 0
        found[feature.name] = ids.split(sizes.tolist()), weights.split(sizes.tolist())
    return found


def features_of(step: int, first: int = 0, last: int = NUM_EXAMPLES, empty: bool = False) -> Any:
    """Return examples `first` to `last` - 1 as a batch has them; no ids in lists if `empty`."""
    values, factors, lengths = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)], []
    for feature in SCHEMA.sparse:
        ids, weights = lists_of(step)[feature.name]
        for some, own in zip(ids[first:last], weights[first:last], strict=True):
            if empty and feature.kind != "id":
                some, own = some[:0], own[:0]
            own = own if feature.weights else torch.ones(len(some))
            is_mean = feature.kind == "bag" and feature.pooling == "mean"
            values.append(some)
            factors.append(own / max(1, len(some)) if is_mean else own)
            lengths.append(len(some))
    return KeyedJaggedTensor(
        keys=[feature.name for feature in SCHEMA.sparse],
        values=torch.cat(values),
        weights=torch.cat(factors),
        lengths=torch.tensor(lengths),
    )


def written_out(step: int, tables: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return pooled vectors, list by list, and the loss of a step."""
    pooled, sequences = [], []
    for feature in SCHEMA.sparse:
        rows = []
        for ids, weights in zip(*lists_of(step)[feature.name], strict=True):
            vectors = tables[feature.table][ids]
            if feature.weights:
                vectors = vectors * weights[:, None]
            divisor = max(1, len(ids)) if feature.pooling == "mean" else 1
            rows.append(vectors if feature.kind == "sequence" else vectors.sum(0) / divisor)
        if feature.kind == "sequence":
            sequences.append(torch.cat(rows))
        else:
            pooled.append(torch.stack(rows))
    parts = [torch.cat(pooled, 1), *sequences]
    loss = sum((x * torch.linspace(-1, 1, x.shape[1])).sum() for x in parts)
    return parts[0], cast(Tensor, loss)


def weights_of(model: nn.Module) -> dict[tuple[str, int, int], Tensor]:
    return {
        (name, row, column): shard.detach().clone()
        for layer in cast(Any, model).layers
        for name, weight in layer.table_weights().items()
        for shard, row, column in local_shards(weight)
        if shard.numel()
    }


def steps(
    runtime: Runtime, plan: dict[str, Any], apart: bool, sparse: SparseOptimizerConfig
) -> list[Any]:
    """Return pooled vectors of three steps, and the tables after each."""
    model = Tables("meta", apart)
    for layer in model.layers:
        fuse_optimizer(layer, sparse)
    sharded = shard_tables(model, ShardingConfig(**plan), runtime, NUM_EXAMPLES)
    size, found = NUM_EXAMPLES // runtime.world_size, []
    for step in range(3):
        first = runtime.rank * size
        out = sharded(features_of(step, first, first + size))
        loss_of(out).backward()
        found.append((pooled_of(out).detach(), weights_of(model)))
    return found


def several(runtime: Runtime) -> dict[str, Any]:
    """Run every plan in one call."""
    found = {name: steps(runtime, plan, False, SGD) for name, plan in PLANS.items()}
    found["adagrad"] = steps(runtime, ROW_WISE, False, ADAGRAD)
    found["apart"] = steps(runtime, PLANS["table_wise"], True, SGD)
    return found


def whole(outcomes: list[Any]) -> dict[str, Tensor]:
    """Put the parts of all ranks together, by rows and columns."""
    parts = {key: part for outcome in outcomes for key, part in outcome.items()}
    found = {}
    for name in {key[0] for key in parts}:
        own = {key[1:]: part for key, part in parts.items() if key[0] == name}
        rows = sorted({row for row, _ in own})
        found[name] = torch.cat(
            [torch.cat([own[k] for k in sorted(own) if k[0] == row], 1) for row in rows]
        )
    return found


def unsharded(sparse: SparseOptimizerConfig, ranks: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    model, found = Tables(), []
    fuse_optimizer(model.layers[0], sparse)
    for step in range(3):
        out = model(features_of(step))
        (loss_of(out) / ranks).backward()  # TorchRec takes the mean over ranks
        found.append((out[0].pooled.detach(), whole([weights_of(model)])))
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_vectors_and_gradients_are_those_of_the_sums_written_out() -> None:
    model = Tables()
    start = whole([weights_of(model)])
    start["ad"] = draw_vectors(torch.arange(64), SCHEMA.table("ad"), seed=3)
    start = {name: weight.requires_grad_() for name, weight in start.items()}
    fuse_optimizer(model.layers[0], SGD)
    found = model(features_of(0))
    pooled, loss = written_out(0, start)
    torch.testing.assert_close(found[0].pooled, pooled, rtol=1e-6, atol=1e-7)
    zero = [i for i, w in enumerate(lists_of(0)["means"][1]) if len(w) and not w.any()]
    assert zero and not found[0].pooled[zero, 28:284].any()
    loss_of(found).backward()
    loss.backward()
    after = whole([weights_of(model)])
    (part,) = dynamic_parts(model)
    held = part.map.ids >= 0
    after["ad"] = start["ad"].detach().index_copy(0, part.map.ids[held], part.weight[held])
    for name, weight in start.items():
        gradient = cast(Tensor, weight.grad)
        assert gradient.any()
        expected = weight.detach() - 0.1 * gradient
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_sharding_of_tables_with_weights_reads_and_trains_as_the_whole_tables(
    processes: Processes, ranks: int
) -> None:
    outcomes = processes.run(several, world_size=ranks)
    expected = {"": unsharded(SGD, ranks), "adagrad": unsharded(ADAGRAD, ranks)}
    for plan in outcomes[0]:
        if plan == "apart":
            continue
        for step, (pooled, tables) in enumerate(expected.get(plan, expected[""])):
            parts = [outcome[plan][step] for outcome in outcomes]
            torch.testing.assert_close(
                torch.cat([p for p, _ in parts]), pooled, rtol=1e-5, atol=1e-6
            )
            close(whole([t for _, t in parts]), tables)
    for outcome in outcomes:
        for one, other in zip(outcome["table_wise"], outcome["apart"], strict=True):
            assert torch.equal(one[0], other[0])
            assert one[1].keys() == other[1].keys()
            assert all(torch.equal(shard, other[1][key]) for key, shard in one[1].items())
    shards = {key for outcome in outcomes for key in outcome["mixed"][0][1]}
    for name in ("wide", "shelf"):
        assert len([key for key in shards if key[0] == name]) == 2


def with_empty_lists(runtime: Runtime, where: tuple[int, ...]) -> Any:
    """Take a step in which the ranks of `where` have no ids in any list."""
    model = Tables("meta")
    fuse_optimizer(model.layers[0], SGD)
    sharded = shard_tables(model, ShardingConfig(**ROW_WISE), runtime, NUM_EXAMPLES)
    start = weights_of(model)
    out = sharded(features_of(0, empty=runtime.rank in where))
    loss_of(out).backward()
    return pooled_of(out).detach(), start, weights_of(model)


@pytest.mark.dist
@pytest.mark.parametrize("where", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_lists_that_are_empty_on_one_rank_or_on_all_give_zeros_and_leave_their_tables(
    processes: Processes, where: tuple[int, ...]
) -> None:
    outcomes = processes.run(with_empty_lists, where)
    for rank, (pooled, *_) in enumerate(outcomes):
        assert pooled.isfinite().all()
        assert bool(pooled[:, 28:284].any()) == (rank not in where)
    start, after = (whole([outcome[i] for outcome in outcomes]) for i in (1, 2))
    for name in ("wide", "shelf"):
        assert torch.equal(start[name], after[name]) == (len(where) == 2), name
    assert all(weight.isfinite().all() for weight in after.values())


def sent(runtime: Runtime, schema: Schema, features: KeyedJaggedTensor) -> dict[str, int]:
    """Return what the second of two equal steps asks of tables and network."""
    model = Tables("meta", schema=schema)
    fuse_optimizer(model.layers[0], SGD)
    config = ShardingConfig(sharding_types=("table_wise",))
    sharded = shard_tables(model, config, runtime, NUM_EXAMPLES)
    loss_of(sharded(features)).backward()
    with Counters(sharded) as counts:
        loss_of(sharded(features)).backward()
    return counts.to_dict()


def both(runtime: Runtime) -> list[dict[str, int]]:
    """Return counts with and without weights: of a bag, one beside a sequence, a dynamic one."""
    found, features = [], features_of(0)
    for names in (("terms",), ("basket", "clicks"), ("ads",)):
        sparse = tuple(f for f in SCHEMA.sparse if f.name in names)
        for part in (sparse, tuple(dataclasses.replace(f, weights="") for f in sparse)):
            tables = (SCHEMA.table(sparse[0].table),)
            schema = dataclasses.replace(SCHEMA, tables=tables, sparse=part)
            own = [features[f.name] for f in part]
            batch = KeyedJaggedTensor(
                keys=[f.name for f in part],
                values=torch.cat([one.values() for one in own]),
                weights=torch.cat([one.weights() for one in own]) if part is sparse else None,
                lengths=torch.cat([one.lengths() for one in own]),
            )
            found.append(sent(runtime, schema, batch))
    return found


@pytest.mark.dist
def test_a_weight_travels_with_each_pooled_id_and_never_where_one_vector_an_id_is_kept(
    processes: Processes,
) -> None:
    outcomes = processes.run(both)
    totals = [{k: sum(o[i][k] for o in outcomes) for k in outcomes[0][0]} for i in range(6)]
    pooled, plain = totals[:2]
    assert totals[2] == totals[3] and totals[4] == totals[5]
    ids = features_of(0)["terms"].values().numel()
    # The rank that has no table sends all its ids. An int64 more a rank says how many weights come.
    assert pooled["bytes_sent"] - plain["bytes_sent"] == 4 * ids + 2 * 8
    for name in ("lookups", "ids_in", "ids_sent", "ids_looked_up"):
        assert pooled[name] == plain[name]
    # Ids, their weights and the numbers of both are exchanged: one more, of all features together.
    assert pooled["collectives"] == plain["collectives"] + 2


def test_tables_with_weights_stand_together_and_their_ids_count_for_twelve_bytes() -> None:
    model = Tables("meta")
    layer = cast(EmbeddingLayer, model.layers[0])
    assert layer.bags is not None and layer.weighted is not None
    assert [t.name for t in layer.bags.embedding_bag_configs()] == ["plain"]
    assert [t.name for t in layer.weighted.embedding_bag_configs()] == ["term", "wide"]
    fuse_optimizer(layer, SGD)
    config = ShardingConfig()
    topology = config.topology(2, 2, "cpu")
    loads = {load.name: load for load in table_loads(model, {}, ("table_wise",), topology)}
    assert {name: load.id_bytes for name, load in loads.items()} == {
        **dict.fromkeys(loads, 8),
        "term": 12,
        "wide": 12,
    }
    plan = {t.table: t for t in plan_tables(model, config, topology, NUM_EXAMPLES).tables}
    lighter = dataclasses.replace(
        SCHEMA, sparse=tuple(dataclasses.replace(f, weights="") for f in SCHEMA.sparse)
    )
    other = Tables("meta", schema=lighter)
    fuse_optimizer(other.layers[0], SGD)
    before = {t.table: t for t in plan_tables(other, config, topology, NUM_EXAMPLES).tables}
    more = 4 * 4 * 2 * NUM_EXAMPLES  # 4 bytes for each of 4 ids of the examples of two ranks
    assert plan["wide"].bytes_per_rank == before["wide"].bytes_per_rank + more

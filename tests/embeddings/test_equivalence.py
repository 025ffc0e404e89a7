# SPDX-License-Identifier: MIT
"""Sharded tables against whole ones: every kind of feature, sharding and optimizer, odd sizes.

Tables have prime numbers of rows, so that no sharding divides them evenly; `tiny` has fewer rows
than three ranks, and `wide` is the narrowest table that TorchRec cuts by columns.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, Embeddings, local_shards
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.sharders import sharding_plan
from embeddings.sharding.sharding import ShardingConfig, plan_tables
from tests.support.processes import Processes
from tests.support.tables import shard_tables
from trainer.checkpoint import dcp
from trainer.checkpoint.state import fused_tensors
from trainer.runtime.runtime import Runtime

SCHEMA = Schema(
    tables=(
        Table(name="tiny", num_embeddings=2, embedding_dim=4, init_std=0.1),
        Table(name="seven", num_embeddings=7, embedding_dim=8, init_std=0.1),
        Table(name="shared", num_embeddings=13, embedding_dim=16, init_std=0.1),
        Table(name="item", num_embeddings=31, embedding_dim=16, init_std=0.1),
        Table(name="wide", num_embeddings=101, embedding_dim=256, init_std=0.1),
    ),
    sparse=(
        SparseFeature(name="flag", table="tiny"),
        SparseFeature(name="sums", table="seven", kind="bag", max_length=4, pooling="sum"),
        SparseFeature(name="from", table="shared"),
        SparseFeature(name="to", table="shared"),
        SparseFeature(name="item", table="item", side="item"),
        SparseFeature(name="basket", table="item", kind="bag", max_length=3, pooling="mean"),
        SparseFeature(name="clicks", table="item", kind="sequence", max_length=5, history="h"),
        SparseFeature(name="means", table="wide", kind="bag", max_length=4, pooling="mean"),
    ),
    labels=(Label(name="click"),),
)
NAMES = tuple(table.name for table in SCHEMA.tables)
NUM_EXAMPLES = 12
Parts = dict[tuple[str, int, int], Tensor]


class Tables(nn.Module):
    """Nothing but tables; its loss weighs every number differently."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.embeddings = EmbeddingLayer(SCHEMA, device, seed=3)

    def forward(self, features: KeyedJaggedTensor) -> Embeddings:
        return self.embeddings(features)


def _loss(found: Embeddings) -> Tensor:
    parts = [found.pooled, *(rows.values() for rows in found.sequences.values())]
    return sum((x * torch.linspace(-1, 1, x.shape[1])).sum() for x in parts)  # type: ignore


def _features(step: int, first: int, last: int, empty: tuple[str, ...] = ()) -> KeyedJaggedTensor:
    """Return examples `first` to `last` - 1 of a step's batch; lists of `empty` hold nothing."""
    generator = torch.Generator().manual_seed(step)
    values, lengths = [], []
    for feature in SCHEMA.sparse:
        sizes = torch.ones(NUM_EXAMPLES, dtype=torch.int64)
        if feature.kind != "id":
            sizes = torch.randint(0, feature.max_length + 1, (NUM_EXAMPLES,), generator=generator)
            sizes *= feature.name not in empty
        rows = SCHEMA.table(feature.table).num_embeddings
        ids = torch.randint(0, rows, (int(sizes.sum()),), generator=generator)
        values += ids.split(sizes.tolist())[first:last]
        lengths.append(sizes[first:last])
    return KeyedJaggedTensor(
        keys=[feature.name for feature in SCHEMA.sparse],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
    )


def _shard(runtime: Runtime, kinds: dict[str, str], sparse: SparseOptimizerConfig) -> Any:
    model = Tables(torch.device("meta"))
    fuse_optimizer(model.embeddings, sparse)
    config = ShardingConfig(tables=cast(Any, kinds), dedup=kinds.get("dedup") is not None)
    return shard_tables(model, config, runtime, NUM_EXAMPLES)


def _own(runtime: Runtime, step: int, empty: tuple[str, ...] = ()) -> KeyedJaggedTensor:
    size = NUM_EXAMPLES // runtime.world_size
    return _features(step, runtime.rank * size, (runtime.rank + 1) * size, empty)


def _copies(sharded: DistributedModelParallel) -> tuple[Parts, Parts]:
    """Return this rank's parts of the tables and of the optimizer's states."""
    layer = cast(EmbeddingLayer, sharded.module.embeddings)
    state = cast(CombinedOptimizer, sharded.fused_optimizer).state_dict()["state"]
    states = {key: value for one in state.values() for key, value in cast(Any, one).items()}
    found = [
        {
            (name.rsplit("embeddings.", 1)[-1], row, column): shard.detach().clone()
            for name, tensor in tensors.items()
            for shard, row, column in local_shards(tensor)
        }
        for tensors in (layer.table_weights(), states)
    ]
    return found[0], found[1]


def _whole(outcomes: list[Any]) -> dict[str, Tensor]:
    """Put the parts of all ranks together, by rows and columns."""
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for outcome in outcomes:
        for (name, row, column), part in outcome.items():
            if part.numel():
                found.setdefault(name, {})[row, column] = part
    return {
        name: torch.cat(
            [
                torch.cat([parts[key] for key in sorted(parts) if key[0] == row], dim=-1)
                for row in sorted({row for row, _ in parts})
            ]
        )
        for name, parts in found.items()
    }


def _train(
    runtime: Runtime, kinds: dict[str, str], sparse: Any, empty: dict[int, tuple[str, ...]]
) -> Any:
    """Take three steps; return the first's output, the tables, and how many shards of `wide`."""
    sharded = _shard(runtime, kinds, sparse)
    first: Any = None
    for step in range(3):
        found = sharded(_own(runtime, step, empty.get(runtime.rank, ())))
        _loss(found).backward()
        if first is None:
            values = {name: rows.values().detach() for name, rows in found.sequences.items()}
            first = found.pooled.detach(), values
    return first, _copies(sharded)[0]


def _train_whole(sparse: SparseOptimizerConfig, ranks: int) -> tuple[Embeddings, dict[str, Tensor]]:
    model = Tables()
    fuse_optimizer(model.embeddings, sparse)
    first: Any = None
    for step in range(3):
        found = model(_features(step, 0, NUM_EXAMPLES))
        (_loss(found) / ranks).backward()  # TorchRec takes the mean over ranks
        first = found if first is None else first
    return first, {n: cast(Tensor, w) for n, w in model.embeddings.table_weights().items()}


def _every(kind: str, **others: str) -> dict[str, str]:
    return {name: others.get(name, kind) for name in NAMES}


ROWWISE = SparseOptimizerConfig(learning_rate=0.1)
ADAGRAD = SparseOptimizerConfig(kind="adagrad", learning_rate=0.1)
SGD = SparseOptimizerConfig(kind="sgd", learning_rate=0.1)
MIXED = {"shared": "row_wise", "wide": "column_wise", "item": "row_wise"}


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("kinds", "sparse"),
    [
        (_every("table_wise"), ROWWISE),
        (_every("row_wise", tiny="table_wise"), ROWWISE),
        (_every("row_wise", tiny="table_wise"), ADAGRAD),
        (_every("table_wise", **MIXED), ADAGRAD),
        (_every("table_wise", **MIXED), SGD),
    ],
    ids=["table_wise", "row_wise", "row_wise-adagrad", "mixed-adagrad", "mixed-sgd"],
)
def test_every_kind_of_feature_reads_and_trains_as_unsharded(
    processes: Processes, kinds: dict[str, str], sparse: SparseOptimizerConfig, ranks: int
) -> None:
    outcomes = processes.run(_train, kinds, sparse, {}, world_size=ranks)
    first, expected = _train_whole(sparse, ranks)
    pooled = torch.cat([outcome[0][0] for outcome in outcomes])
    torch.testing.assert_close(pooled, first.pooled, rtol=1e-6, atol=1e-7)
    # What is only copied is copied bit for bit: single ids and sequences.
    assert torch.equal(pooled[:, :4], first.pooled[:, :4])
    assert torch.equal(pooled[:, 12:60], first.pooled[:, 12:60])
    clicks = torch.cat([outcome[0][1]["clicks"] for outcome in outcomes])
    assert torch.equal(clicks, first.sequences["clicks"].values())
    tables = _whole([outcome[1] for outcome in outcomes])
    start = Tables().embeddings.table_weights()
    for name, weight in expected.items():
        assert not torch.equal(tables[name], cast(Tensor, start[name])), name
        torch.testing.assert_close(tables[name], weight, rtol=1e-5, atol=1e-6)
    cut = {key for outcome in outcomes for key in outcome[1] if key[0] == "wide.weight"}
    wide = {key for outcome in outcomes for key in outcome[1] if key[0].startswith("wide")}
    assert len(cut | wide) == {"table_wise": 1, "row_wise": ranks, "column_wise": 2}[kinds["wide"]]


def test_a_table_with_too_few_rows_for_its_ranks_is_never_cut_into_rows() -> None:
    model = Tables(torch.device("meta"))
    fuse_optimizer(model.embeddings, ROWWISE)

    def plan(ranks: int, **settings: Any) -> Any:
        config = ShardingConfig(**settings)
        return plan_tables(model, config, config.topology(ranks, ranks, "cpu"), NUM_EXAMPLES)

    # `seven` on 6 ranks would be 2, 2, 2, 1, 0, 0; on 4 ranks it is 2, 2, 2, 1.
    told = {"tables": {"seven": "row_wise"}}
    with pytest.raises(RuntimeError, match=r"'seven' of 7 rows may be \['row_wise'\], and 6 cpu"):
        plan(6, **told)
    fits = plan(4, **told)
    with pytest.raises(RuntimeError, match="row_wise leaves ranks without rows of table 'seven'"):
        wider = tuple(
            dataclasses.replace(t, ranks=tuple(range(6))) if t.sharding == "row_wise" else t
            for t in fits.tables
        )
        sharding_plan(dataclasses.replace(fits, world_size=6, local_world_size=6, tables=wider))
    sharding_plan(fits)
    kinds = {t.table: t.sharding for t in plan(6, sharding_types=("row_wise", "table_wise")).tables}
    assert kinds["tiny"] == kinds["seven"] == "table_wise"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
@pytest.mark.parametrize("where", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_features_that_are_empty_on_one_rank_or_on_all_give_zeros_and_leave_their_tables(
    processes: Processes, kind: str, where: tuple[int, ...]
) -> None:
    lists = ("sums", "basket", "clicks", "means")
    empty = dict.fromkeys(where, lists)
    outcomes = processes.run(_train, _every(kind), ROWWISE, empty)
    start = Tables().embeddings.table_weights()
    tables = _whole([outcome[1] for outcome in outcomes])
    for rank, ((pooled, sequences), _) in enumerate(outcomes):
        assert pooled.isfinite().all()
        assert len(pooled) == NUM_EXAMPLES // 2
        if rank in where:
            assert len(sequences["clicks"]) == 0
            assert not pooled[:, 4:12].any() and not pooled[:, -256:].any()
    for name in ("seven", "wide"):
        unchanged = torch.equal(tables[name], cast(Tensor, start[name]))
        assert unchanged == (len(where) == 2), name
    assert all(weight.isfinite().all() for weight in tables.values())


def _save(runtime: Runtime, kinds: dict[str, str], sparse: Any, folder: Path) -> Any:
    """Take two steps, save, take a third; return tables and states before and tables after it."""
    sharded = _shard(runtime, kinds, sparse)
    for step in range(2):
        _loss(sharded(_own(runtime, step))).backward()
    saved = _copies(sharded)
    dcp.save(_tensors(sharded), folder, 2, {})
    _loss(sharded(_own(runtime, 2))).backward()
    return *saved, _copies(sharded)[0]


def _tensors(sharded: DistributedModelParallel) -> dict[str, Any]:
    fused = fused_tensors(cast(CombinedOptimizer, sharded.fused_optimizer))
    return {"model": sharded.state_dict(), **fused}


def _load(runtime: Runtime, kinds: dict[str, str], sparse: Any, path: Path) -> Any:
    sharded = _shard(runtime, kinds, sparse)
    tensors = _tensors(sharded)
    dcp.load(tensors, path)
    sharded.load_state_dict(tensors["model"])
    loaded = _copies(sharded)
    _loss(sharded(_own(runtime, 2))).backward()
    return *loaded, _copies(sharded)[0]


@pytest.mark.dist
@pytest.mark.parametrize("sparse", [ADAGRAD, SGD], ids=["adagrad", "sgd"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("table_wise", "column_wise"),
        ("column_wise", "table_wise"),
        ("row_wise", "column_wise"),
        ("column_wise", "row_wise"),
    ],
)
def test_tables_cut_by_column_and_their_states_survive_a_change_of_plan(
    processes: Processes, tmp_path: Path, old: str, new: str, sparse: SparseOptimizerConfig
) -> None:
    saved = processes.run(_save, _every(old), sparse, tmp_path)
    found = processes.run(_load, _every(new), sparse, tmp_path / "step-2")
    for outcomes, kind in ((saved, old), (found, new)):
        parts = {key for outcome in outcomes for key in outcome[0] if key[0].startswith("wide")}
        assert len(parts) == (1 if kind == "table_wise" else 2)
    for what in (0, 1):
        expected, loaded = (_whole([one[what] for one in part]) for part in (saved, found))
        assert expected.keys() == loaded.keys()
        assert len(expected) == (0 if what and sparse.kind == "sgd" else len(NAMES))
        for name, part in expected.items():
            assert torch.equal(part, loaded[name]), name
    after = [_whole([one[2] for one in part]) for part in (saved, found)]
    for name, weight in after[0].items():
        torch.testing.assert_close(after[1][name], weight, rtol=1e-5, atol=1e-6)

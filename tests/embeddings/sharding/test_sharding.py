# SPDX-License-Identifier: MIT
"""Plans: which tables go where, what is refused, and that sharded tables train like whole ones."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan

from embeddings.collection import EmbeddingLayer
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.sharding.plans import describe_plan
from embeddings.sharding.sharding import ShardingConfig, _check, plan_sharding, plan_tables
from tests.support.processes import Processes
from tests.support.tiny import SCHEMA, TinyRanker
from tests.support.training import Outcome, Recipe, train, train_whole, whole_tables

ADAGRAD = SparseOptimizerConfig(kind="adagrad", learning_rate=0.1)
ROWWISE = SparseOptimizerConfig(learning_rate=0.1)


def _plan(config: ShardingConfig, ranks: int, optimizer: SparseOptimizerConfig = ROWWISE) -> Any:
    return plan_sharding(_model(optimizer), config, config.topology(ranks, min(ranks, 4), "cpu"))


def _model(optimizer: SparseOptimizerConfig = ROWWISE) -> nn.Module:
    model = TinyRanker(torch.device("meta"))
    fuse_optimizer(model.embeddings, optimizer)
    return model


def _kinds(plan: ShardingPlan) -> dict[str, str]:
    return {
        name: parameter.sharding_type
        for module in plan.plan.values()
        for name, parameter in cast(dict[str, Any], module).items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_every_table_is_planned_and_none_is_data_parallel_at_any_number_of_ranks(
    ranks: int,
) -> None:
    kinds = _kinds(_plan(ShardingConfig(), ranks))
    assert sorted(kinds) == ["action", "item", "tag", "user"]
    assert set(kinds.values()) <= {"table_wise", "row_wise"}


def test_one_rank_gets_whole_tables() -> None:
    assert set(_kinds(_plan(ShardingConfig(), 1)).values()) == {"table_wise"}


def test_a_table_gets_the_kind_it_is_told() -> None:
    told = {"item": "table_wise", "user": "column_wise", "action": "row_wise"}
    kinds = _kinds(_plan(ShardingConfig(tables=told), 2, ADAGRAD))  # type: ignore
    assert {name: kinds[name] for name in told} == told


def test_a_table_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['itme'\] do not exist; tables: \['action', 'item'"):
        _plan(ShardingConfig(tables={"itme": "table_wise"}), 2)


def test_columns_of_a_rowwise_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="one number per row and shard instead of one per row"):
        _plan(ShardingConfig(tables={"user": "column_wise"}), 2)


def test_tables_that_do_not_fit_are_refused_with_a_way_out() -> None:
    with pytest.raises(RuntimeError, match="no plan places the tables on 2 cpu ranks"):
        _plan(ShardingConfig(host_memory_bytes=2000), 2)


def test_a_kind_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(RuntimeError, match="allow more sharding types"):
        _plan(ShardingConfig(tables={"item": "table_row_wise"}), 2)


def test_a_plan_without_a_table_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"\['item'\] are missing and would not be trained"):
        _check({}, nn.Module(), {"item"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharding_types": ("data_parallel",)}, "got \\['data_parallel'\\]"),
        ({"sharding_types": ()}, "at least one kind"),
        ({"tables": {"item": "grid"}}, "tables: expected kinds"),
        ({"device_memory_bytes": -1}, "expected numbers >= 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardingConfig(**settings)


def test_a_described_plan_names_kind_ranks_memory_cost_and_verdict_of_each_table() -> None:
    config = ShardingConfig(tables={"item": "row_wise"})
    lines = describe_plan(plan_tables(_model(), config, config.topology(2, 2, "cpu"))).splitlines()
    assert lines[0] == (
        "table   sharding    kernel  rows x columns  ranks  MiB/rank  ms/step  verdict"
    )
    row = next(line.split() for line in lines if line.startswith("item"))
    assert row[:7] == ["item", "row_wise", "fused", "60", "x", "16", "0,1"]
    assert row[-1] == "fits" and float(row[7]) > 0 and float(row[8]) > 0
    assert len(lines) == 7 and lines[-1] == "everything fits"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sparse", "kinds"),
    [
        (ROWWISE, {name: "table_wise" for name in ("user", "item", "tag", "action")}),
        (ROWWISE, {name: "row_wise" for name in ("user", "item", "tag", "action")}),
        (ADAGRAD, {"user": "column_wise", "item": "column_wise", "action": "row_wise"}),
    ],
    ids=["table_wise", "row_wise", "column_wise"],
)
def test_sharded_tables_train_like_whole_ones(
    processes: Processes, sparse: SparseOptimizerConfig, kinds: dict[str, str]
) -> None:
    recipe = Recipe(sparse=sparse, sharding=ShardingConfig(tables=cast(Any, kinds)))
    outcomes: list[Outcome] = processes.run(train, recipe)
    layer = EmbeddingLayer(SCHEMA, seed=0)
    start = whole_tables(outcomes, start=True)
    for name, weight in layer.table_weights().items():
        assert torch.equal(start[name], cast(torch.Tensor, weight)), name
    weights = train_whole(recipe).embeddings.table_weights()
    expected, found = cast(dict[str, torch.Tensor], weights), whole_tables(outcomes)
    for name, weight in expected.items():
        assert not torch.equal(found[name], start[name])
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)

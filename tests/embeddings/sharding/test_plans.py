# SPDX-License-Identifier: MIT
"""Plans as data: at the size of a company, read back, pinned, compared, and what does not fit."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embeddings.collection import EmbeddingLayer
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.placement import Machines, TableLoad, place, usage, ways
from embeddings.sharding.plans import (
    KEY,
    Plan,
    describe_plan,
    differences,
    plan_from_dict,
    read_plan,
)
from embeddings.sharding.sharders import sharding_plan
from embeddings.sharding.sharding import ShardingConfig, check_plan, plan_tables
from tests.support.tiny import TinyRanker

GIGABYTE = 10**9


def _tiny(config: ShardingConfig, ranks: int = 2) -> Plan:
    model = TinyRanker(torch.device("meta"))
    fuse_optimizer(model.embeddings, SparseOptimizerConfig())
    return plan_tables(model, config, config.topology(ranks, ranks, "cpu"), 16)


def _industrial(num_tables: int, num_rows: int) -> Schema:
    """Return tables whose sizes fall off as a power of their rank; every tenth is a history's."""
    sizes = np.arange(1, num_tables + 1) ** -1.1
    rows = np.maximum(2, sizes / sizes.sum() * num_rows).astype(np.int64)
    rows[0] += num_rows - rows.sum()
    names = [f"t{i}" for i in range(num_tables)]
    tables = [
        Table(name=name, num_embeddings=int(size), embedding_dim=(8, 16, 32, 64)[i % 4])
        for i, (name, size) in enumerate(zip(names, rows, strict=True))
    ]
    features = [
        SparseFeature(name=f"f_{name}", table=name, kind="sequence", max_length=50, history="h")
        if i % 10 == 9
        else SparseFeature(name=f"f_{name}", table=name)
        for i, name in enumerate(names)
    ]
    return Schema(tables=tuple(tables), sparse=tuple(features), labels=(Label(name="click"),))


def test_a_thousand_tables_of_ten_billion_rows_are_planned_for_128_ranks_in_a_minute() -> None:
    schema = _industrial(1000, 10**10)
    assert sum(table.num_embeddings for table in schema.tables) >= 10**10
    started = time.process_time()
    layer = EmbeddingLayer(schema, torch.device("meta"), seed=0)
    fuse_optimizer(layer, SparseOptimizerConfig())
    config = ShardingConfig(device_memory_bytes=80 * 2**30)
    plan = plan_tables(layer, config, config.topology(128, 8, "cuda"), 4096)
    text = describe_plan(plan)
    shards = sharding_plan(plan)
    seconds = time.process_time() - started
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert seconds <= 60, seconds
    assert resident <= 4 * GIGABYTE, resident
    assert sorted(table.table for table in plan.tables) == sorted(t.name for t in schema.tables)
    assert sum(len(module) for module in shards.plan.values()) == 1000  # type: ignore
    assert text.count("\n") == 1002 and plan.fits
    assert max(plan.rank_bytes) <= plan.capacity_bytes
    # Nobody waits long for the busiest rank.
    assert max(plan.rank_cost_ms) <= 1.1 * np.mean(plan.rank_cost_ms)


def test_the_shards_of_a_table_are_all_of_its_rows_once() -> None:
    layer = EmbeddingLayer(_industrial(30, 10**6), torch.device("meta"), seed=0)
    config = ShardingConfig(device_memory_bytes=20 * 10**6)
    plan = plan_tables(layer, config, config.topology(16, 4, "cuda"), 64)
    for table in plan.tables:
        module: Any = sharding_plan(plan).plan[table.module]
        shards = module[table.table].sharding_spec.shards
        cells = sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards)
        assert cells == table.rows * table.columns
    assert len({table.sharding for table in plan.tables}) > 1


def _machines(**changes: Any) -> Machines:
    settings: dict[str, Any] = {
        **{"ranks": 4, "local_ranks": 2, "batch_size": 8, "capacity_bytes": 10**6},
        **{"spill_bytes": 0, "memory_speed": 1e6, "spill_speed": 1e4},
        **{"local_speed": 1e6, "network_speed": 1e5},
    }
    return Machines(**(settings | changes))


def _load(name: str = "t", rows: int = 1000, **changes: Any) -> TableLoad:
    settings: dict[str, Any] = {
        **{"module": "bags", "columns": 8, "state_bytes": 4, "ids": 1, "vectors": 1},
        **{"pooled": True, "kinds": ("table_wise", "table_row_wise", "row_wise")},
    }
    return TableLoad(name=name, rows=rows, **(settings | changes))


def test_bytes_and_time_of_each_way_follow_their_formulas() -> None:
    whole, host, rows = ways(_load(), _machines())
    # 32 examples in all, one id of 8 bytes and one vector of 32 bytes there and one back.
    assert whole.bytes == 1000 * 36 + 32 * (8 + 2 * 32)
    assert whole.cost_ms == pytest.approx(32 * (3 * 32 + 2 * 4) / 1e6 + 32 * (8 + 64) / 1e5)
    assert (host.shards, rows.shards) == (2, 4)
    # A quarter of the ids and rows, but a partial sum of every example.
    assert rows.bytes == 250 * 36 + 8 * 8 + 32 * 64
    (sequence,) = ways(_load(pooled=False, kinds=("row_wise",)), _machines())
    assert sequence.bytes == 250 * 36 + 8 * 8 + 8 * 64


def test_a_table_too_large_for_a_rank_is_split_and_the_others_stay_whole() -> None:
    machines = _machines()
    large, *small = place([_load("large", 60_000), *(_load(f"s{i}") for i in range(8))], machines)
    assert large.way.kind in ("row_wise", "table_row_wise") and large.fits
    assert {item.way.kind for item in small} == {"table_wise"}
    used, busy = usage([large, *small], machines)
    assert max(used) <= machines.capacity_bytes and min(busy) > 0


def test_what_has_no_room_in_device_memory_goes_to_main_memory_if_there_is_any() -> None:
    load = _load("large", 200_000)
    assert not place([load], _machines())[0].fits
    (item,) = place([load], _machines(spill_bytes=10**8))
    assert item.fits and item.spilled
    assert item.way.spilled_ms > item.way.cost_ms


def test_a_table_that_does_not_fit_is_in_the_plan_with_what_to_change() -> None:
    config = ShardingConfig(host_memory_bytes=9_000)
    plan = _tiny(config)
    assert len(plan.tables) == 4 and not plan.fits
    lines = [line for line in describe_plan(plan).splitlines() if "does not fit" in line]
    assert any("batch size" in line or "ranks" in line for line in lines)
    narrow = ShardingConfig(host_memory_bytes=9_000, sharding_types=("table_wise",))
    assert "allow row_wise" in describe_plan(_tiny(narrow))
    with pytest.raises(RuntimeError, match=r"do not fit, first '\w+': .* needs"):
        sharding_plan(plan)


def test_a_plan_comes_back_from_json_alone_or_inside_a_manifest(tmp_path: Path) -> None:
    plan = _tiny(ShardingConfig())
    assert plan_from_dict(json.loads(json.dumps(plan.to_dict())), "plan") == plan
    for values in (plan.to_dict(), {"step": 3, KEY: plan.to_dict()}):
        (tmp_path / "plan.json").write_text(json.dumps(values), encoding="utf-8")
        assert read_plan(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match=r"plan\.json: expected a plan as JSON.*trainer\.plan"):
        read_plan(tmp_path / "plan.json")


def test_a_pinned_plan_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    kinds: Any = {name: "row_wise" for name in ("user", "item", "tag", "action")}
    odd = _tiny(ShardingConfig(tables=kinds))
    assert differences(_tiny(ShardingConfig()), odd)
    path.write_text(json.dumps(odd.to_dict()), encoding="utf-8")
    pinned = _tiny(ShardingConfig(pinned_plan=str(path)))
    assert pinned == odd and differences(odd, pinned) == []


def test_a_pinned_plan_of_other_ranks_or_tables_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = _tiny(ShardingConfig())
    path.write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    config = ShardingConfig(pinned_plan=str(path))
    with pytest.raises(ValueError, match="is for 2 cpu ranks, 2 a machine, and these are 4 cpu"):
        _tiny(config, ranks=4)
    layer = EmbeddingLayer(_industrial(10, 1000), torch.device("meta"))
    model = nn.ModuleDict({"embeddings": layer})
    with pytest.raises(ValueError, match=r"does not hold the tables of this model: \['action'"):
        plan_tables(model, config, config.topology(2, 2, "cpu"))


def test_differences_name_the_table_and_both_places() -> None:
    told: Any = {"item": "row_wise"}
    one = _tiny(ShardingConfig(sharding_types=("table_wise",)))
    two = _tiny(ShardingConfig(sharding_types=("table_wise",), tables=told))
    assert any(
        d.startswith("item: table_wise on ") and "now row_wise" in d for d in differences(one, two)
    )


def test_a_checkpoint_of_another_plan_is_refused_where_that_is_asked() -> None:
    told: Any = {"item": "row_wise"}
    one = _tiny(ShardingConfig(sharding_types=("table_wise",)))
    manifest = {KEY: _tiny(ShardingConfig(sharding_types=("table_wise",), tables=told)).to_dict()}
    check_plan(manifest, one, ShardingConfig(), "step-1")
    check_plan({KEY: one.to_dict()}, one, ShardingConfig(on_new_plan="refuse"), "step-1")
    with pytest.raises(ValueError, match=r"item: row_wise on 0,1, now table_wise on .*pinned_plan"):
        check_plan(manifest, one, ShardingConfig(on_new_plan="refuse"), "step-1")
    with pytest.raises(ValueError, match="holds no sharding plan"):
        check_plan({}, one, ShardingConfig(on_new_plan="refuse"), "step-1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": [9]}, "expected ranks from 0 to 1, got \\[9\\]"),
        ({"ranks": [-1]}, "expected ranks from 0 to 1, got \\[-1\\]"),
        ({"ranks": []}, "expected ranks from 0 to 1, got \\[\\]"),
        ({"sharding": "row_wise", "ranks": [0]}, "expected 2 different ranks for row_wise, got"),
        ({"sharding": "table_wise", "ranks": [0, 1]}, "expected 1 different ranks for table_wise"),
        ({"sharding": "nope"}, "expected one of .*'table_wise'.*, got 'nope'"),
        ({"kernel": "dense"}, "expected one of .*'fused'.*, got 'dense'"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(change: dict[str, Any], message: str) -> None:
    values = _tiny(ShardingConfig()).to_dict()
    values["tables"][0] |= change
    with pytest.raises(ValueError, match=message):
        plan_from_dict(values, "plan.json")


def test_a_plan_that_holds_a_table_twice_is_refused() -> None:
    values = _tiny(ShardingConfig()).to_dict()
    values["tables"].append(values["tables"][0])
    with pytest.raises(ValueError, match=r"expected each table once, got .* more often"):
        plan_from_dict(values, "plan.json")

# SPDX-License-Identifier: MIT
"""Tables kept in FP16: the same training within its rounding, at half the memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.sharding.sharding import ShardingConfig
from tests.support import runs
from tests.support.processes import Processes
from tests.support.training import Recipe, train, whole_tables
from trainer.config.command_line import apply_overrides
from trainer.plan import plan_config
from trainer.recipes.load import load_recipe
from trainer.runtime.memory import table_bytes


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "sgd"])
def test_fp16_tables_train_within_their_rounding(kind: Any, processes: Processes) -> None:
    by_row = ShardingConfig(sharding_types=("row_wise",), tables={"action": "table_wise"})
    exact = Recipe(sparse=SparseOptimizerConfig(kind=kind, learning_rate=0.1), sharding=by_row)
    half = dataclasses.replace(exact, sparse=dataclasses.replace(exact.sparse, weights="fp16"))
    expected, found = processes.run(train, exact), processes.run(train, half)
    assert {shard.dtype for rank in found for shard in rank.tables.values()} == {torch.float16}
    assert {state.dtype for rank in found for state in rank.states.values()} <= {torch.float32}
    assert found[0].losses == pytest.approx(expected[0].losses, rel=2e-3)
    tables, exact_tables = whole_tables(found), whole_tables(expected)
    before = whole_tables(found, start=True)
    for name, table in tables.items():
        assert not torch.equal(table, before[name]), name
        assert torch.allclose(table, exact_tables[name], rtol=2e-3, atol=2e-3), name


def test_a_plan_and_the_memory_of_an_fp16_table_count_half() -> None:
    config = load_recipe("dlrm.demo")
    half = apply_overrides(config, ["--sparse.table-weights", "item", "fp16"])
    names = {table.name: table for table in config.schema.tables}
    item = names["item"]
    exact, narrow = table_bytes(item, config.sparse), table_bytes(item, half.sparse)
    assert exact - narrow == item.num_embeddings * item.embedding_dim * 2
    plans = [plan_config(one, 1, 1, "cpu") for one in (config, half)]
    sizes = [{t.table: t.bytes_per_rank for t in plan.tables} for plan in plans]
    for name in names:
        assert sizes[0][name] - sizes[1][name] == (exact - narrow if name == "item" else 0)


def test_formats_without_a_kernel_and_unknown_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel looks a bf16 table up"):
        SparseOptimizerConfig(weights="bf16")  # type: ignore
    with pytest.raises(ValueError, match=r"sparse\.table_weights: no table 'itme'"):
        apply_overrides(load_recipe("dlrm.demo"), ["--sparse.table-weights", "itme", "fp16"])


@pytest.mark.dist
def test_a_run_with_fp16_tables_resumes_and_is_inherited_from_in_either_format(
    processes: Processes, tmp_path: Path
) -> None:
    logs = runs.generate(tmp_path / "logs")
    half = ("--sparse.weights", "fp16")
    config = runs.small("dlrm.demo", logs, *half, "--checkpoint.interval-steps", "2")
    processes.run(runs.train_until, config, tmp_path / "half", 4)
    resumed = processes.run(runs.train, config, tmp_path / "half")[0]
    whole = processes.run(runs.train, config, tmp_path / "whole")[0]
    assert resumed["auc"] == whole["auc"]
    source = ("--inherit.path", str(tmp_path / "half"), "--inherit.policy", "nightly")
    for name, words in (("wide", ()), ("narrow", half)):
        later = runs.small("dlrm.demo", logs, *words, *source, "--data.allow-overlap")
        processes.run(runs.train, later, tmp_path / name, world_size=1)
        record = json.loads((tmp_path / name / "inherit.json").read_text("utf-8"))
        assert "inherited" in json.dumps(record)
    exact = runs.small("dlrm.demo", logs, "--checkpoint.interval-steps", "2")
    (tmp_path / "half" / "metrics.json").unlink()
    assert "sparse" in processes.run(runs.failure, exact, tmp_path / "half", world_size=1)[0]

# SPDX-License-Identifier: MIT
"""What a run leaves of its tables: counts of sampled steps, statistics by evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from embeddings.optimizer import set_table_updates, table_updates
from tests.support import runs
from tests.support.processes import Processes
from trainer.config.config import TrainConfig
from trainer.runtime.runtime import Runtime
from trainer.telemetry.alerts import ADVICE, full_tables
from trainer.trainer import Trainer


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.generate(tmp_path_factory.mktemp("logs"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.dist
def test_a_run_exports_what_its_steps_ask_of_the_tables_and_what_ids_find_there(
    logs: Path, processes: Processes, tmp_path: Path
) -> None:
    config = runs.small("dlrm.demo", logs, "--telemetry.interval-steps", "3")
    metrics = processes.run(runs.train, config, tmp_path)[0]
    curve = _lines(tmp_path / "curves.jsonl")
    # Nothing before a step can be counted; then the second step, the fourth, every third.
    assert len({point["step_bytes_sent"] for point in curve}) > 1
    last = curve[-1]
    features = len(config.schema.sparse)
    assert last["step_features"] == features
    assert 0 < last["step_lookups"] < features
    assert last["step_collectives"] > 0 and last["step_bytes_sent"] > 0
    assert last["step_ids_in"] >= last["step_ids_sent"] > 0
    assert {key: metrics[key] for key in last if key.startswith("step_")} == {
        key: value for key, value in last.items() if key.startswith("step_")
    }
    (line,) = _lines(tmp_path / "tables.jsonl")
    assert line["step"] == metrics["steps"]
    assert sorted(line["tables"]) == sorted(table.name for table in config.schema.tables)
    for table in config.schema.tables:
        numbers = line["tables"][table.name]
        assert numbers["rows"] == table.num_embeddings
        assert numbers["bytes"] == 4 * table.num_embeddings * table.embedding_dim
        assert 0 < numbers["occupancy"] <= 1 and 0 < numbers["hit_rate"] <= 1
        assert 0 <= numbers["missing"] < 1 and 0 < numbers["top_share"] <= 1
        assert sum(rank["ids"] for rank in numbers["ranks"]) == numbers["ids"]
        assert {rank["rank"] for rank in numbers["ranks"]} == {0, 1}
    # What was never trained is not found: test ids of a table that new values reach.
    assert min(numbers["hit_rate"] for numbers in line["tables"].values()) < 1


def _counting(config: TrainConfig) -> TrainConfig:
    """Return the configuration with one feature of few rows whose values are counted if outside."""
    schema = config.schema
    feature = next(f for f in schema.sparse if f.kind == "id" and f.transform == "hash")
    counted = dataclasses.replace(feature, table="few", transform="identity", out_of_range="count")
    few = dataclasses.replace(schema.table(feature.table), name="few", num_embeddings=40)
    sparse = tuple(counted if f is feature else f for f in schema.sparse)
    used = {f.table for f in sparse}
    tables = (few, *(table for table in schema.tables if table.name in used))
    return dataclasses.replace(
        config, schema=dataclasses.replace(schema, tables=tables, sparse=sparse)
    )


@pytest.mark.dist
def test_ids_out_of_range_and_padding_are_counted_exactly_over_ranks_a_crash_and_a_resume(
    processes: Processes, tmp_path: Path
) -> None:
    rows, epochs = 333, 2
    logs = runs.generate(tmp_path / "logs", rows_per_day=rows)
    words = ("--epochs", str(epochs), "--checkpoint.interval-steps", "1")
    config = _counting(runs.small("dlrm.demo", logs, *words))
    (feature,) = (f for f in config.schema.sparse if f.out_of_range == "count")
    output = tmp_path / "run"
    processes.run(runs.train_until, config, output, 4)  # the pipeline has read ahead
    metrics = processes.run(runs.train, config, output)[0]
    outside = {}
    for day in runs.DAYS:
        (path,) = (logs / f"dt={day}").glob("*.parquet")
        values = parquet.read_table(path, columns=[feature.column])[feature.column]
        outside[day] = sum(not 0 <= value <= 38 for value in values.drop_null().to_pylist())
        assert 0 < outside[day] < rows
    expected = epochs * outside[runs.DAYS[0]] + outside[runs.DAYS[1]]
    assert metrics["out_of_range"] == {feature.name: expected}
    # 167 rows on one rank, 166 and a row of padding on the other.
    assert metrics["train_rows"] == epochs * rows and metrics["padded_rows"] == epochs
    assert metrics["remainder"] == "padded with rows of weight 0"
    saved = json.loads((output / "metrics.json").read_text("utf-8"))
    assert saved["out_of_range"] == metrics["out_of_range"]
    plain = runs.small("dlrm.demo", logs)
    assert all(f.out_of_range != "count" for f in plain.schema.sparse)


def _go_on(runtime: Runtime, config: TrainConfig, output: Path, heir: TrainConfig) -> list[int]:
    """Train with a count of updates, as Adam keeps; return it in a run that resumes and an heir."""
    trainer = Trainer(config, output, runtime)
    set_table_updates(trainer.parallel.model, 5)
    trainer.fit()
    (output / "metrics.json").unlink()
    resumed = Trainer(config, output, runtime)
    inherited = Trainer(heir, output.with_name("heir"), runtime)
    return [table_updates(one.parallel.model) for one in (resumed, inherited)]


@pytest.mark.dist
def test_the_updates_that_adam_counts_go_on_in_a_resumed_run_and_in_an_heir(
    logs: Path, processes: Processes, tmp_path: Path
) -> None:
    config = runs.small("dlrm.demo", logs, "--max-steps", "2")
    heir = runs.small(
        "dlrm.demo", logs, "--inherit.path", str(tmp_path / "run"), "--inherit.policy", "naive"
    )
    (counts,) = processes.run(_go_on, config, tmp_path / "run", heir, world_size=1)
    assert counts == [5 + 2, 5 + 2]  # what a checkpoint after two steps holds


def test_a_dynamic_table_that_cannot_hold_its_ids_raises_an_alert_with_the_way_out() -> None:
    quiet = {"ids": 1000, "missing": 100, "admitted": 200, "failed": 2, "evicted": 80}
    assert full_tables("item", quiet) == {}
    (name, text), *more = full_tables("item", {**quiet, "failed": 3}).items()
    assert name == "failed_inserts" and not more
    assert "'item': 3 of 203 ids" in text and "num_embeddings" in ADVICE[name]
    (name, text), *more = full_tables("item", {**quiet, "evicted": 91}).items()
    assert name == "crowded_table" and not more
    assert "91 of 900" in text and "num_embeddings" in ADVICE[name]
    assert full_tables("item", dict.fromkeys(quiet, 0)) == {}

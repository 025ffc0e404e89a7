# SPDX-License-Identifier: MIT
"""A two-rank run shows both of its ranks in one place, and all that it knows of itself."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from embeddings.dynamic.idmap import TOTALS
from embeddings.schema.lifetime import DynamicConfig
from tests.support.runs import generate, small, train, train_until
from trainer.config.config import TrainConfig
from trainer.runtime.runtime import Runtime
from trainer.telemetry.callbacks import Run
from trainer.telemetry.exporter import ExportConfig
from trainer.telemetry.monitor import Monitor
from trainer.telemetry.prometheus_metrics import METRICS, PHASES
from trainer.trainer import Trainer

# What a small run on a CPU has nothing to say of.
ABSENT = {"rank_device_memory_bytes"}


def scraped(folder: Path) -> str:
    """Return what the exporter of the run in `folder` shows."""
    (note,) = json.loads((folder / "exporter-0.json").read_text("utf-8"))
    with urllib.request.urlopen(f"http://{note['targets'][0]}/metrics", timeout=10) as answer:
        return answer.read().decode()


def observed(runtime: Runtime, config: TrainConfig, output: Path) -> str:
    """Run on this rank; return what rank 0 scrapes just before the run ends."""
    trainer, text = Trainer(config, output, runtime), ""
    wait = trainer.saver.wait

    def scraping(last: bool = False) -> None:
        nonlocal text
        wait(last)
        if last and runtime.is_first:
            text = scraped(output)
        if last:
            dist.barrier()  # nobody leaves before

    trainer.saver.wait = scraping
    trainer.fit()
    return text


def series(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples by metric and label values, the run's name left out."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "run"}
            name = sample.name.removeprefix("fullrank_")
            found.setdefault(name, {})[tuple(labels[key] for key in sorted(labels))] = sample.value
    return found


def stubs(**config: Any) -> tuple[Any, Monitor]:
    """Return what a monitor reads of a run, and the monitor."""
    runtime: Any = SimpleNamespace(
        is_first=True, rank=0, local_rank=0, restarts=2, device=torch.device("cpu")
    )
    sources: Any = SimpleNamespace(
        telemetry=SimpleNamespace(timer=SimpleNamespace(seconds=0.0)),
        pipeline=SimpleNamespace(
            phases=SimpleNamespace(seconds={}, samples=0, own_seconds=0.0),
            num_pipelined=1,
            parallel=SimpleNamespace(sharded_modules=[None, None], fused_optimizer=None),
            precision=SimpleNamespace(num_skipped=3),
        ),
        saver=SimpleNamespace(stalled_seconds=0.5, num_failed=1, newest=None, concluded=[]),
        label_weights=SimpleNamespace(active={"no_weight"}),
        leaks=SimpleNamespace(first_steps={}),
        table_stats=SimpleNamespace(
            own={},
            numbers={"user": {"rows": 100, "touched": 99, "dynamic_ids": 50, "dynamic_failed": 9}},
        ),
    )
    settings = {
        "recipe": "dlrm.demo",
        "precision": {"dtype": "fp16"},
        "schema": {"tables": [{}]},
        "checkpoint": {"interval_seconds": 600.0},
    }
    info = Run(output=Path("mine"), settings=settings, dense_parallelism="ddp", step=0, end_step=10)
    return sources, Monitor(sources, info, ExportConfig(**config), runtime)


def test_what_goes_wrong_is_shown():
    sources, monitor = stubs(tables_by_rank=0)
    sources.table_stats.own = {"user": {"rows": 100}}
    point = dict.fromkeys(("loss", "auc", "prediction_std", "input_wait"), 0.5)
    point |= {"label_mean": 0.1, "prediction_mean": 0.2, "skipped": 7, "nonfinite_steps": 2}
    monitor.interval(point | {"alerts": ["auc_stuck"]})
    monitor.evaluation(5, {"calibration": 1.5}, [])
    values = monitor.values
    assert values.get("restarts") == 2
    assert values.get("alert_active", "auc_stuck") == values.get("alert_active", "no_weight") == 1
    assert values.get("alert_active", "input_bound") == 0
    assert values.get("calibration_ratio") == 2
    assert values.get("evaluation_calibration_ratio") == 1.5
    assert values.get("steps_skipped_total") == 4  # of this process
    assert values.get("steps_nonfinite_total") == 2
    assert values.get("pipelined_modules") == 1 and values.get("sharded_modules") == 2
    assert values.get("checkpoint_failures_total") == 1
    assert values.get("checkpoint_timestamp_seconds") is None
    sources.saver.newest = (10, 1_767_225_600.0)
    sources.saver.concluded[0]()  # after the last step and evaluation
    assert values.get("checkpoint_step") == 10
    assert values.get("table_ids", "user", "failed") == 9
    assert values.get("table_rows_used", "user") == 99
    assert values.get("rank_table_rows", "user") is None, "there are more tables than shown by rank"
    monitor.interval(point | {"alerts": []})
    assert values.get("alert_active", "auc_stuck") == 0


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return generate(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def run(processes, logs, tmp_path_factory) -> tuple[Path, Any]:
    output = tmp_path_factory.mktemp("runs") / "mine"
    config = small("dlrm.demo", logs, "--export.tensorboard")
    tables = tuple(
        dataclasses.replace(table, dynamic=DynamicConfig(min_occurrences=2))
        if table.name == "item"
        else table
        for table in config.schema.tables
    )
    config = dataclasses.replace(config, schema=dataclasses.replace(config.schema, tables=tables))
    texts = processes.run(observed, config, output)
    return output, series(texts[0])


@pytest.mark.dist
def test_everything_on_the_list_is_there(run):
    _, found = run
    assert {metric.name for metric in METRICS} - found.keys() == ABSENT
    assert found.keys() <= {metric.name for metric in METRICS}


@pytest.mark.dist
def test_both_ranks_are_merged_into_one_exporter(run):
    output, found = run
    assert found["ranks"] == found["ranks_expected"] == {(): 2}
    assert set(found["rank_step"]) == {("0",), ("1",)}
    waits = found["rank_input_wait_seconds_total"]
    assert found["input_wait_seconds_total"][()] == pytest.approx(sum(waits.values()))
    assert found["sampled_steps_total"][()] == 2 * found["steps_total"][()] == 10
    assert not list(output.glob("exporter*")), "the note goes with the run"


@pytest.mark.dist
def test_the_numbers_are_those_of_the_run_s_own_files(run):
    output, found = run
    point = json.loads((output / "curves.jsonl").read_text("utf-8").splitlines()[-1])
    metrics = json.loads((output / "metrics.json").read_text("utf-8"))
    assert found["step"] == found["steps_expected"] == {(): metrics["steps"]}
    assert found["rows_total"][()] == metrics["train_rows"] == 640
    for name, key in (("loss", "loss"), ("auc", "auc"), ("gradient_norm", "gradient_norm")):
        assert found[name][()] == point[key]
    assert found["evaluation_auc"][()] == metrics["auc"]
    assert found["evaluation_calibration_ratio"][()] == metrics["calibration"]
    assert found["pipelined_modules"] == found["sharded_modules"]
    assert found["pipelined_modules"][()] == metrics["pipelined_modules"] > 0
    assert found["checkpoint_step"][()] == metrics["steps"]
    assert abs(found["checkpoint_timestamp_seconds"][()] - time.time()) < 3600
    tables = json.loads((output / "tables.jsonl").read_text("utf-8").splitlines()[-1])["tables"]
    assert {table: (value,) for (table,), value in found["table_rows"].items()} == {
        table: (numbers["rows"],) for table, numbers in tables.items()
    }
    active = {name for (name,), value in found["alert_active"].items() if value}
    assert active == set(metrics["alerts"]) >= {"few_rows_of_a_class"}  # of a test of few rows


@pytest.mark.dist
def test_every_statistic_of_every_table_is_there_of_all_ranks_and_of_each(run):
    output, found = run
    tables = json.loads((output / "tables.jsonl").read_text("utf-8").splitlines()[-1])["tables"]
    shares = ("occupancy_ratio", "hit_ratio", "missing_ratio", "top_ratio")
    keys = dict(zip(shares, ("occupancy", "hit_rate", "missing", "top_share"), strict=True))
    keys |= {"rows": "rows", "row_norm_mean": "mean_norm", "row_norm_max": "max_norm"}
    for series_name, key in keys.items():
        whole, by_rank = found[f"table_{series_name}"], found[f"rank_table_{series_name}"]
        assert whole == {(table,): numbers[key] for table, numbers in tables.items()}
        assert by_rank == {
            (str(rank["rank"]), table): rank[key]
            for table, numbers in tables.items()
            for rank in numbers["ranks"]
            if key in rank
        }
        assert {rank for rank, table in by_rank if table == "item"} == {"0", "1"}
        if series_name in shares:
            assert all(0 <= share <= 1 for share in (*whole.values(), *by_rank.values()))
            assert series_name == "missing_ratio" or min(whole.values()) > 0
    # Of the dynamic table, what became of its ids.
    counts = {outcome: n for (outcome, _), n in found["table_ids"].items()}
    assert counts.keys() == set(TOTALS)
    for outcome, number in counts.items():
        parts = [found["rank_table_ids"][outcome, rank, "item"] for rank in ("0", "1")]
        assert sum(parts) == number == tables["item"][f"dynamic_{outcome}"]
    assert counts["ids"] > counts["hits"] > 0 and min(counts["waiting"], counts["admitted"]) > 0
    held = counts["admitted"] - counts["evicted"] - counts["expired"]
    assert found["table_occupancy_ratio"]["item",] == held / found["table_rows"]["item",] > 0


@pytest.mark.dist
def test_the_parts_of_sampled_steps_are_measured(run):
    _, found = run
    parts = {part: seconds for (part,), seconds in found["sampled_phase_seconds_total"].items()}
    assert parts.keys() == set(PHASES)
    for part in ("communication", "lookup", "dense_forward", "backward", "update"):
        assert parts[part] > 0
    # Every step is sampled here, and what a sample leaves out is between steps.
    assert 0 < sum(parts.values()) <= found["train_seconds_total"][()]
    assert 0 <= found["input_wait_ratio"][()] <= 1


@pytest.mark.dist
def test_a_process_that_goes_on_with_a_run_counts_from_nothing(processes, logs, tmp_path):
    output = tmp_path / "mine"
    config = small("dlrm.demo", logs, "--checkpoint.interval-steps", "2")
    processes.run(train_until, config, output, 3)
    found = series(processes.run(observed, config, output)[0])
    assert (found["step"][()], found["steps_total"][()]) == (5, 3)
    assert found["rows_total"][()] == 640 - 2 * 128
    assert set(found["rank_step"]) == {("0",), ("1",)}


@pytest.mark.dist
def test_tensorboard_reads_what_a_run_writes(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output, _ = run
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    points = [json.loads(line) for line in (output / "curves.jsonl").read_text().splitlines()]
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(point["step"], pytest.approx(point["loss"])) for point in points]
    metrics = json.loads((output / "metrics.json").read_text("utf-8"))
    (auc,) = events.Scalars("test/auc")
    assert auc.value == pytest.approx(metrics["auc"])
    assert any(tag.startswith("ranks/") for tag in events.Tags()["scalars"])


@pytest.mark.dist
def test_a_run_that_is_to_tell_nobody_listens_nowhere(processes, logs, tmp_path):
    config = small("dlrm.demo", logs, "--export.no-serve", "--max-steps", "1")
    processes.run(train, config, tmp_path / "mine", world_size=1)
    assert not list((tmp_path / "mine").glob("exporter*"))

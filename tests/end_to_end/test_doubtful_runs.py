# SPDX-License-Identifier: MIT
"""Runs whose numbers mean nothing say so: on the console, in their alerts and in the report."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.report import report
from tests.support import runs
from trainer import evaluate
from trainer.checkpoint.layout import complete

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
CASE = ROOT.parent / "shared" / "cases" / "all-labels-zero"


def rewritten(logs, day, change):
    """Write the files of a day again, changed."""
    for path in sorted((logs / f"dt={day}").glob("*.parquet")):
        pq.write_table(change(pq.read_table(path, partitioning=None)), path)


def with_column(table, name, values):
    """Return a table with other values of a column."""
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def test_training_labels_that_are_all_0_are_said_at_once_everywhere(processes, tmp_path):
    """The join of the clicks had not run on the training day; the test day is normal."""
    logs, run = runs.generate(tmp_path / "logs"), tmp_path / "run"
    zeros = pa.array([0] * 640)
    rewritten(
        logs,
        runs.DAYS[0],
        lambda table: with_column(table, "click", zeros[: len(table)].cast(table["click"].type)),
    )
    config = runs.small("dlrm.demo", logs, "--epochs", "2", "--dense.learning-rate", "0.05")
    metrics = processes.run(runs.train, config, run)[0]
    assert {"constant_label", "miscalibrated", "worse_than_constant"} <= set(metrics["alerts"])
    assert metrics["alerts"] == json.loads((run / "metrics.json").read_text())["alerts"]
    page = report([run], tmp_path / "report.html").read_text("utf-8")
    assert "constant label" in page and "worse than constant: " in page
    assert "predictions sum to less than half of the labels" in page


def test_four_test_rows_are_doubted_by_the_command(processes, tmp_path, capfd):
    logs, run = runs.generate(tmp_path / "logs"), tmp_path / "run"
    config = runs.small("dlrm.demo", logs, "--max-steps", "2")
    processes.run(runs.train, config, run)
    rewritten(logs, runs.DAYS[1], lambda table: table[:2])
    (checkpoint,) = complete(run / "checkpoints")
    command = [str(checkpoint), "--data", str(logs), "--days", runs.DAYS[1], "--deep"]
    assert evaluate.main([*command, "--replicates", "10"]) == 0
    answer = capfd.readouterr()
    found = json.loads(answer.out)
    assert found["rows"] <= 8 and found["alerts"]
    for name in found["alerts"]:
        assert f"ALERT {name}: " in answer.err


def test_a_column_that_is_the_label_is_said_by_a_whole_run(processes, tmp_path):
    """The price was written after the click, on both days."""
    logs, run = runs.generate(tmp_path / "logs", 1_600), tmp_path / "run"
    for day in runs.DAYS:
        rewritten(
            logs,
            day,
            lambda table: with_column(
                table, "price", table["click"].cast(table["price"].type).to_pylist()
            ),
        )
    config = runs.small("dlrm.demo", logs, "--epochs", "2", "--dense.learning-rate", "0.05")
    metrics = processes.run(runs.train, config, run)[0]
    assert "feature_is_label" in metrics["alerts"]
    page = report([run], tmp_path / "report.html").read_text("utf-8")
    assert "feature is label" in page and "price" in page


def test_three_rows_on_two_ranks_train_once_an_epoch_and_say_that_they_are_few(processes, tmp_path):
    logs, run = runs.generate(tmp_path / "logs"), tmp_path / "run"
    for day in runs.DAYS:
        rewritten(logs, day, lambda table: table[:3])
    # A batch is larger than the log by far, and one of the ranks has a row less.
    words = ("--epochs", "2", "--loader.batch-size", "100000")
    metrics = processes.run(runs.train, runs.small("dlrm.demo", logs, *words), run)[0]
    assert (metrics["steps"], metrics["train_rows"], metrics["rows"]) == (2, 6, 3)
    assert "few_rows_of_a_class" in metrics["alerts"] or "undefined_auc" in metrics["alerts"]


def test_steps_that_overflow_in_fp16_are_skipped_and_counted_in_a_whole_run(processes, tmp_path):
    logs, run = runs.generate(tmp_path / "logs"), tmp_path / "run"
    words = ("--precision.dtype", "fp16", "--precision.initial-scale", "1e6")
    words += ("--epochs", "3")
    metrics = processes.run(runs.train, runs.small("dlrm.demo", logs, *words), run)[0]
    assert 0 < metrics["skipped_steps"] < metrics["steps"] == 15
    assert all(map(math.isfinite, runs.losses(run))) and math.isfinite(metrics["logloss"])
    saved = runs.saved(run)
    assert all(value.isfinite().all() for value in saved.values() if value.is_floating_point())


@pytest.mark.skipif(not CASE.is_dir(), reason="the folder of cases is not here")
def test_the_case_of_labels_that_are_all_0_is_said_by_its_own_command(tmp_path):
    """The case's command on its own input, of which a hundred steps are enough."""
    for file in ("gen.py", "schema.yaml"):
        shutil.copyfile(CASE.parent / file, tmp_path / file)
    folder = tmp_path / CASE.name
    shutil.copytree(CASE, folder, copy_function=shutil.copyfile)
    subprocess.run([sys.executable, "make.py"], cwd=folder, check=True, timeout=120)
    words = ["dlrm.demo", "--output", "run", "--data.path", "logs"]
    words += ["--data.schema", "../schema.yaml", "--loader.batch-size", "8", "--max-steps", "100"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer.train", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ALERT constant_label at step " in done.stderr
    alerts = json.loads((folder / "run" / "metrics.json").read_text())["alerts"]
    assert {"constant_label", "miscalibrated", "worse_than_constant"} <= set(alerts)

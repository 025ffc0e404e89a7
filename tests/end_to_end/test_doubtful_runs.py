# SPDX-License-Identifier: MIT
"""Runs whose numbers mean nothing say so: on the console, in their alerts and in the report."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.report import report
from tests.support import runs
from trainer import evaluate
from trainer.checkpoint.layout import complete

pytestmark = pytest.mark.dist


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

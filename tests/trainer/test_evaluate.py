# SPDX-License-Identifier: MIT
"""Evaluation counts the rows one means, and says which."""

import dataclasses
import json
import warnings

import pytest

from tests.support import runs
from tests.support.runs import DAYS
from trainer import evaluate
from trainer.checkpoint.layout import complete, read_manifest
from trainer.evaluation.evaluate import choose_rows
from trainer.recipes.load import load_recipe


def config(**data):
    own = load_recipe("dlrm.demo")
    return dataclasses.replace(own, data=dataclasses.replace(own.data, **data))


@pytest.fixture
def dated(tmp_path):
    for day in ("2026-01-01", "2026-01-02", "2026-02-01"):
        (tmp_path / "dated" / f"dt={day}").mkdir(parents=True)
        (tmp_path / "dated" / f"dt={day}" / "part-0.parquet").touch()
    return str(tmp_path / "dated")


@pytest.fixture
def undated(tmp_path):
    (tmp_path / "undated").mkdir()
    (tmp_path / "undated" / "part-0.parquet").touch()
    return str(tmp_path / "undated")


def test_days_that_were_asked_for_count_without_a_note(dated):
    run = config(path=dated, train_days="2026-01-01", test_days="2026-01-02", test_rows="0.5:1")
    assert choose_rows(run, dated, "2026-02-01") == ("2026-02-01", "", "")


def test_days_that_the_run_has_trained_on_are_said(dated):
    run = config(path=dated, train_days="2026-01-01:2026-01-31", test_days="2026-02-01")
    asked = "2026-01-02:2026-02-28"
    note = "the model was trained on 2026-01-02, so the metrics flatter it there"
    assert choose_rows(run, dated, asked) == (asked, "", note)
    other = config(path="elsewhere", train_days="2026-01-01:2026-01-31", test_days="2026-02-01")
    assert choose_rows(other, dated, asked) == (asked, "", "")


def test_without_days_the_test_days_of_the_run_count(dated):
    run = config(path="elsewhere", train_days="2026-01-01", test_days="2026-01-02")
    days, rows, note = choose_rows(run, dated, "")
    assert (days, rows) == ("2026-01-02", "")
    assert note == "no --days, so the run's test days count: 2026-01-02"


def test_of_the_runs_own_log_without_days_its_test_rows_count_and_of_another_all(undated, tmp_path):
    parts = {"train_days": "", "test_days": "", "train_rows": "0:0.8", "test_rows": "0.8:1"}
    days, rows, note = choose_rows(config(path=undated, **parts), undated, "")
    assert (days, rows) == ("", "0.8:1")
    assert "the run's test rows of" in note
    days, rows, note = choose_rows(config(path="elsewhere", **parts), undated, "")
    assert (days, rows) == ("", "")
    assert note.endswith(
        "so all rows of " + undated + " count; the model was trained on rows 0:0.8 of elsewhere"
    )


def test_where_the_run_says_nothing_all_rows_count_and_the_days_are_named(dated, undated):
    run = config(path="elsewhere", train_days="", test_days="")
    assert (
        "count (2026-01-01 to 2026-01-02, 2026-02-01); the model" in choose_rows(run, dated, "")[2]
    )
    run = config(path="elsewhere", train_days="2026-01-01", test_days="2026-01-02")
    assert choose_rows(run, undated, "")[:2] == ("", "")
    with pytest.raises(ValueError, match="nowhere: expected a folder or a Parquet file"):
        choose_rows(run, "nowhere", "")


def test_a_folder_that_is_no_run_is_one_line_with_a_way_out(dated, capfd, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert evaluate.main([dated, "--data", dated]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {dated}: expected a checkpoint (a folder step-N")
    assert "got a folder with dt=2026-01-01" in line
    assert captured.out == ""


@pytest.mark.dist
def test_evaluating_warns_of_nothing_and_a_foreign_configuration_is_named(processes, tmp_path):
    logs = runs.generate(tmp_path / "logs")
    config = runs.small("dlrm.demo", logs, "--max-steps", "1")
    processes.run(runs.train, config, tmp_path / "run")
    (path,) = complete(tmp_path / "run/checkpoints")
    for metrics in processes.run(_strictly, path, logs):
        assert metrics["rows"] == 640, "the run's test day"
    content = read_manifest(path)
    content["config"]["epoch"] = content["config"].pop("epochs")
    (path / "manifest.json").write_text(json.dumps(content))
    for message in processes.run(_refusal, path, logs):
        assert "manifest.json: config.epoch: unknown key, did you mean 'epochs'" in message


@pytest.mark.dist
def test_a_run_without_users_leaves_gauc_out_of_its_files(processes, tmp_path):
    config = runs.small("dlrm.demo", runs.generate(tmp_path / "logs"), "--max-steps", "1")
    schema = dataclasses.replace(config.schema, user="")
    processes.run(runs.train, dataclasses.replace(config, schema=schema), tmp_path / "run")
    for name in ("metrics.json", "evaluations.jsonl"):
        text = (tmp_path / "run" / name).read_text()
        assert '"click_auc"' in text
        assert "gauc" not in text


def _strictly(runtime, path, logs):
    """Evaluate with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return runs.evaluated(runtime, path, logs, "")


def _refusal(runtime, path, logs):
    """Return why the checkpoint is not evaluated."""
    try:
        runs.evaluated(runtime, path, logs, DAYS[1])
    except ValueError as error:
        return str(error)
    return ""

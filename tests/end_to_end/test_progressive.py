# SPDX-License-Identifier: MIT
"""Test-then-train: a day is predicted by what has trained on the days before it, no more."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from tests.support import runs
from trainer.build import progressive_epochs
from trainer.config.config import TrainConfig
from trainer.data.files import discover
from trainer.evaluation.compare import compare_days
from trainer.evaluation.predictions import read_days, read_rows
from trainer.runtime.runtime import Runtime
from trainer.trainer import Trainer

DAYS = [f"2026-01-0{day}" for day in range(1, 5)]
RATE = ["--dense.schedule.warmup-steps", "0", "--dense.schedule.decay", "constant"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    clicks = ClickConfig(num_users=200, num_items=150)
    synthesize(folder, SynthesisConfig(days=4, rows_per_day=330, clicks=clicks))
    return folder


def progressive(logs: Path, *words: str) -> TrainConfig:
    own = ["--data.train-days", DAYS[0], "--data.test-days", f"{DAYS[1]}:{DAYS[3]}"]
    return runs.small("dlrm.demo", logs, *own, "--data.progressive", *RATE, *words)


def scores_of(output: Path) -> dict[str, np.ndarray]:
    return {
        day.name: np.concatenate([rows.scores.numpy() for rows in read_rows(day)])
        for day in read_days(output)
    }


def _train(runtime: Runtime, config: TrainConfig, output: Path):
    return Trainer(config, output, runtime).fit()


def _compare(runtime: Runtime, folders: list[Path]):
    return compare_days(folders, True, runtime, 20)


@pytest.mark.dist
def test_each_day_is_predicted_as_by_a_run_that_ends_the_day_before(processes, logs, tmp_path):
    metrics = processes.run(_train, progressive(logs), tmp_path / "all")[0]
    found = scores_of(tmp_path / "all")
    assert list(found) == DAYS[1:] and list(metrics["days"]) == DAYS[1:]
    assert metrics["rows"] == sum(len(one) for one in found.values()) == 3 * 330
    # The last day is not trained: nothing is left to predict.
    assert metrics["train_rows"] == 3 * 330
    for day in DAYS[1:3]:
        until = progressive(logs, "--data.test-days", f"{DAYS[1]}:{day}")
        processes.run(_train, until, tmp_path / day)
        np.testing.assert_array_equal(scores_of(tmp_path / day)[day], found[day])
    split = ["--data.train-days", DAYS[0], "--data.test-days", DAYS[1]]
    plain = processes.run(_train, runs.small("dlrm.demo", logs, *split, *RATE), tmp_path / "p")[0]
    assert plain["auc"] == metrics["days"][DAYS[1]]["auc"]


@pytest.mark.dist
def test_no_row_of_a_day_is_trained_before_it_is_predicted(processes, logs, tmp_path):
    """Other labels on the later days change nothing of a day's predictions."""
    other = tmp_path / "other"
    for day in DAYS:
        for path in sorted((logs / f"dt={day}").glob("*.parquet")):
            table = pq.read_table(path, partitioning=None)
            if day >= DAYS[2]:
                at = table.schema.get_field_index("click")
                flipped = pa.array(1 - table["click"].to_numpy(), table.schema.field(at).type)
                table = table.set_column(at, table.schema.field(at), flipped)
            (other / f"dt={day}").mkdir(parents=True, exist_ok=True)
            pq.write_table(table, other / f"dt={day}" / path.name)
    processes.run(_train, progressive(logs), tmp_path / "a")
    processes.run(_train, progressive(other), tmp_path / "b")
    first, second = scores_of(tmp_path / "a"), scores_of(tmp_path / "b")
    for day in DAYS[1:3]:
        np.testing.assert_array_equal(first[day], second[day])
    assert not np.array_equal(first[DAYS[3]], second[DAYS[3]])


def _stop_at(runtime: Runtime, config: TrainConfig, output: Path, step: int) -> None:
    """Train to `step`, save there, and go away without a word."""
    trainer = Trainer(config, output, runtime)
    plain = trainer._train_step

    def train_step(batches):
        plain(batches)
        if trainer.progress.step == step:
            trainer._save()
            trainer.saver.wait(last=True)
            raise KeyboardInterrupt

    trainer._train_step = train_step
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()


@pytest.mark.dist
@pytest.mark.parametrize("step", [4, 6, 8])  # inside the first day, at its end, inside the second
def test_a_run_that_was_killed_predicts_as_one_that_was_not(processes, logs, tmp_path, step):
    config = progressive(logs, "--loader.batch-size", "28")  # 330 rows: 6 steps a day
    whole = processes.run(_train, config, tmp_path / "whole")[0]
    assert whole["steps"] == 18
    processes.run(_stop_at, config, tmp_path / "cut", step)
    resumed = processes.run(_train, config, tmp_path / "cut")[0]
    first, second = scores_of(tmp_path / "whole"), scores_of(tmp_path / "cut")
    for day in DAYS[1:]:
        np.testing.assert_array_equal(first[day], second[day])
    for name in ("auc", "gauc", "logloss", "rows", "steps", "train_rows"):
        assert resumed[name] == whole[name], name


@pytest.mark.dist
def test_two_runs_are_compared_by_the_rows_that_both_predicted(processes, logs, tmp_path):
    better = progressive(logs)
    worse = progressive(logs, "--dense.learning-rate", "1e-5", "--sparse.learning-rate", "1e-6")
    a = processes.run(_train, better, tmp_path / "a")[0]
    b = processes.run(_train, worse, tmp_path / "b", world_size=1)[0]
    folders = [tmp_path / "a", tmp_path / "b"]
    for world_size in (1, 2):
        found = processes.run(_compare, folders, world_size=world_size)[0]
        difference = found["differences"]["auc"]
        assert difference["difference"] == pytest.approx(a["auc"] - b["auc"], abs=1e-6)
        low, high = difference["interval"]
        assert low < difference["difference"] < high
        for part in found["slices"]["day"]:
            expected = a["days"][part["slice"]]["auc"] - b["days"][part["slice"]]["auc"]
            assert part["rows"] == 330
            assert part["differences"]["auc"]["difference"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.dist
def test_runs_of_other_rows_are_refused_on_all_ranks(processes, logs, tmp_path):
    processes.run(_train, progressive(logs), tmp_path / "a")
    fewer = dataclasses.replace(progressive(logs), max_steps=4)
    processes.run(_train, fewer, tmp_path / "b")
    day = read_days(tmp_path / "b")[0]
    path = day.folder / "rank-00001-of-00002.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 1), path)
    with pytest.raises(AssertionError, match="predict different rows"):
        processes.run(_compare, [tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.test-days", ""], "expected data.train_days"),
        (["--epochs", "2"], "set epochs to 1"),
        (["--data.train-rows", "0:0.5"], "expected whole days"),
    ],
)
def test_settings_that_contradict_it_are_refused(logs, words, message):
    with pytest.raises(ValueError, match=message):
        progressive(logs, *words)


def test_test_days_that_are_not_after_the_training_days_are_refused(logs):
    schema = progressive(logs).schema
    files = discover(str(logs), (DAYS[0], DAYS[2]), schema)
    later = discover(str(logs), (DAYS[1], DAYS[3]), schema)
    with pytest.raises(ValueError, match=f"got {DAYS[1]} and training until {DAYS[2]}"):
        progressive_epochs(files, later, train=True)
    with pytest.raises(ValueError, match="expected a log with days"):
        progressive_epochs([dataclasses.replace(files[0], day="")], (), train=False)


@pytest.mark.dist
def test_a_day_without_rows_is_left_out_and_the_days_after_it_are_predicted(
    processes, logs, tmp_path
):
    other = tmp_path / "other"
    for day in DAYS:
        (other / f"dt={day}").mkdir(parents=True)
        for path in sorted((logs / f"dt={day}").glob("*.parquet")):
            table = pq.read_table(path, partitioning=None)
            rows = {DAYS[1]: 1, DAYS[2]: 0}.get(day, table.num_rows)
            pq.write_table(table.slice(0, rows), other / f"dt={day}" / path.name)
    metrics = processes.run(_train, progressive(other), tmp_path / "run")[0]
    assert list(metrics["days"]) == list(scores_of(tmp_path / "run")) == [DAYS[1], DAYS[3]]
    assert metrics["rows"] == sum(one["rows"] for one in metrics["days"].values())


@pytest.mark.parametrize("value", [7.0, -0.5])
@pytest.mark.parametrize("column", ["score:click", "label:click", "weight:click"])
def test_values_out_of_their_range_are_refused_by_file(tmp_path, column, value):
    folder = tmp_path / "predictions" / DAYS[0]
    folder.mkdir(parents=True)
    said = {"day": DAYS[0], "labels": ["click"], "ranks": 1, "metrics": {}}
    (folder / "day.json").write_text(json.dumps(said))
    names = ("score:click", "label:click", "weight:click")
    columns = {
        name: pa.array([0.5, value if name == column else 0.5], pa.float32()) for name in names
    }
    pq.write_table(pa.table({**columns, "user": [1, 2]}), folder / "rank-00000-of-00001.parquet")
    (day,) = read_days(tmp_path)
    if column == "weight:click" and value > 0:
        assert next(read_rows(day)).weights.tolist() == [[0.5], [7.0]]
        return
    with pytest.raises(ValueError, match=f"rank-00000.*{column.partition(':')[0]} is out of"):
        list(read_rows(day))


@pytest.mark.parametrize("kind", ["link", "pipe", "other columns", "text"])
def test_a_strangers_predictions_are_refused_by_file(tmp_path, kind):
    folder = tmp_path / "predictions" / DAYS[0]
    folder.mkdir(parents=True)
    said = {"day": DAYS[0], "labels": ["click"], "ranks": 1, "metrics": {}}
    (folder / "day.json").write_text(json.dumps(said))
    path = folder / "rank-00000-of-00001.parquet"
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "other columns":
        pq.write_table(pa.table({"score:click": [0.5]}), path)
    else:
        path.write_text("score")
    (day,) = read_days(tmp_path)
    with pytest.raises(ValueError, match="cannot be read as predictions"):
        list(read_rows(day))

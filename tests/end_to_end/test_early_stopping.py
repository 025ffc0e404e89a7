# SPDX-License-Identifier: MIT
"""Early stopping in whole runs: on several ranks, cut and resumed, and what other commands take."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from tests.support import runs
from tests.support.runs import DAYS
from trainer.checkpoint.early_stopping import BEST
from trainer.checkpoint.layout import complete
from trainer.warm_start.policies import resolve

pytestmark = pytest.mark.dist
# Of day one, the first rows train and the last fifth validates. AdamW at this rate soon overfits.
SETTINGS = (
    *("--data.train-rows", "0:0.8"),
    *("--data.validation-days", DAYS[0], "--data.validation-rows", "0.8:1"),
    *("--epochs", "8", "--early-stopping.patience", "2", "--dense.learning-rate", "0.03"),
    *("--checkpoint.keep", "1", "--checkpoint.interval-steps", "3"),
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def whole(logs, processes, tmp_path_factory):
    """The folder of a run on two ranks that stops early, and its metrics of each rank."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = runs.small("dlrm.demo", logs, *SETTINGS)
    return folder, processes.run(runs.train, config, folder, world_size=2)


def evaluations(run):
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def test_training_ends_after_patience_and_the_best_model_is_kept_named_and_tested(
    whole, logs, processes
):
    run, metrics = whole
    assert all(metrics[0][key] == metrics[1][key] for key in ("auc", "steps", "early_stopping"))
    *validations, test = evaluations(run)
    assert all(one["split"] == "validation" for one in validations) and "split" not in test
    found = metrics[0]["early_stopping"]
    values = [one["auc"] for one in validations]
    best = values.index(max(values))
    assert len(values) == best + 1 + 2 == found["validations"] < 8 and found["stopped_early"]
    assert (found["best_step"], found["best_value"]) == (validations[best]["step"], max(values))
    assert json.loads((run / "checkpoints" / BEST).read_text()) == {
        "step": found["best_step"],
        "auc": max(values),
    }
    kept = [path.name for path in complete(run / "checkpoints")]
    assert kept == [f"step-{found['best_step']}", f"step-{metrics[0]['steps']}"]
    assert resolve(run).name == kept[0]
    # The run's own test metrics are those of that checkpoint.
    again = processes.run(runs.evaluated, resolve(run), logs, DAYS[1], world_size=2)[0]
    assert again["auc"] == test["auc"] == metrics[0]["auc"] and again["rows"] == 640
    last = run / "checkpoints" / kept[1]
    assert processes.run(runs.evaluated, last, logs, DAYS[1])[0]["auc"] != test["auc"]


@pytest.mark.parametrize("step", [4, 9], ids=["within an epoch", "with validations behind it"])
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(
    step, whole, logs, processes, tmp_path
):
    config = runs.small("dlrm.demo", logs, *SETTINGS)
    processes.run(runs.train_until, config, tmp_path / "run", step, world_size=2)
    metrics = processes.run(runs.train, config, tmp_path / "run", world_size=2)[0]
    assert metrics["early_stopping"] == whole[1][0]["early_stopping"]
    assert evaluations(tmp_path / "run") == evaluations(whole[0])
    for name, tensor in runs.saved(whole[0]).items():
        assert torch.equal(tensor, runs.saved(tmp_path / "run")[name]), name


def test_a_run_killed_between_its_last_checkpoint_and_its_metrics_validates_again(
    whole, logs, processes, tmp_path
):
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run/metrics.json").unlink()
    config = runs.small("dlrm.demo", logs, *SETTINGS)
    metrics = processes.run(runs.train, config, tmp_path / "run", world_size=2)[0]
    assert metrics["early_stopping"] == whole[1][0]["early_stopping"]
    assert metrics["auc"] == whole[1][0]["auc"]
    assert evaluations(tmp_path / "run") == evaluations(whole[0])


def test_a_run_whose_patience_lasts_trains_all_epochs_and_names_the_best(logs, processes, tmp_path):
    settings = ("--early-stopping.patience", "3", "--epochs", "2")
    config = runs.small("dlrm.demo", logs, *SETTINGS, *settings)
    metrics = processes.run(runs.train, config, tmp_path / "run")[0]
    found = metrics["early_stopping"]
    assert found["validations"] == 2 and not found["stopped_early"]
    *validations, _ = evaluations(tmp_path / "run")
    best = max(validations, key=lambda one: one["auc"])
    assert (found["best_step"], found["best_value"]) == (best["step"], best["auc"])
    assert metrics["steps"] == validations[-1]["step"] == 2 * validations[0]["step"]


def test_validation_rows_that_train_or_test_are_refused(logs, processes, tmp_path):
    rows = pq.read_metadata(next((logs / f"dt={DAYS[0]}").glob("*.parquet"))).num_rows
    assert rows <= 640
    wrong = ("--data.validation-days", DAYS[0], "--data.validation-rows", "0.7:1")
    config = runs.small("dlrm.demo", logs, *SETTINGS, *wrong)
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "of the 192 validation rows are training rows too" in message
        assert "data.train_days and data.validation_days" in message
    wrong = ("--data.validation-days", DAYS[1], "--data.validation-rows", "0:1")
    config = runs.small("dlrm.demo", logs, *SETTINGS, *wrong)
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "640 of the 640 test rows are validation rows too" in message

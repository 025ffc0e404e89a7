# SPDX-License-Identifier: MIT
"""Epochs as stages: which rows train and choose, when to stop, and what a run of them prints."""

import dataclasses
import json
import sys

import pytest

from pipelines import run, study
from pipelines.epochs import epochs, holdout
from pipelines.orchestration.launch import LaunchConfig
from pipelines.orchestration.stage import StageError
from trainer.config.command_line import apply_overrides
from trainer.config.config import DataConfig
from trainer.recipes.load import load_recipe

DAYS = [f"2026-01-0{day}" for day in range(1, 5)]
# Stands in for the trainer: notes its words, writes metrics that get worse after epoch 2.
TRAINER = """
import json, pathlib, sys
words = sys.argv[1:]
output = pathlib.Path(words[words.index("--output") + 1])
output.mkdir(parents=True, exist_ok=True)
epoch = int(words[words.index("--stop-epoch") + 1]) if "--stop-epoch" in words else 0
auc = [0.5, 0.6, 0.7, 0.65, 0.8][epoch]
(output / "metrics.json").write_text(json.dumps({"auc": auc, "logloss": 1 - auc, "words": words}))
"""
EVALUATOR = 'import json; print(json.dumps({"auc": 0.66, "logloss": 0.4}))'


@pytest.fixture
def fake(monkeypatch):
    """Replace the trainer's commands by small scripts."""

    def train(self, recipe, output, overrides):
        return [sys.executable, "-c", TRAINER, recipe, "--output", str(output), *overrides]

    monkeypatch.setattr(LaunchConfig, "train", train)
    monkeypatch.setattr(LaunchConfig, "evaluate", lambda *_: [sys.executable, "-c", EVALUATOR])


@pytest.fixture
def logs(tmp_path):
    for day in DAYS:
        (tmp_path / f"logs/dt={day}").mkdir(parents=True)
        (tmp_path / f"logs/dt={day}/part-0.parquet").write_bytes(b"")
    return tmp_path / "logs"


def command(logs, output, *words):
    words = ["--recipe", "specformer.demo", "--data", str(logs), "--output", str(output), *words]
    return run.main(["epochs", *words])


def words_of(artifact):
    return json.loads((artifact / "run/metrics.json").read_text())["words"]


def after(words, name):
    return words[len(words) - 1 - words[::-1].index(name) + 1]


def test_epochs_go_on_from_one_another_stop_early_and_the_best_is_tested(
    fake, logs, tmp_path, capsys
):
    output = tmp_path / "out"
    assert command(logs, output, "--epochs", "4", "--", "--loader.batch-size", "64") == 0
    said = capsys.readouterr().out
    assert said.index("plan  why") < said.index("[1/7] warmup") < said.index("result")
    warmup, first = words_of(output / "warmup"), words_of(output / "epoch-1")
    assert after(warmup, "--data.train-rows") == "0:0.05"
    assert after(warmup, "--model.tower.warmup") == "1"
    assert after(first, "--model.tower.warmup") == "0"
    assert after(first, "--inherit.policy") == "nightly"  # all but where in the data
    assert after(first, "--data.train-days") == "2026-01-01:2026-01-02"
    assert after(first, "--data.test-days") == "2026-01-03"
    assert after(first, "--loader.batch-size") == "64"
    second = words_of(output / "progressive-epoch-2")
    assert after(second, "--inherit.path") == str(output / "epoch-1/run")
    assert after(second, "--inherit.warmup") == str(output / "warmup/run")
    assert (after(second, "--epochs"), after(second, "--stop-epoch")) == ("4", "2")
    last = json.loads((output / "progressive-epoch-4/manifest.json").read_text())
    assert last["metrics"]["skipped"] == "auc was best in epoch 2"
    chosen = json.loads((output / "choice/manifest.json").read_text())["metrics"]
    assert chosen["best"] == "progressive-epoch-2"
    assert "progressive-epoch-2 *" in said
    assert command(logs, output, "--epochs", "4", "--", "--loader.batch-size", "64") == 0
    again = capsys.readouterr().out
    assert "make" not in again.split("result")[0] and "[1/7]" not in again


@pytest.mark.parametrize(("words", "alone"), [([], ".8250"), (["--restart-schedule"], ".6250")])
def test_a_study_shows_each_epoch_of_each_policy_beside_one_epoch_alone(
    words, alone, fake, logs, tmp_path, capsys, monkeypatch
):
    def train(output):  # in place of a process: .05 better with seed 1, alone better than in two
        auc = 0.8 if "/one/" in str(output) else 0.4 if "slow-epoch-2" in str(output) else 0.6
        (output / "run").mkdir(parents=True, exist_ok=True)
        values = {"auc": auc + 0.05 * ("demo-1" in str(output)), "logloss": 0.5}
        (output / "run/metrics.json").write_text(json.dumps(values))

    monkeypatch.setattr(LaunchConfig, "start", lambda self, command, log, say: train(log.parent))
    command = ["--data", str(logs), "--output", str(tmp_path / "out"), "--recipes", "dlrm.demo"]
    command += ["--seeds", "0", "1", "--policies", "naive", "slow:dense=fresh", "--epochs", "2"]
    command += ["--later", "slow", "--dense.learning-rate 1e-4", *words]
    assert study.main([*command, "--", "--data.test-days", ""]) == 0
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    rows = [line.split() for line in table if line.startswith("dlrm.demo")]
    spread = "\N{PLUS-MINUS SIGN}0.0354"
    gain = {".8250": ("-0.2000", "-0.4000"), ".6250": ("+0.0000", "-0.2000")}[alone]
    assert rows == [
        ["dlrm.demo", "one", "epoch", "alone", f"0{alone}", spread],
        ["dlrm.demo", "naive", "0.6250", spread, "0.6250", spread, gain[0]],
        ["dlrm.demo", "slow", "0.6250", spread, "0.4250", spread, gain[1]],
    ]


def test_a_dry_run_prints_the_plan_and_leaves_nothing(fake, logs, tmp_path, capsys):
    assert command(logs, tmp_path / "out", "--dry-run", "--policies", "progressive", "naive") == 0
    said = capsys.readouterr().out
    for name in ("warmup", "epoch-1", "progressive-epoch-3", "naive-epoch-3", "choice", "test"):
        assert f"\n{name} " in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--epochs", "0"], "expected --epochs >= 1"),
        (["--patience", "-1"], "--patience >= 0"),
        (["--from", "epoch-9"], "no stage 'epoch-9'"),
        (["--valid-days", "2026-01-01"], "expected a training day before 2026-01-01"),
        (["--", "--loader.batch-sise", "3"], "unknown setting --loader.batch-sise"),
    ],
)
def test_a_wrong_command_ends_with_one_message_and_code_2(words, expected, logs, tmp_path, capsys):
    assert command(logs, tmp_path / "out", *words) == 2
    assert expected in capsys.readouterr().err


def test_patience_counts_epochs_since_the_best():
    def values(*auc):
        return [{"auc": one} for one in auc]

    assert not epochs.stopped(values(0.6, 0.7), "auc", 1)
    assert epochs.stopped(values(0.7, 0.6), "auc", 1) == "auc was best in epoch 1"
    assert not epochs.stopped(values(0.7, 0.6), "auc", 2)
    assert not epochs.stopped(values(0.7, 0.6), "auc", 0)
    assert epochs.stopped(values(0.6, None), "auc", 1) == "epoch 2 has no auc"
    assert epochs.stopped([{"logloss": 0.3}, {"logloss": 0.2}], "logloss", 1) == ""


def test_a_log_without_days_keeps_its_last_training_rows_for_the_choice():
    data = DataConfig(train_rows="0:0.8", test_rows="0.8:1")
    train, warmup, valid = holdout.split(data, [], "", 0.05)
    assert train == ("--data.train-rows", "0:0.72")
    assert warmup == ("--data.train-rows", "0:0.036")
    assert valid == ("--data.test-rows", "0.72:0.8", "--data.test-path", "")
    words = [*train, *valid, "--data.path", "log", "--data.test-days", ""]
    config = apply_overrides(load_recipe("dlrm.criteo"), words)
    assert (config.data.test_rows, config.data.test_path) == ("0.72:0.8", "")


def start(tmp_path, script, **settings):
    said = []
    config = LaunchConfig(pause_seconds=0.0, **settings)
    try:
        config.start([sys.executable, "-c", script], tmp_path / "log.txt", said.append)
    except (ValueError, StageError) as error:
        return error, said
    return None, said


def test_a_command_that_fails_is_tried_again_and_its_own_words_are_the_reason(tmp_path):
    script = "import sys; print('error: the disk is full', file=sys.stderr); sys.exit(1)"
    error, said = start(tmp_path, script, retries=2)
    assert isinstance(error, StageError) and "the disk is full" in str(error)
    assert sum("trying again" in line for line in said) == 2
    assert (tmp_path / "log.txt").read_text().count("the disk is full") == 3


def test_a_command_whose_data_are_wrong_is_not_tried_again(tmp_path):
    for script in (
        "import sys; print('error: no such column', file=sys.stderr); sys.exit(2)",
        # As torchrun sums up the end of its processes.
        "import sys; print('[rank0]: error: no such column\\n  exitcode  : 2 (pid: 7)',"
        " file=sys.stderr); sys.exit(1)",
    ):
        error, said = start(tmp_path, script, retries=2)
        assert isinstance(error, ValueError) and str(error) == "no such column"
        assert not any("trying again" in line for line in said)


def test_commands_are_those_that_a_person_would_type(tmp_path):
    torchrun = LaunchConfig(topology="1x2").train("dlrm.demo", tmp_path, ["--epochs", "2"])
    assert torchrun[1:8] == [
        *("-m", "torch.distributed.run", "--standalone", "--nnodes", "1"),
        *("--nproc-per-node", "2"),
    ]
    torchx = LaunchConfig(launcher="torchx", topology="2x1").train("dlrm.demo", tmp_path, [])
    assert torchx[1:5] == ["run", "-s", "local_cwd", "deploy/components.py:train"]
    with pytest.raises(ValueError, match="torchrun starts one node"):
        LaunchConfig(topology="2x1")
    with pytest.raises(ValueError, match="expected NODESxPROCESSES"):
        dataclasses.replace(LaunchConfig(), topology="2")


@pytest.mark.parametrize("valid", ["2026-01-04", "2026-01-03:2026-01-04"])
def test_validation_days_that_are_test_days_are_refused(valid):
    with pytest.raises(ValueError, match="--valid-days: expected days before the test days"):
        holdout.check_apart(valid, "2026-01-04")


def test_validation_days_before_the_test_days_are_taken():
    holdout.check_apart("2026-01-03", "2026-01-04:2026-01-05")
    holdout.check_apart("", "2026-01-04")
    holdout.check_apart("2026-01-03", "")


def test_policies_of_ones_own_settings_of_later_epochs_and_shares_of_rows(
    fake, tmp_path, capsys, monkeypatch
):
    asked = []

    def evaluate(self, run, data, days, rows=""):
        asked.append((run.parent.name, days, rows))
        return [sys.executable, "-c", EVALUATOR]

    monkeypatch.setattr(LaunchConfig, "evaluate", evaluate)
    log, output = tmp_path / "data.parquet", tmp_path / "out"
    log.write_bytes(b"")
    words = ["epochs", "--recipe", "dlrm.criteo", "--data", str(log), "--output", str(output)]
    own = "half:embeddings=warmup,dense_optimizer=fresh"
    words += ["--epochs", "2", "--policies", "fresh_tables", "continue", own]
    words += ["--later", "half", "--dense.learning-rate 1e-4", "--", "--loader.batch-size", "64"]
    assert run.main(words) == 0
    assert asked == [("fresh_tables-epoch-2", "", "0.75:1")]
    second = words_of(output / "fresh_tables-epoch-2")
    assert after(second, "--inherit.policy") == "fresh_tables"
    assert "--inherit.warmup" not in second and "--dense.learning-rate" not in second
    second = words_of(output / "half-epoch-2")
    place = second.index("--inherit.sources")
    assert second[place + 1 : place + 5] == ["embeddings", "warmup", "dense_optimizer", "fresh"]
    assert after(second, "--inherit.warmup") == str(output / "warmup/run")
    assert after(second, "--dense.learning-rate") == "1e-4"
    assert run.main([words[0], "--restart-schedule", *words[1:]]) == 0
    second = words_of(output / "half-epoch-2")
    assert after(second, "--epochs") == "1" and "--stop-epoch" not in second
    place = second.index("--inherit.sources")
    assert second[place + 5 : place + 7] == ["data_position", "fresh"]
    capsys.readouterr()
    for wrong, expected in (
        (["--policies", "fresh"], "--policies: expected one of continue, naive, progressive, fr"),
        (["--policies", "x:dens=fresh"], "no group 'dens'"),
        (["--policies", "naive", "naive"], "expected different names"),
        (["--later", "naive", "--epochs 3"], "--later: no policy 'naive'; policies: progressive"),
        (["--later", "progressive", "--dense.rate 3"], "unknown setting --dense.rate"),
    ):
        assert run.main([*words[:7], *wrong]) == run.WRONG
        assert expected in capsys.readouterr().err

# SPDX-License-Identifier: MIT
"""Sweeps: spaces are checked, trials are counted once, and a killed sweep goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="needs requirements/sweep.txt")

from pipelines import sweep as command
from pipelines.orchestration.launch import Ended, LaunchConfig
from pipelines.orchestration.stage import StageError
from pipelines.reporting.sweep_page import sweep_page
from pipelines.tuning.space import DEFAULT, Tuned, parse_space, words_of
from pipelines.tuning.sweep import Sweep, SweepConfig
from tests.support import runs
from trainer.config.overrides import setting_kinds
from trainer.recipes.load import load_recipe

RATE = Tuned(setting="dense.learning-rate", low=1e-4, high=1.0, log=True)
KIND = Tuned(setting="precision.dtype", choices=("fp32", "bf16"))


class Stub(LaunchConfig):
    """In place of a training: the metric is best at a rate of 0.01, by evaluation if asked."""

    def train(self, recipe: str, output: Path, overrides: Any) -> list[str]:
        settings = dict(zip(overrides[::2], overrides[1::2], strict=True))
        return [str(output), settings["--dense.learning-rate"]]

    def start(self, command, log, say, answers=False, stop=None) -> str:
        output, rate = Path(command[0]), float(command[1])
        output.mkdir(parents=True, exist_ok=True)
        with (output / "started").open("a") as file:
            file.write("once\n")
        for step in range(1, 4):
            value = 0.7 - abs(rate - 0.01) * step / 10
            with (output / "evaluations.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "auc": value}) + "\n")
            if stop is not None and stop():
                raise Ended
        (output / "metrics.json").write_text(json.dumps({"auc": value}))
        return ""


class Dies(Stub):
    """A machine that goes away in the third trial."""

    def start(self, command, log, say, answers=False, stop=None) -> str:
        if "0002" in command[0]:
            Path(command[0]).mkdir(parents=True, exist_ok=True)
            raise KeyboardInterrupt
        return super().start(command, log, say, answers, stop)


class Fails(Stub):
    def start(self, command, log, say, answers=False, stop=None) -> str:
        raise StageError("training diverged")


def _sweep(folder: Path, launch: LaunchConfig, **changes: Any) -> dict[str, Any]:
    settings = {"recipe": "dlrm.demo", "words": (), "space": (RATE, KIND), "trials": 8} | changes
    folder.mkdir(exist_ok=True)
    return Sweep(SweepConfig(**settings), folder, launch, lambda line: None).run()


def test_trials_are_sorted_and_the_setting_that_matters_is_named(tmp_path):
    found = _sweep(tmp_path / "s", Stub(), trials=25, prune=False)
    values = [one["auc"] for one in found["trials"]]
    assert len(values) == 25 and values == sorted(values, reverse=True)
    assert found["best"] == found["trials"][0] and found["best"]["auc"] > 0.698
    assert found["importance"]["dense.learning-rate"] > 0.8
    assert json.loads((tmp_path / "s" / "result.json").read_text())["best"] == found["best"]
    page = sweep_page(found, words_of(found["best"]["settings"]))
    assert "--dense.learning-rate" in page and "auc by dense.learning-rate" in page


def test_trials_below_the_median_are_ended_early(tmp_path):
    found = _sweep(tmp_path / "s", Stub(), trials=20)
    states = [one["state"] for one in found["trials"]]
    assert states.count("pruned") >= 3 and len(states) == 20
    assert found["best"]["state"] == "complete"


def test_a_sweep_that_was_killed_goes_on_with_the_trial_that_it_was_in(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _sweep(tmp_path / "s", Dies(), prune=False)
    assert not (tmp_path / "s" / "result.json").exists()
    found = _sweep(tmp_path / "s", Stub(), prune=False)
    folders = sorted(one["folder"] for one in found["trials"])
    assert len(folders) == len(set(folders)) == 8 and "0002" in folders
    for one in found["trials"]:
        started = tmp_path / "s" / "trials" / one["folder"] / "run" / "started"
        assert started.read_text() == "once\n", one
    more = _sweep(tmp_path / "s", Stub(), prune=False, trials=9)
    assert len(more["trials"]) == 9
    again = _sweep(tmp_path / "s", Fails(), prune=False, trials=9)  # nothing is left to do
    assert again["trials"] == more["trials"]


def test_several_trials_at_a_time_are_as_many_in_all(tmp_path):
    found = _sweep(tmp_path / "s", Stub(), jobs=3)
    assert len({one["folder"] for one in found["trials"]}) == 8


def test_a_folder_of_another_sweep_and_trials_that_fail_are_refused(tmp_path):
    _sweep(tmp_path / "s", Stub(), trials=1)
    with pytest.raises(ValueError, match=r"sweep of other settings.*metric"):
        _sweep(tmp_path / "s", Stub(), metric="logloss")
    with pytest.raises(ValueError, match=r"3 trials failed .* training diverged"):
        _sweep(tmp_path / "t", Fails())


@pytest.mark.parametrize("text", ["{", "[1]\n", '{"op_code": 99}\n', "\x00\n", '{"op_code": 4}\n'])
def test_a_damaged_journal_is_refused_by_name(tmp_path, text):
    _sweep(tmp_path / "s", Stub(), trials=1)
    journal = tmp_path / "s" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(text + "\n" + "".join(lines))
    with pytest.raises(ValueError, match=r"journal\.jsonl: expected a line of JSON"):
        _sweep(tmp_path / "s", Stub(), trials=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dense.learning-rte=1:2", "unknown setting.*did you mean 'dense.learning-rate'"),
        ("dense.learning-rate", "expected SETTING=LOW:HIGH"),
        ("dense.learning-rate=2:1", "LOW below HIGH"),
        ("dense.learning-rate=0:1:log", "LOW above 0"),
        ("dense.learning-rate=1:2:lin", "expected SETTING=LOW:HIGH"),
        ("dense.learning-rate=nan:2", "LOW below HIGH"),
        ("dense.learning-rate=a:2", "expected SETTING=LOW:HIGH"),
        ("precision.dtype=1:2", "a range needs a number"),
        ("precision.dtype=fp32", "two choices or more"),
        ("precision.dtype=fp32,fp32", "two choices or more"),
    ],
)
def test_a_space_that_means_nothing_is_refused(text, message):
    kinds = setting_kinds(load_recipe("dlrm.demo"))
    with pytest.raises(ValueError, match=message):
        parse_space([text], kinds)


def test_the_default_space_fits_every_tower():
    for name in ("dlrm.demo", "tokenformer.globo"):
        assert len(parse_space(DEFAULT, setting_kinds(load_recipe(name)))) == 3
    with pytest.raises(ValueError, match="named twice"):
        parse_space([DEFAULT[0], DEFAULT[0]], setting_kinds(load_recipe("dlrm.demo")))


@pytest.mark.launch
def test_a_sweep_trains_real_runs_and_shows_them(tmp_path, capsys):
    logs = runs.generate(tmp_path / "logs", rows_per_day=200)
    words = ["dlrm.demo", "--data", str(logs), "--output", str(tmp_path / "s"), "--trials", "2"]
    words += [
        "--tune",
        "model.tokenizer.field-dropout=0:0.5",
        "--tune",
        "precision.dtype=fp32,bf16",
    ]
    settings = ["--data.train-days", runs.DAYS[0], "--data.test-days", runs.DAYS[1]]
    assert command.main([*words, "--", *settings, "--loader.batch-size", "64"]) == 0
    said = capsys.readouterr().out
    assert f"judged on {runs.DAYS[1]}" in said and "best: trial" in said
    result = json.loads((tmp_path / "s" / "result.json").read_text())
    for one in result["trials"]:
        run = tmp_path / "s" / "trials" / one["folder"] / "run"
        config = json.loads((run / "config.json").read_text())
        assert config["model"]["tokenizer"]["field_dropout"] == pytest.approx(
            one["settings"]["model.tokenizer.field-dropout"]
        )
        assert json.loads((run / "metrics.json").read_text())["auc"] == one["auc"]
    assert "Best settings" in (tmp_path / "s" / "sweep.html").read_text()


def test_wrong_words_end_before_the_first_trial(tmp_path, capsys):
    words = ["dlrm.demo", "--data", "x", "--output", str(tmp_path / "s")]
    assert command.main([*words, "--tune", "precision.dtype=fp32,fp23"]) == 2
    assert "did you mean 'fp32'" in capsys.readouterr().err
    assert command.main([*words, "--trials", "0"]) == 2
    assert command.main(["dlrm.dmo", *words[1:]]) == 2
    assert not (tmp_path / "s").exists()

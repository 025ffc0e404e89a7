# SPDX-License-Identifier: MIT
"""Nights: which days are new, what the gates say, that the pointer moves last and can go back."""

import dataclasses
import itertools
import json
import shutil
import sys
from typing import Any

import pytest

from pipelines import publish, run
from pipelines.nightly.gates import GateConfig
from pipelines.nightly.model_store import Store
from pipelines.orchestration.launch import LaunchConfig
from pipelines.orchestration.lock import Lock
from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from tests.support import runs
from trainer.config.command_line import apply_overrides
from trainer.recipes.load import load_recipe
from trainer.warm_start.policies import resolve_local

DAYS = [f"2026-01-0{day}" for day in range(1, 6)]
GOOD = {"auc": 0.7, "gauc": 0.6, "logloss": 0.3, "calibration": 1.1, "rows": 5000.0}
SAME = {"difference": 0.0, "interval": [-0.01, 0.01]}
DIFFERENCES = dict.fromkeys(("auc", "logloss", "gauc", "calibration_error"), SAME)
WORSE = {"difference": -0.02, "interval": [-0.03, -0.01]}
TRAINER = """
import json, pathlib, sys
words = sys.argv[1:]
output = pathlib.Path(words[words.index("--output") + 1])
checkpoint = output / "checkpoints/step-1"
checkpoint.mkdir(parents=True)
for path in (checkpoint / "manifest.json", output / "metrics.json"):
    path.write_text(json.dumps({"auc": 0.7, "words": words, "files": {}}))
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    clicks = ClickConfig(num_users=50, num_items=60)
    synthesize(folder, SynthesisConfig(days=5, rows_per_day=100, clicks=clicks))
    return folder


@pytest.fixture
def logs(log, tmp_path):
    return shutil.copytree(log, tmp_path / "logs")


@pytest.fixture
def night(logs, tmp_path, monkeypatch):
    """Return a function that runs a night whose comparison has the given answer."""
    started = []

    def run_night(date, *words, candidate=GOOD, auc=SAME, drift=0.1):
        def train(self, recipe, output, overrides):
            started.append("train")
            return [sys.executable, "-c", TRAINER, recipe, "--output", str(output), *overrides]

        def compare(self, models, data, days, replicates):
            started.append(f"compare {len(models)} on {days}")
            found: dict[str, Any] = {"models": [candidate, GOOD][: len(models)]}
            if len(models) > 1:
                found["differences"] = {**DIFFERENCES, "auc": auc, "drift": drift}
            return [sys.executable, "-c", f"print({json.dumps(found)!r})"]

        monkeypatch.setattr(LaunchConfig, "train", train)
        monkeypatch.setattr(LaunchConfig, "compare", compare)
        started.clear()
        options = ["--recipe", "dlrm.demo", "--data", str(logs), "--output", str(tmp_path / "out")]
        code = run.main(["nightly", "--date", date, *options, "--retries", "0", *words])
        return code, list(started)

    return run_night


def trained_on(tmp_path, date):
    words = json.loads((tmp_path / f"out/nights/{date}/candidate/run/metrics.json").read_text())
    words = words["words"]
    parts = dict(itertools.pairwise(words))
    return parts["--data.train-days"], parts.get("--inherit.path")


def test_nights_follow_each_other_and_a_night_run_again_does_nothing(night, tmp_path, capsys):
    store = Store(tmp_path / "out")
    assert night(DAYS[2]) == (0, ["train", f"compare 1 on {DAYS[2]}"])
    assert trained_on(tmp_path, DAYS[2]) == (f"{DAYS[0]}:{DAYS[1]}", None)
    assert night(DAYS[3]) == (0, ["train", f"compare 2 on {DAYS[3]}"])
    base = str(store.checkpoint(DAYS[2]))
    assert trained_on(tmp_path, DAYS[3]) == (f"{DAYS[2]}:{DAYS[2]}", base)
    assert store.serving() == DAYS[3]
    before = (tmp_path / "out/serving.json").read_bytes()
    assert night(DAYS[3]) == (0, [])
    assert night(DAYS[2]) == (0, [])
    assert (tmp_path / "out/serving.json").read_bytes() == before
    assert f"{DAYS[3]} serves" in capsys.readouterr().out


def test_a_refused_candidate_is_kept_with_the_reason_and_the_old_model_serves(
    night, tmp_path, capsys
):
    store = Store(tmp_path / "out")
    night(DAYS[2])
    code, _ = night(DAYS[3], auc=WORSE, drift=0.9)
    assert code == run.REFUSED
    said = capsys.readouterr().out
    assert "refused: loss of auc (difference -0.02000, 95 % [-0.03000, -0.01000]) is 0.01" in said
    assert "refused: drift of predictions (population stability index) is 0.90000, above" in said
    assert "--gate-max-drift 0.5" in said
    assert store.serving() == DAYS[2]
    (reasons,) = [model["reasons"] for model in store.models("refused").values()]
    assert len(reasons) == 2
    assert (tmp_path / f"out/refused/{DAYS[3]}/checkpoint/manifest.json").is_file()
    # The next night starts from the model that serves and trains on the refused night's day too.
    assert night(DAYS[4])[0] == 0
    base = str(store.checkpoint(DAYS[2]))
    assert trained_on(tmp_path, DAYS[4]) == (f"{DAYS[2]}:{DAYS[3]}", base)
    assert store.serving() == DAYS[4]


def test_other_thresholds_ask_the_gates_again_and_train_nothing(night, tmp_path):
    night(DAYS[2])
    assert night(DAYS[3], auc=WORSE)[0] == run.REFUSED
    store = Store(tmp_path / "out")
    assert [*store.models("refused")] == [DAYS[3]]
    assert night(DAYS[3], "--gate-max-auc-loss", "0.05", auc=WORSE) == (0, [])
    assert store.serving() == DAYS[3]
    assert not store.models("refused"), "one model a night"


def test_one_command_rolls_back_and_the_withdrawn_model_is_no_base(night, tmp_path, capsys):
    for day in DAYS[2:4]:
        night(day)
    assert publish.main([str(tmp_path / "out"), "--rollback", "--reason", "clicks fell"]) == 0
    store = Store(tmp_path / "out")
    assert store.serving() == DAYS[2]
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{DAYS[3]}  withdrawn")]
    assert line.endswith("clicks fell"), "why is what the next one on call asks"
    assert night(DAYS[4])[0] == 0
    assert trained_on(tmp_path, DAYS[4])[1] == str(store.checkpoint(DAYS[2]))
    assert publish.main([str(tmp_path / "out"), "--rollback"]) == 0
    assert publish.main([str(tmp_path / "out"), "--rollback"]) == 2
    assert "no model was published before" in capsys.readouterr().err


def test_a_late_night_does_not_take_the_place_of_a_newer_model(night, tmp_path):
    night(DAYS[4])
    assert night(DAYS[3])[0] == 0
    store = Store(tmp_path / "out")
    assert list(store.models()) == DAYS[3:]
    assert store.serving() == DAYS[4]


def test_days_that_changed_are_trained_on_again(night, logs, tmp_path):
    night(DAYS[2])
    shutil.copy(
        next((logs / f"dt={DAYS[0]}").glob("*.parquet")), logs / f"dt={DAYS[0]}/late.parquet"
    )
    assert night(DAYS[2])[1] == ["train", f"compare 1 on {DAYS[2]}"]


def test_a_date_that_was_delivered_again_is_evaluated_again_though_it_has_as_many_rows(
    night, logs, tmp_path
):
    import pyarrow.parquet as pq

    night(DAYS[2])
    (path,) = (logs / f"dt={DAYS[2]}").glob("*.parquet")
    table = pq.ParquetFile(path).read()
    other = table.column("click").take([*range(table.num_rows - 1, -1, -1)])
    table = table.set_column(table.column_names.index("click"), "click", other)
    pq.write_table(table, path)
    assert night(DAYS[2])[1] == ["train", f"compare 1 on {DAYS[2]}"]
    assert night(DAYS[2]) == (0, [])


def test_a_day_that_is_not_ready_and_a_gap_end_with_code_4(night, logs, tmp_path, capsys):
    assert night("2026-01-09") == (run.NOT_READY, [])
    assert f"2026-01-09 is not ready (ready: {DAYS[0]} to {DAYS[4]}" in capsys.readouterr().err
    assert night(DAYS[0])[0] == run.NOT_READY
    assert f"no day before {DAYS[0]} is new" in capsys.readouterr().err
    (logs / f"dt={DAYS[1]}/_manifest.json").unlink()
    assert night(DAYS[3])[0] == run.NOT_READY
    assert f"1 days before {DAYS[3]} are not ready, the first is {DAYS[1]}" in (
        capsys.readouterr().err
    )
    assert night(DAYS[3], "--allow-gaps")[0] == 0
    view = tmp_path / f"out/nights/{DAYS[3]}/days/view"
    assert sorted(path.name for path in view.iterdir()) == [f"dt={DAYS[i]}" for i in (0, 2, 3)]


def test_a_column_that_was_dropped_is_named_before_training(night, logs, capsys):
    import pyarrow.parquet as pq

    path = next((logs / f"dt={DAYS[1]}").glob("*.parquet"))
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["item_id"]), path)
    assert night(DAYS[2]) == (run.WRONG, [])
    assert "item_id" in capsys.readouterr().err


def test_a_night_that_is_going_on_elsewhere_ends_with_code_5(night, tmp_path, capsys):
    with Lock(tmp_path / f"out/nights/{DAYS[2]}"):
        assert night(DAYS[2]) == (run.LOCKED, [])
    assert "works here since" in capsys.readouterr().err


def test_a_night_that_dies_between_publishing_and_pointing_is_finished_by_the_next_attempt(
    night, tmp_path, monkeypatch
):
    night(DAYS[2])
    with monkeypatch.context() as patch:

        def crash(*_):
            raise OSError("disk full")

        patch.setattr(Store, "point", crash)
        assert night(DAYS[3])[0] == run.FAILED
    store = Store(tmp_path / "out")
    assert store.serving() == DAYS[2]
    assert night(DAYS[3]) == (0, [])
    assert store.serving() == DAYS[3]


def test_gates_refuse_what_is_bad_or_unknown_and_nothing_else():
    gate = GateConfig()
    assert gate.reasons(GOOD, None, None) == []
    difference = {**DIFFERENCES, "drift": 0.1}
    assert gate.reasons(GOOD, GOOD, difference) == []
    for change, expected in (
        ({"rows": 999.0}, "rows is 999, below --gate-min-rows 1000"),
        ({"auc": None}, "auc is not known (min_auc 0.5)"),
        ({"auc": 0.49}, "auc is 0.49, below --gate-min-auc 0.5"),
        (
            {"calibration": 1.3},
            "calibration error is 0.30000, above --gate-max-calibration-error 0.25",
        ),
        ({"nonfinite_predictions": 3.0}, "3 predictions are not finite"),
    ):
        assert gate.reasons({**GOOD, **change}, None, None) == [expected]
    (reason,) = gate.reasons(GOOD, GOOD, {**difference, "gauc": {**WORSE, "interval": [-1, -0.02]}})
    assert reason == (
        "loss of gauc (difference -0.02000, 95 % [-1.00000, -0.02000]) is 0.02000, above "
        "--gate-max-gauc-loss 0.01"
    )
    off = {"difference": 0.3, "interval": [0.16, 0.4]}
    (reason,) = gate.reasons(GOOD, GOOD, {**difference, "calibration_error": off})
    assert reason == (
        "gain of calibration (difference +0.30000, 95 % [+0.16000, +0.40000]) is 0.16000, above "
        "--gate-max-calibration-gain 0.15"
    )
    unsure = {"difference": 0.3, "interval": [0.14, 0.5]}
    assert gate.reasons(GOOD, GOOD, {**difference, "calibration_error": unsure}) == []
    assert gate.reasons({**GOOD, "gauc": None}, {**GOOD, "gauc": None}, difference) == []
    unsure = {**difference, "auc": {"difference": -0.004, "interval": [-0.009, 0.001]}}
    assert gate.reasons(GOOD, GOOD, unsure) == []
    (reason,) = GateConfig(strict=True).reasons(GOOD, GOOD, unsure)
    assert "is 0.00400, above --gate-max-auc-loss 0.002" in reason
    (reason,) = gate.reasons(
        GOOD, GOOD, {**difference, "auc": {"difference": None, "interval": [None, None]}}
    )
    assert reason == "loss of auc is not known (max_auc_loss 0.002)"
    with pytest.raises(ValueError, match="gate max_drift: expected a number >= 0"):
        GateConfig(max_drift=-1.0)


@pytest.mark.launch
def test_a_real_night_on_one_rank_goes_on_from_a_model_of_two(logs, processes, tmp_path):
    settings = ["--loader.batch-size", "32", "--telemetry.mode", "quiet"]
    recipe = apply_overrides(load_recipe("dlrm.demo"), settings)
    data = dataclasses.replace(
        recipe.data, path=str(logs), train_days=f"{DAYS[0]}:{DAYS[1]}", test_days=DAYS[2]
    )
    before = dataclasses.replace(recipe, data=data)
    processes.run(runs.train, before, tmp_path / "before")
    store = Store(tmp_path / "out")
    model = {"trained_through": DAYS[1], "metrics": {}}
    store.keep("models", DAYS[2], resolve_local(tmp_path / "before"), model)
    words = ["--recipe", "dlrm.demo", "--data", str(logs), "--output", str(tmp_path / "out")]
    words += ["--gate-min-rows", "101", "--", *settings]
    assert run.main(["nightly", "--date", DAYS[3], *words]) == run.REFUSED
    night = tmp_path / "out/nights" / DAYS[3]
    found = json.loads((night / "evaluation/comparison.json").read_text())
    metrics = json.loads((night / "candidate/run/metrics.json").read_text())
    assert metrics["world_size"] == 1
    assert found["models"][0]["auc"] == pytest.approx(metrics["auc"], abs=1e-6)
    assert found["models"][0]["rows"] == found["models"][1]["rows"] == 100
    low, high = found["differences"]["auc"]["interval"]
    assert low <= high
    sources = json.loads((night / "candidate/run/inherit.json").read_text())["sources"]
    assert sources["embeddings"] == str(store.checkpoint(DAYS[2]))
    assert sources["data_position"] == "fresh"
    assert "rows is 100, below --gate-min-rows 101" in store.models("refused")[DAYS[3]]["reasons"]


def test_a_folder_that_no_night_wrote_is_no_store(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "absent"):
        assert publish.main([str(folder)]) == 2
        assert "expected the nightly pipeline's --output" in capsys.readouterr().err


def test_a_finished_night_puts_back_what_was_lost_and_says_what_serves(night, tmp_path, capsys):
    for day in DAYS[2:4]:
        night(day)
    store = Store(tmp_path / "out")
    (tmp_path / "out/serving.json").unlink()
    assert night(DAYS[2]) == (0, []), "nothing is trained or compared again"
    assert store.serving() == DAYS[3], "the newest, not the one whose night ran last"
    assert f"{DAYS[3]} serves" in capsys.readouterr().out
    shutil.rmtree(tmp_path / f"out/models/{DAYS[3]}")
    assert night(DAYS[3]) == (0, [])
    assert list(store.models()) == DAYS[2:4]
    publish.main([str(tmp_path / "out"), "--rollback"])
    capsys.readouterr()
    assert night(DAYS[3]) == (0, [])
    assert f"{DAYS[2]} serves" in capsys.readouterr().out, "not what it promoted once"


def test_a_person_can_let_any_published_model_serve(night, tmp_path, capsys):
    for day in DAYS[2:4]:
        night(day)
    store, folder = Store(tmp_path / "out"), str(tmp_path / "out")
    publish.main([folder, "--rollback"])
    assert publish.main([folder, "--serve", DAYS[3]]) == 0
    assert store.serving() == DAYS[3] == store.before()
    assert publish.main([folder, "--serve", "2026-02-30"]) == 2
    assert f"no model of '2026-02-30'; models: {DAYS[2]}, {DAYS[3]}" in capsys.readouterr().err
    assert publish.main([folder, "--serve", DAYS[2], "--rollback"]) == 2
    store.point("2026-02-30", "by a mistake")
    assert publish.main([folder, "--rollback"]) == 2
    assert "2026-02-30 serves, which is none of the published models" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"model": 5}', "{}"])
def test_a_damaged_file_of_the_store_is_named(night, tmp_path, capsys, text):
    night(DAYS[2])
    (tmp_path / "out/serving.json").write_text(text)
    for words in ([], ["--rollback"]):
        assert publish.main([str(tmp_path / "out"), *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "serving.json" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--date", "20260103"], "--date: expected a day YYYY-MM-DD, FIRST:LAST or new, got '2026"),
        (["--skip-days", "yesterday"], "--skip-days: expected a day YYYY-MM-DD, got 'yesterday'"),
        (["--accept-days", "2026-13-40"], "--accept-days: expected a day YYYY-MM-DD, got '2026-13"),
        (["--data", "s3://b/logs"], "--data: expected a folder, since nights link to files in it"),
        (["--output", "s3://bucket/x"], "--output: expected a folder, since nights link to files"),
        (["--first-days", "-3"], "--first-days: expected a number >= 0, got -3"),
        (["--look-back", "-2"], "--look-back: expected a number >= 0, got -2"),
        (["--replicates", "0"], "--replicates: expected a number >= 1, got 0"),
        (["--gate-min-auc", "2"], "gate min_auc: expected a number from 0 to 1, got 2.0"),
        (["--lock-seconds", "nan"], "--lock-seconds): expected a number > 0, got nan"),
        (["--lock-seconds", "inf"], "--lock-seconds): expected a number > 0, got inf"),
    ],
)
def test_options_of_a_night_that_make_no_sense_are_refused(
    night, tmp_path, capsys, monkeypatch, words, message
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert night(DAYS[2], *words) == (run.WRONG, [])
    assert message in capsys.readouterr().err
    assert not [*(tmp_path / "here").iterdir()], "a URL is no folder to make"


def test_a_night_whose_numbers_cannot_be_written_ends_as_it_would(night, tmp_path, capsys):
    (tmp_path / "out" / "night.prom").mkdir(parents=True)
    assert night(DAYS[2])[0] == run.DONE
    assert night(DAYS[2], "--first-days", "-3") == (run.WRONG, [])
    assert capsys.readouterr().err.count("night.prom was not written: ") == 2

# SPDX-License-Identifier: MIT
"""Days that broke: refused with the right reason, the old model serves, a good night recovers."""

import json
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import run
from pipelines.nightly import night_metrics
from pipelines.nightly.drift import DriftConfig
from pipelines.nightly.model_store import Store
from pipelines.orchestration.launch import LaunchConfig
from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig

DAYS = [f"2026-01-0{day}" for day in range(1, 8)]
# Stands in for the trainer: writes how often each user of its days clicked.
TRAINER = """
import json, pathlib, sys
import pyarrow.parquet as pq
words = sys.argv[1:]
def after(name):
    return words[len(words) - words[::-1].index(name)] if name in words else ""
output = pathlib.Path(after("--output"))
model = json.loads((pathlib.Path(after("--inherit.path")) / "manifest.json").read_text()) \\
    if after("--inherit.path") else {}
model = {item: [0.5 * seen, 0.5 * hits] for item, (seen, hits) in model.items()}
first, _, last = after("--data.train-days").partition(":")
for folder in sorted(pathlib.Path(after("--data.path")).iterdir()):
    if first <= folder.name[3:] <= last:
        table = pq.read_table(folder, columns=["item_id", "click"], partitioning=None)
        for item, click in zip(*(table.column(i).to_pylist() for i in (0, 1))):
            seen, hits = model.get(str(item), [0, 0])
            model[str(item)] = [seen + 1, hits + click]
checkpoint = output / "checkpoints/step-1"
checkpoint.mkdir(parents=True)
(checkpoint / "manifest.json").write_text(json.dumps(model))
(output / "metrics.json").write_text(json.dumps({"auc": 0.7}))
"""
# Stands in for the comparison: AUCs of what those models predict, intervals of a fixed width.
COMPARER = """
import json, pathlib, sys
import numpy as np, pyarrow.parquet as pq
*models, folder = sys.argv[1:]
table = pq.read_table(folder, columns=["item_id", "click"], partitioning=None)
items, labels = (table.column(i).to_numpy() for i in range(2))
found = {"models": []}
for path in models:
    model = json.loads((pathlib.Path(path) / "manifest.json").read_text())
    pairs = [model.get(str(item), [0, 0]) for item in items]
    scores = np.array([(hits + 0.4) / (seen + 2) for seen, hits in pairs])
    above = scores[labels == 1][:, None] - scores[labels == 0][None]
    auc = float((np.sign(above) + 1).mean() / 2)
    found["models"].append({"auc": auc, "rows": len(labels), "calibration": 1.0})
if len(models) > 1:
    lost = found["models"][0]["auc"] - found["models"][1]["auc"]
    same = {"difference": 0.0, "interval": [-0.01, 0.01]}
    auc = {"difference": lost, "interval": [lost - 0.03, lost + 0.03]}
    found["differences"] = {"auc": auc, "logloss": same, "gauc": same, "drift": 0.1}
    found["differences"]["calibration_error"] = same
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    clicks = ClickConfig(num_users=200, num_items=60)
    synthesize(folder, SynthesisConfig(days=7, rows_per_day=1500, clicks=clicks))
    for path in folder.rglob("_manifest.json"):
        path.with_name("_SUCCESS").touch()
    return folder


@pytest.fixture
def raw(log, tmp_path):
    return shutil.copytree(log, tmp_path / "raw")


@pytest.fixture
def night(raw, tmp_path, monkeypatch):
    """Return a function that runs a night on raw days and returns its exit code."""

    def train(self, recipe, output, overrides):
        return [sys.executable, "-c", TRAINER, recipe, "--output", str(output), *overrides]

    def compare(self, models, data, days, replicates):
        words = [*map(str, models), f"{data}/dt={days}"]
        return [sys.executable, "-c", COMPARER, *words]

    monkeypatch.setattr(LaunchConfig, "train", train)
    monkeypatch.setattr(LaunchConfig, "compare", compare)

    def run_night(date, *more):
        words = ["nightly", "--date", date, "--recipe", "dlrm.demo", "--raw", str(raw)]
        words += ["--output", str(tmp_path / "out"), "--retries", "0", *more]
        return run.main([*words, "--gate-max-drift", "9"])

    return run_night


def change(raw, day, how):
    """Write a raw day again as a broken producer would."""
    (path,) = (raw / f"dt={day}").glob("*.parquet")
    table = pq.read_table(path, partitioning=None)
    if how == "labels":
        flipped = pa.array(1 - table.column("click").to_numpy(), pa.int8())
        table = table.set_column(table.column_names.index("click"), "click", flipped)
    elif how == "rows":
        table = table.slice(0, table.num_rows // 2)
    elif how == "constant":
        same = pa.array(np.full(table.num_rows, 7))
        table = table.set_column(table.column_names.index("brand_id"), "brand_id", same)
    pq.write_table(table, path)


def metric(tmp_path, name):
    lines = (tmp_path / "out" / night_metrics.FILE).read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"fullrank_{name} "))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("rows", "750 rows are 50% of the 1,500 that the 4 days before have (median), below --d"),
        ("constant", "column 'brand_id': constant, where it had "),
    ],
)
def test_a_day_that_broke_is_left_out_and_named_and_the_next_good_night_recovers(
    how, reason, night, raw, tmp_path, capsys
):
    assert night(f"{DAYS[2]}:{DAYS[3]}", "--first-days", "2") == run.DONE
    success = metric(tmp_path, "night_last_success_timestamp_seconds")
    change(raw, DAYS[4], how)
    capsys.readouterr()
    assert night(DAYS[4]) == run.REFUSED, "it is the day to evaluate on"
    captured = capsys.readouterr()
    assert f"error: days: {DAYS[4]}: {reason}" in captured.err
    assert f"alert: night {DAYS[4]} refused in" in captured.err
    assert metric(tmp_path, "night_exit_code") == 3
    assert metric(tmp_path, "night_last_success_timestamp_seconds") == success
    store = Store(tmp_path / "out")
    assert store.serving() == DAYS[3]
    assert night(DAYS[5]) == run.DONE
    assert store.serving() == DAYS[5]
    model = store.models()[DAYS[5]]
    assert [*model["days"]] == [DAYS[3]] and reason in model["skipped"][DAYS[4]][0]
    assert metric(tmp_path, "night_skipped_days") == 1


def test_flipped_labels_are_refused_by_the_gate_and_dropped_days_let_it_recover(
    night, raw, tmp_path, capsys
):
    assert night(f"{DAYS[2]}:{DAYS[4]}", "--first-days", "2") == run.DONE
    change(raw, DAYS[5], "labels")
    assert night(DAYS[5]) == run.REFUSED
    said = capsys.readouterr().out
    assert "refused: auc is 0." in said and "below --gate-min-auc 0.5" in said
    assert night(DAYS[6]) == run.REFUSED, "trained on the flipped day"
    said = capsys.readouterr().out
    assert "refused: loss of auc (difference -0." in said and f"{DAYS[4]} serves" in said
    store = Store(tmp_path / "out")
    assert [*store.models("refused")] == DAYS[5:]
    assert [*store.models("refused")[DAYS[6]]["days"]] == [DAYS[4], DAYS[5]]
    # The producer mends the day and delivers it again: the same command, another outcome.
    (good,) = (raw / f"dt={DAYS[5]}").glob("*.parquet")
    change(raw, DAYS[5], "labels")
    assert good.is_file() and night(DAYS[6]) == run.DONE
    assert f"{DAYS[5]}: changed, 1,500 rows" in capsys.readouterr().out
    assert store.serving() == DAYS[6]


def test_days_of_refused_candidates_can_be_left_out(night, raw, tmp_path):
    assert night(DAYS[2], "--first-days", "2") == run.DONE
    change(raw, DAYS[2], "labels")
    assert night(DAYS[3], "--accept-days", DAYS[2]) == run.REFUSED
    assert night(DAYS[4], "--drop-refused") == run.DONE
    assert [*Store(tmp_path / "out").models()[DAYS[4]]["days"]] == [DAYS[3]]


def test_a_day_that_came_late_trains_with_the_next_night_and_a_changed_one_is_named(
    night, raw, tmp_path, capsys
):
    late = shutil.move(raw / f"dt={DAYS[2]}", tmp_path / "late")
    assert night(DAYS[2]) == run.NOT_READY
    assert night(DAYS[4], "--allow-gaps") == run.DONE
    store = Store(tmp_path / "out")
    assert [*store.models()[DAYS[4]]["days"]] == [*DAYS[:2], DAYS[3]]
    shutil.move(late, raw / f"dt={DAYS[2]}")
    pq_path = next((raw / f"dt={DAYS[3]}").glob("*.parquet"))
    pq.write_table(pq.read_table(pq_path, partitioning=None).slice(1), pq_path)
    capsys.readouterr()
    assert night("new") == run.DONE
    assert [*store.models()[DAYS[5]]["days"]] == [DAYS[2], DAYS[4]]
    assert store.models()[DAYS[5]]["trained_through"] == DAYS[4]
    said = capsys.readouterr().out
    assert f"{DAYS[3]}: changed, 1,499 rows" in said
    assert f"note: {DAYS[3]} was delivered again after the model of {DAYS[4]}" in said
    assert [*store.models()] == DAYS[4:7], "it caught up with every day that was ready"
    capsys.readouterr()
    assert night("new") == run.NOT_READY
    message = capsys.readouterr().err
    assert (
        f"no day after the last night, {DAYS[6]}, is ready (the last that is: {DAYS[6]})" in message
    )
    assert night(f"{DAYS[5]}:{DAYS[6]}") == run.DONE


def day(rows=100, **columns):
    usual = {"count": rows, "nulls": 0, "cardinality": 50, "mean": 0.5, "std": 0.5}
    return {"rows": rows, "columns": {"x": {**usual, **columns}}}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (day(), ""),
        (day(rows=55), ""),
        (day(rows=54), "54 rows are 54% of the 100 of 2026-01-01, a week before"),
        (day(cardinality=1), "constant, where it had 50 values"),
        (day(cardinality=2), "2 different values, where it had 50, beyond"),
        (day(nulls=40), "40% nulls, where it had 0%, beyond --drift-max-null-gain 0.3"),
        (day(mean=2.5), "mean 2.5, where it had 0.5: +4.00 standard deviations, beyond"),
        (day(mean=1.5), ""),
    ],
)
def test_thresholds_of_a_day(found, reason):
    before = {f"2026-01-0{number}": day() for number in range(1, 8)}
    before["2026-01-07"] = day(rows=1000)  # no weekday's equal
    reasons = DriftConfig().reasons("2026-01-08", found, before)
    assert (len(reasons), reason in "".join(reasons)) == (bool(reason), True)
    assert DriftConfig().reasons("2026-01-08", found, {}) == []


def test_a_threshold_out_of_its_range_is_named(night, capsys):
    assert night(DAYS[2], "--drift-min-rows-share", "2") == run.WRONG
    assert "--drift-min-rows-share: expected 0 to 1, got 2.0" in capsys.readouterr().err
    assert night(DAYS[2], "--ingest", "--delimeter ;") == run.WRONG
    assert "--ingest: '--delimeter' is none of" in capsys.readouterr().err


def test_a_damaged_prom_file_and_stage_manifests_do_not_stop_a_night(night, tmp_path):
    assert night(DAYS[2], "--first-days", "2") == run.DONE
    (tmp_path / "out" / night_metrics.FILE).write_text("fullrank_night_last_success x\n")
    manifest = tmp_path / f"out/nights/{DAYS[2]}/verdict/manifest.json"
    manifest.write_text(json.dumps({"request": 3}))
    assert night(DAYS[2]) == run.DONE
    assert metric(tmp_path, "night_promoted") == 1

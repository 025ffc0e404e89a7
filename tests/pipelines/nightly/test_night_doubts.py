# SPDX-License-Identifier: MIT
"""A night says which numbers mean nothing, which metric does not decide, and how old a model is."""

from __future__ import annotations

import argparse
import json

import pytest

from pipelines.nightly import night_metrics, nightly
from pipelines.nightly.gates import GateConfig
from pipelines.nightly.model_store import Store
from pipelines.orchestration.run_status import NOT_READY, RunStatus

GOOD = {
    **{"auc": 0.7, "gauc": 0.6, "logloss": 0.3, "calibration": 1.1, "rows": 5000.0},
    **{"gauc_users": 400.0, "gauc_share": 0.5, "positive_rows": 500.0},
}
SAME = {"difference": 0.0, "interval": [-0.01, 0.01]}
BETTER = {"difference": 0.02, "interval": [0.015, 0.025]}
WORSE = {"difference": -0.03, "interval": [-0.04, -0.02]}
DIFFERENCES = {
    **dict.fromkeys(("logloss", "calibration_error"), SAME),
    **{"auc": BETTER, "gauc": WORSE, "drift": 0.1},
}


def test_gauc_decides_where_it_speaks_for_the_log():
    (reason,) = GateConfig().reasons(GOOD, GOOD, DIFFERENCES)
    assert reason.startswith("loss of gauc") and reason.endswith("above --gate-max-gauc-loss 0.01")
    assert GateConfig().notes(GOOD, GOOD) == []


@pytest.mark.parametrize("few", [{"gauc_users": 150.0}, {"gauc_share": 0.07}])
def test_where_few_users_have_both_labels_gauc_does_not_refuse_and_a_note_says_so(few):
    found = GOOD | few
    assert GateConfig().reasons(found, found, DIFFERENCES) == []
    (note,) = GateConfig().notes(found, found)
    assert note.startswith("gauc does not decide: ") and "--gate-min-gauc-share 0.2" in note
    asked = GateConfig(min_gauc_users=0, min_gauc_share=0.0)
    assert len(asked.reasons(found, found, DIFFERENCES)) == 1 and asked.notes(found, found) == []
    # What is not known of few users is no reason either: there may be no interval.
    unknown = DIFFERENCES | {"gauc": {"difference": None, "interval": [None, None]}}
    assert GateConfig().reasons(found, found, unknown) == []
    assert len(GateConfig().reasons(GOOD, GOOD, unknown)) == 1


def test_a_share_above_one_is_refused():
    with pytest.raises(ValueError, match="gate min_gauc_share: expected a number from 0 to 1"):
        GateConfig(min_gauc_share=20.0)


def test_what_is_doubtful_about_either_model_is_a_note_and_a_number():
    serving = GOOD | {"gauc": 0.42}
    (note,) = GateConfig().notes(GOOD, serving)
    assert note == "serving: gauc is 0.4200, below 0.5 (reversed_order)"
    verdict = {"reasons": [], "notes": [note]}
    status = RunStatus(metrics={"evaluation": {"models": [GOOD, serving]}, "verdict": verdict})
    found = night_metrics.collect("2026-01-03", status)
    assert found.values['doubts{model="candidate"}'] == 0
    assert found.values['doubts{model="serving"}'] == 1
    assert note in found.line()


def keep(folder, kind, *days):
    """Write records of models of these days."""
    for day in days:
        path = folder / kind / day / "model.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"trained_through": day, "metrics": {}, "reasons": []}))


def test_refusals_in_a_row_are_counted_since_the_last_promotion(tmp_path):
    store = Store(tmp_path)
    assert night_metrics.of_store(store) == {"refused_in_a_row": 0}
    keep(tmp_path, "models", "2026-01-03")
    store.point("2026-01-03", "a test")
    keep(tmp_path, "refused", "2026-01-02", "2026-01-04", "2026-01-05", "2026-01-06")
    found = night_metrics.of_store(store)
    assert found == {"refused_in_a_row": 3, "serving_date_timestamp_seconds": 1_767_398_400.0}
    night = night_metrics.NightMetrics(date="2026-01-06", code=3, seconds=1.0, values=found)
    assert "refused in 1 s: 3 candidates refused in a row" in night.line()
    keep(tmp_path, "models", "2026-01-07")
    assert night_metrics.of_store(store)["refused_in_a_row"] == 0


@pytest.mark.parametrize("date", ["new", "2026-01-05:2026-01-09", "2026-01-05"])
def test_a_night_that_was_not_ready_leaves_no_numbers_of_the_one_before(date, tmp_path, capsys):
    path = tmp_path / night_metrics.FILE
    values = {"exit_code": 0.0, 'auc{model="candidate"}': 0.7, "promoted": 1.0}
    night_metrics.NightMetrics(date="2026-01-04", code=0, seconds=9.0, values=values).write(path)
    before = path.read_text("utf-8")
    assert "fullrank_night_exit_code 0\n" in before and "fullrank_night_auc" in before
    options = argparse.Namespace(date=date, output=tmp_path)
    nightly.after(options, RunStatus(code=NOT_READY, reason="no day is ready"))
    text = path.read_text("utf-8")
    assert "fullrank_night_exit_code 4\n" in text and "fullrank_night_promoted 0\n" in text
    assert "fullrank_night_auc" not in text
    success = "fullrank_night_last_success_timestamp_seconds "
    assert text.partition(success)[2].split()[0] == before.partition(success)[2].split()[0]
    assert "not ready" in capsys.readouterr().err

# SPDX-License-Identifier: MIT
"""The verdict over several runs: never more than their test rows can tell."""

import json
import math

import numpy as np
import pytest

from pipelines.comparison import comparison_table, leader, verdict
from pipelines.runs import Run
from trainer.auc import ScoreDistribution


def run(name, auc, error=0.003, **metrics):
    return Run(name=name, metrics={"auc": auc, "auc_standard_error": error, **metrics})


def write(folder, **metrics):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if metrics:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_a_lead_within_the_error_of_the_difference_is_no_lead():
    tied = [run("b", 0.7493), run("a", 0.75), run("c", 0.7)]
    lead = leader(tied)
    assert (tied[lead.first].name, tied[lead.rival].name) == ("a", "b")
    assert lead.lead == pytest.approx(0.0007) and lead.error == pytest.approx(0.003 * 2**0.5)
    assert not lead.is_clear
    assert verdict(tied).startswith("No run is called best: a leads b by 0.0007, within")
    clear = [run("b", 0.7493), run("a", 0.7536)]
    assert leader(clear).is_clear
    assert verdict(clear).startswith("Best by AUC: a. It leads b by 0.0043, more than")


def test_a_run_that_is_uncertain_enough_withholds_the_first_place_from_any():
    lead = leader([run("a", 0.76), run("b", 0.75), run("uncertain", 0.74, error=0.05)])
    assert lead.rival == 2 and not lead.is_clear


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (run("b", 0.6, rows=99.0), "No run is called best: they were tested on different rows."),
        (
            run("b", 0.6, error=None, rows=100.0),
            "No run is called best: of some AUC no standard error is known.",
        ),
        (Run(name="b"), ""),
        (run("b", math.nan), ""),
    ],
)
def test_what_cannot_be_compared_is_not(other, said):
    runs = [run("a", 0.75, rows=100.0), other]
    assert leader(runs) is None
    assert verdict(runs) == said


def test_without_a_measured_error_it_follows_from_the_counts():
    """Hanley and McNeil's error is close to DeLong's for scores that are about exponential."""
    random = np.random.default_rng(0)
    positive, negative = random.exponential(2.0, 2_000), random.exponential(1.0, 8_000)
    scores = ScoreDistribution()
    for part, is_positive in ((positive, True), (negative, False)):
        ones = np.ones(len(part))
        scores.add(part.astype(np.float32), ones * is_positive, ones * (not is_positive))
    counted = Run(name="", metrics={"auc": scores.auc(), "rows": 10_000, "label_mean": 0.2})
    assert counted.auc_error == pytest.approx(scores.standard_error(2_000, 8_000), rel=0.02)
    for metrics in ({"auc": 0.7}, {"auc": 0.7, "rows": 10.0, "label_mean": 0.0}, {}):
        assert Run(name="", metrics=metrics).auc_error is None


def test_the_console_table_has_errors_the_ceiling_and_a_verdict(tmp_path):
    same = {"auc_standard_error": 0.0031, "ceiling_auc": 0.8059, "rows": 40_000.0}
    runs = [
        write(tmp_path / "unfinished"),
        write(tmp_path / "low", auc=0.7493, logloss=0.2, **same),
        write(tmp_path / "high", auc=0.75, gauc=0.6925, rows_per_second=2069.1, **same),
    ]
    lines = comparison_table(runs).splitlines()
    assert lines[0].split() == [
        *("Run", "AUC", "±", "s.e.", "Ceiling", "Distance", "GAUC", "Logloss", "Rows/s"),
    ]
    assert [line.split()[0] for line in lines[2:5]] == ["high", "low", "unfinished"]
    values = "0.7500 ± 0.0031 0.8059 0.0559 0.6925 – 2,069"
    assert " ".join(lines[2].split()[1:]) == values
    assert lines[4].split()[1:] == ["–"] * 6
    assert len({len(line) for line in lines[:5]}) == 1
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert "No run is called best: high leads low by 0.0007, within the standard error" in text
    assert "Ceiling: the AUC of the probabilities" in text


def test_one_run_has_no_verdict(tmp_path):
    lines = comparison_table([write(tmp_path / "only", auc=0.75)]).splitlines()
    assert len(lines) == 3 and lines[2].split() == ["only", "0.7500", *"–––––"]

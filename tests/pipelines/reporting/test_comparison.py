# SPDX-License-Identifier: MIT
"""The verdict over several runs: never more than their test rows can tell."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipelines.reporting.comparison import comparison_table, leader, verdict
from pipelines.reporting.run_data import Run
from tests.support.paired import Rows, assess, compare
from trainer.metrics.auc import ScoreDistribution


def run(name, auc, error=0.003, **metrics):
    return Run(name=name, metrics={"auc": auc, "auc_standard_error": error, **metrics})


def write(folder, **metrics):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if metrics:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_a_lead_within_the_interval_of_the_difference_is_no_lead():
    tied = [run("b", 0.7493), run("a", 0.75), run("c", 0.7)]
    lead = leader(tied)
    assert (tied[lead.first].name, tied[lead.rival].name) == ("a", "b")
    assert lead.lead == pytest.approx(0.0007)
    assert lead.open == pytest.approx(1.96 * 0.003 * 2**0.5)
    assert not lead.is_clear
    assert verdict(tied).startswith("No run is called best: a leads b by 0.0007, which the 95 %")
    assert not leader([run("b", 0.7493), run("a", 0.7536)]).is_clear, "one error is not enough"
    clear = [run("b", 0.7493), run("a", 0.7578)]
    assert leader(clear).is_clear
    assert verdict(clear).startswith("Best by AUC: a. It leads b by 0.0085, more than")


def test_users_whose_rows_resemble_each_other_make_the_error_larger():
    wide = {"intervals": {"auc": [0.73, 0.77]}}
    clear = [run("b", 0.7493), dataclasses.replace(run("a", 0.7578), evaluation=wide)]
    assert leader(clear).open == pytest.approx(1.96 * math.hypot(0.003, 0.04 / 3.92))
    assert not leader(clear).is_clear
    narrow = [dataclasses.replace(one, evaluation={"intervals": 5}) for one in clear]
    assert leader(narrow).is_clear


def test_the_verdict_names_the_command_that_decides():
    data = {"path": "my logs", "test_path": ""}
    runs = [
        dataclasses.replace(run(name, auc), folder=Path("runs") / name, config={"data": data})
        for name, auc in (("a", 0.75), ("b", 0.7))
    ]
    assert "decides: python -m trainer.compare runs/a runs/b --data 'my logs'. Either" in verdict(
        runs
    )


def test_what_is_called_best_is_what_the_paired_comparison_calls_so():
    """Models of one log, from equal to clearly apart: never best where the pair leaves it open."""
    random = np.random.default_rng(0)
    users = random.integers(0, 150, 3_000)
    truth = random.normal(size=3_000) + 1.5 * random.normal(size=150)[users]
    labels = (random.random(3_000) < 1 / (1 + np.exp(-truth))).astype(np.float64)
    best = decided = 0
    for step in range(12):
        runs, rows = [], []
        for name, noise in (("a", 0.5), ("b", 0.5 + 0.15 * step)):
            scores = 1 / (1 + np.exp(-truth - noise * random.normal(size=3_000)))
            rows.append(Rows(scores=scores, labels=labels, weights=np.ones(3_000), users=users))
            (model,) = assess(rows[-1:], 100)["models"]
            metrics = {"rows": 3_000.0, "label_mean": labels.mean()}
            runs.append(
                Run(
                    name=name,
                    metrics=metrics | {"auc": model["auc"]},
                    evaluation={"intervals": {"auc": model["intervals"]["auc"]}},
                )
            )
        lead = leader(runs)
        low = compare(rows[lead.first], rows[lead.rival], 100)["auc"]["interval"][0]
        assert low > 0 or not lead.is_clear
        best, decided = best + lead.is_clear, decided + (low > 0)
    assert 0 < best < decided < 12


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
    assert "No run is called best: high leads low by 0.0007, which the 95 % interval" in text
    assert "Ceiling: the AUC of the probabilities" in text


def test_one_run_has_no_verdict(tmp_path):
    lines = comparison_table([write(tmp_path / "only", auc=0.75)]).splitlines()
    assert len(lines) == 3 and lines[2].split() == ["only", "0.7500", *"–––––"]

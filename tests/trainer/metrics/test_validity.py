# SPDX-License-Identifier: MIT
"""An evaluation whose numbers mean nothing is doubted by name, and a sound one is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.metrics.details import Details
from trainer.metrics.metrics import Metrics
from trainer.metrics.validity import ADVICE, all_doubts, doubts

SOUND = {
    **{"auc": 0.74, "auc_standard_error": 0.003, "gauc": 0.66, "gauc_users": 900.0},
    **{"gauc_top_share": 0.01, "logloss": 0.3, "ne": 0.92, "calibration": 1.04, "rows": 2e4},
    **{"positive_rows": 900.0, "label_mean": 0.045, "weight": 2e4},
}


def test_a_sound_evaluation_is_not_doubted():
    assert doubts(SOUND, {"auc": [0.73, 0.75]}) == {}
    assert doubts({"rows": 10.0}) == {} and all_doubts({}, {}) == {}


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"positive_rows": 49.0}, "few_rows_of_a_class", "rests on 49 positive of 20,000 rows"),
        ({"positive_rows": 19_990.0}, "few_rows_of_a_class", "rests on 10 negative"),
        ({"auc": math.nan, "label_mean": 0.0}, "undefined_auc", "the label is 0 in every test row"),
        ({"auc": None, "weight": 0.0}, "undefined_auc", "no test row counts"),
        ({"gauc_users": 1.0}, "gauc_of_few_users", "gauc 0.6600 is of one user"),
        ({"gauc_users": 9.0}, "gauc_of_few_users", "of 9 users"),
        ({"gauc_top_share": 0.8}, "gauc_of_few_users", "one of 900 users has 80% of the weight"),
        ({"ne": 1.0}, "worse_than_constant", "ne is 1.0000"),
        ({"calibration": 0.4999}, "miscalibrated", "less than half"),
        ({"calibration": 2.01}, "miscalibrated", "more than twice"),
        ({"calibration": 0.0}, "miscalibrated", "calibration is 0.0000"),
        ({"auc": 0.49}, "reversed_order", "auc is 0.4900, below 0.5"),
        ({"gauc": 0.46}, "reversed_order", "gauc is 0.4600, below 0.5"),
        ({"gauc": 0.4983, "gauc_users": 9e5, "gauc_top_share": 1e-5}, "reversed_order", "gauc is"),
        ({"auc": 0.9911}, "label_leak", "auc is 0.9911"),
    ],
)
def test_what_means_nothing_is_named(change, name, text):
    found = doubts(SOUND | change)
    assert list(found) == [name]
    assert text in found[name]
    assert "Way out" in ADVICE[name]


@pytest.mark.parametrize(
    "change",
    [
        *({"auc": 0.497}, {"calibration": 2.0}, {"positive_rows": 50.0}),
        *(
            {"gauc": 0.4983},
            {"gauc": 0.47, "gauc_top_share": 0.1},
        ),
    ],
)
def test_what_may_be_chance_is_not(change):
    assert doubts(SOUND | change) == {}


def test_an_interval_decides_whether_an_order_is_reversed():
    below = SOUND | {"auc": 0.48, "gauc": 0.4983}
    assert doubts(below, {"auc": [0.45, 0.51], "gauc": [0.49, 0.5003]}) == {}
    found = doubts(below, {"auc": [0.45, 0.51], "gauc": [0.4970, 0.4994]})
    assert found == {"reversed_order": "gauc is 0.4983, below 0.5"}


def test_models_of_chance_are_rarely_said_to_reverse_the_order():
    draw, rung = np.random.default_rng(1), 0
    for _ in range(200):
        users = draw.integers(0, 60, 600)
        labels = (draw.random(600) < 0.3).astype(float)
        metrics = Metrics(["click"])
        columns = [
            torch.tensor(one, dtype=torch.float32)[:, None] for one in (draw.random(600), labels)
        ]
        metrics.update(*columns, torch.ones_like(columns[0]), torch.tensor(users))
        rung += "reversed_order" in all_doubts(metrics.compute(), {})
    assert rung <= 12  # of one side of two standard errors, twice: 9 of 200 for independent ones


def test_of_a_few_rows_only_that_is_said_as_it_explains_the_rest():
    few = SOUND | {"rows": 4.0, "positive_rows": 1.0, "auc": 0.0, "gauc": 0.0, "ne": 3.0}
    assert list(doubts(few | {"calibration": 9.0}, {"auc": [0.0, 0.0]})) == ["few_rows_of_a_class"]
    none = {"rows": 90.0, "positive_rows": 0.0, "label_mean": 0.0, "auc": None, "ne": 2.0}
    assert list(doubts(none)) == ["undefined_auc"]


def test_numbers_of_older_runs_and_of_other_programs_are_judged_as_far_as_they_go():
    few = {"auc": 0.7, "rows": 400.0, "label_mean": 0.1}
    assert list(doubts(few)) == ["few_rows_of_a_class"]
    assert doubts({"auc": "high", "ne": [2.0], "calibration": True, "rows": None}) == {}


def test_each_label_is_judged_and_named():
    metrics = SOUND | {f"click_{name}": value for name, value in SOUND.items()}
    metrics |= {f"like_{name}": value for name, value in (SOUND | {"ne": 1.2}).items()}
    details = {"labels": {"click": {"intervals": {"auc": [0.5, 0.5]}}}}
    assert all_doubts(metrics, details) == {
        "interval_without_width": "label 'click': the 95 % interval of auc 0.7400 has no width",
        "worse_than_constant": "label 'like': ne is 1.2000",
    }


def evaluated(scores, labels, users):
    """Return the doubts about rows, by metrics and intervals of their own."""
    metrics, details = Metrics(["click"]), Details(20)
    details.begin(metrics)
    columns = [torch.tensor(one, dtype=torch.float32)[:, None] for one in (scores, labels)]
    rows = (*columns, torch.ones_like(columns[0]), torch.tensor(users, dtype=torch.int64))
    metrics.update(*rows)
    details.update(*rows)
    found = metrics.compute()
    details.finish(found)
    return all_doubts(found, details.values), details.values["intervals"]


def test_four_rows_of_four_users_are_doubted():
    found, _ = evaluated([0.9, 0.1, 0.2, 0.3], [0, 1, 0, 0], [1, 2, 3, 4])
    assert list(found) == ["few_rows_of_a_class"]


def test_a_gauc_of_the_user_that_means_unknown_is_doubted_and_has_no_interval():
    draw = np.random.default_rng(0)
    labels = (draw.random(4_000) < 0.2).astype(float)
    scores = np.clip(0.2 + 0.1 * labels + 0.05 * draw.normal(size=4_000), 0, 1)
    users = np.where(np.arange(4_000) < 3_000, -1, np.arange(4_000))
    found, intervals = evaluated(scores, labels, users)
    assert "is of one user" in found["gauc_of_few_users"] and "gauc" not in intervals
    shared = np.where(np.arange(4_000) < 3_000, -1, np.arange(4_000) // 20)
    found, intervals = evaluated(scores, labels, shared)
    assert "of the weight behind the gauc" in found["gauc_of_few_users"] and "gauc" in intervals


def test_an_interval_in_which_nothing_moves_is_doubted():
    labels = np.arange(400) % 2
    found, intervals = evaluated(np.full(400, 0.5), labels, np.arange(1, 401))
    assert intervals["auc"] == [0.5, 0.5]
    assert "of auc 0.5000 has no width" in found["interval_without_width"]

# SPDX-License-Identifier: MIT
"""Paired comparisons: the areas are exact, intervals hold the difference, users stay together."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from trainer.compare import Rows, area, compare, drift, log_losses, main, order
from trainer.metrics import Metrics


def rows(count=4000, noise=1.0, seed=0, users=None) -> Rows:
    """Return rows of a model whose scores are the truth under `noise`."""
    random = np.random.default_rng(1)
    truth = random.normal(size=count)
    labels = (random.random(count) < 1 / (1 + np.exp(-2 * truth))).astype(np.float64)
    weights = random.integers(1, 4, count).astype(np.float64)
    moved = truth + noise * np.random.default_rng(100 + seed).normal(size=count)
    scores = np.round(1 / (1 + np.exp(-moved)), 2)  # many ties
    groups = np.arange(count) if users is None else random.integers(0, users, count)
    return Rows(scores=scores, labels=labels, weights=weights, users=groups)


def test_the_weighted_area_and_loss_are_those_of_a_reference():
    one = rows()
    found = area(one.weights, one.labels, *order(one.scores))
    expected = roc_auc_score(one.labels, one.scores, sample_weight=one.weights)
    assert found == pytest.approx(expected, abs=1e-12)
    clear = Rows(
        scores=np.array([0.9, 0.2]),
        labels=np.array([1.0, 0.0]),
        weights=np.ones(2),
        users=one.users[:2],
    )
    assert log_losses(clear) == pytest.approx([-np.log(0.9), -np.log(0.8)])
    assert np.isnan(area(np.ones(2), np.ones(2), *order(np.array([0.1, 0.2]))))


def test_a_model_is_no_different_from_itself():
    found = compare(rows(), rows(), 20)
    assert found["auc"] == {"difference": 0.0, "interval": [0.0, 0.0]}
    assert found["logloss"] == {"difference": 0.0, "interval": [0.0, 0.0]}
    assert found["mean_move"] == 0.0 and abs(found["drift"]) < 1e-12


def test_a_worse_model_is_told_apart_with_an_interval_that_pairing_makes_narrow():
    good, bad = rows(noise=0.5, seed=1), rows(noise=1.0, seed=1)
    found = compare(bad, good, 100)["auc"]
    low, high = found["interval"]
    assert low < found["difference"] < high < 0
    random, sorting = np.random.default_rng(0), order(good.scores)
    draws = [good.weights * random.poisson(1.0, len(good.weights)) for _ in range(100)]
    alone = np.std([area(weights, good.labels, *sorting) for weights in draws])
    assert (high - low) / 3.92 < 0.9 * np.sqrt(2) * alone  # of two AUCs on rows of their own
    same = compare(rows(seed=2), rows(seed=3), 100)["auc"]["interval"]
    assert same[0] < 0 < same[1]


def test_the_grouped_difference_is_the_metrics_own_and_its_interval_holds_it():
    good, bad = (rows(noise=noise, seed=1, users=600) for noise in (0.5, 1.5))
    grouped = []
    for one in (good, bad):
        metrics = Metrics(["click"], grouped=True)
        columns = [torch.from_numpy(part)[:, None].float() for part in one[:3]]
        metrics.update(*columns, torch.from_numpy(one.users))
        grouped.append(metrics.compute()["gauc"])
    found = compare(good, bad, 100)["gauc"]
    assert found["difference"] == pytest.approx(grouped[0] - grouped[1], abs=1e-6)
    low, high = found["interval"]
    assert 0 < low < found["difference"] < high


def test_rows_of_one_user_are_drawn_together():
    alone = compare(rows(seed=2), rows(seed=3), 100)["auc"]["interval"]
    four = [np.tile(part, 4) for part in rows(seed=2)]
    other = [np.tile(part, 4) for part in rows(seed=3)]
    copied = compare(Rows(*four), Rows(*other), 100)["auc"]["interval"]
    # Four copies of every row by the same user say no more than one.
    assert copied == pytest.approx(alone, abs=1e-12)


def test_drift_grows_with_the_distance_of_the_predictions():
    base = rows()
    shifts = [base._replace(scores=base.scores * factor) for factor in (1.0, 0.9, 0.5)]
    values = [drift(shift, base) for shift in shifts]
    assert values == sorted(values)
    assert values[0] < 1e-12 and values[2] > 0.25


def test_models_of_different_rows_are_refused():
    with pytest.raises(ValueError, match="predict different rows"):
        compare(rows(100), rows(99), 5)
    one = rows(100)
    with pytest.raises(ValueError, match="must name the same label"):
        compare(one, one._replace(labels=1 - one.labels), 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "c"], "expected one or two models, got 3"),
        (["a", "--replicates", "0"], "--replicates: expected at least 1, got 0"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, message, capsys):
    assert main([*words, "--data", "logs"]) == 2
    assert message in capsys.readouterr().err

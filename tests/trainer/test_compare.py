# SPDX-License-Identifier: MIT
"""Paired comparisons: values are exact, intervals hold the difference, users stay together."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from tests.support.paired import Rows, assess, compare
from trainer.compare import main
from trainer.evaluation.compare import Checked
from trainer.evaluation.comparison import Comparison
from trainer.metrics.bootstrap import drift
from trainer.metrics.gauc import NO_USER
from trainer.metrics.metrics import Metrics
from trainer.metrics.spec import with_intervals
from trainer.telemetry.summary_lines import compared_lines

COMPARED = with_intervals()


def rows(count=4000, noise=1.0, seed=0, users=None) -> Rows:
    """Return rows of a model whose scores are the truth under `noise`."""
    random = np.random.default_rng(1)
    truth = random.normal(size=count)
    labels = (random.random(count) < 1 / (1 + np.exp(-2 * truth))).astype(np.float64)
    weights = random.integers(1, 4, count).astype(np.float64)
    moved = truth + noise * np.random.default_rng(100 + seed).normal(size=count)
    scores = np.round(1 / (1 + np.exp(-moved)), 2)  # many ties
    groups = np.arange(count) if users is None else 1 + random.integers(0, users, count)
    return Rows(scores=scores, labels=labels, weights=weights, users=groups)


def test_the_weighted_area_and_loss_are_those_of_a_reference():
    one = rows()
    found = assess([one], 2)["models"][0]
    expected = roc_auc_score(one.labels, one.scores, sample_weight=one.weights)
    assert found["auc"] == pytest.approx(expected, abs=1e-9)
    clipped = np.clip(one.scores.astype(np.float32), 2.0**-23, 1 - 2.0**-23)
    expected = log_loss(one.labels, clipped.astype(np.float64), sample_weight=one.weights)
    assert found["logloss"] == pytest.approx(expected, abs=1e-9)
    assert np.isnan(assess([one._replace(labels=np.ones(4000))], 2)["models"][0]["auc"])


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
    alone = np.diff(assess([good], 100)["models"][0]["intervals"]["auc"])[0]
    assert high - low < 0.9 * np.sqrt(2) * alone  # of two AUCs on rows of their own
    same = compare(rows(seed=2), rows(seed=3), 100)["auc"]["interval"]
    assert same[0] < 0 < same[1]


def test_the_grouped_difference_is_the_metrics_own_and_its_interval_holds_it():
    good, bad = (rows(noise=noise, seed=1, users=600) for noise in (0.5, 1.5))
    grouped = [metrics_of(one)["gauc"] for one in (good, bad)]
    found = compare(good, bad, 100)["gauc"]
    assert found["difference"] == pytest.approx(grouped[0] - grouped[1], abs=1e-6)
    low, high = found["interval"]
    assert 0 < low < found["difference"] < high


def test_twice_too_much_is_calibrated_as_badly_as_half_and_worse_than_right():
    right = rows(seed=1)
    right = right._replace(weights=np.where(right.labels > 0, 1.0, 9.0))  # twice stays below 1
    means = [np.average(one, weights=right.weights) for one in (right.labels, right.scores)]
    right = right._replace(scores=right.scores * means[0] / means[1])
    double, half = (right._replace(scores=right.scores * factor) for factor in (2, 0.5))
    found = compare(double, right, 100)["calibration_error"]
    low, high = found["interval"]
    assert low < found["difference"] < high
    assert found["difference"] == pytest.approx(np.log(2), abs=0.1) and low > 0.3
    same = compare(double, half, 100)["calibration_error"]
    assert same["interval"][0] < 0 < same["interval"][1]
    empty = right._replace(labels=np.zeros_like(right.labels))
    found = compare(empty._replace(scores=empty.scores / 2), empty, 10)["calibration_error"]
    assert np.isnan(found["difference"]) and np.isnan(found["interval"]).all()


def metrics_of(one: Rows) -> dict[str, float]:
    metrics = Metrics(["click"])
    columns = [torch.from_numpy(part)[:, None].float() for part in one[:3]]
    metrics.update(*columns, torch.from_numpy(one.users))
    return metrics.compute()


def test_every_value_and_difference_is_that_of_the_metrics_and_lies_in_its_interval():
    models = [rows(noise=noise, seed=1, users=600) for noise in (0.5, 1.5)]
    found = assess(models, 60)
    expected = [metrics_of(one) for one in models]
    for name in COMPARED:
        for model, own in zip(found["models"], expected, strict=True):
            low, high = model["intervals"][name]
            assert low < model[name] < high
            assert model[name] == pytest.approx(own[name], abs=1e-6)
        low, high = found["differences"][name]["interval"]
        difference = found["differences"][name]["difference"]
        assert low < difference < high
        assert difference == pytest.approx(expected[0][name] - expected[1][name], abs=2e-6)
    alone = assess(models[:1], 60)
    for name in COMPARED:
        intervals = [one["models"][0]["intervals"][name] for one in (alone, found)]
        assert intervals[0] == pytest.approx(intervals[1], abs=1e-9)


def test_where_rows_do_not_define_a_metric_it_is_no_number_and_neither_is_its_interval():
    found = assess([rows(50), rows(50, seed=2)], 10)  # each row a user of its own
    assert np.isnan(found["models"][0]["gauc"])
    assert np.isnan(found["differences"]["gauc"]["interval"]).all()
    clicks = rows(50)._replace(labels=np.zeros(50))
    differences = assess([clicks, clicks], 10)["differences"]
    assert np.isnan(differences["auc"]["difference"])
    assert differences["logloss"]["difference"] == 0


def test_rows_without_a_finite_prediction_are_left_out_of_all_models():
    first, second = (rows(400, noise=noise, seed=1, users=50) for noise in (0.5, 1.5))
    known = np.arange(400) % 7 != 3
    holes = first._replace(scores=np.where(known, first.scores, np.nan))
    chosen = np.flatnonzero(known)
    expected = assess([first.take(chosen), second.take(chosen)], 20)
    same_rows = assess([holes, second], 20)["differences"]
    for name in COMPARED:
        difference = expected["differences"][name]["difference"]
        assert same_rows[name]["difference"] == pytest.approx(difference, abs=1e-9)
    nothing = assess([first._replace(scores=np.full(400, np.nan)), second], 20)
    for name in COMPARED:
        assert np.isnan(nothing["differences"][name]["difference"])
        assert np.isnan(nothing["models"][1][name])


def test_rows_of_one_user_have_values_and_no_interval():
    one, other = (rows(200, noise=noise, seed=1, users=1) for noise in (0.5, 1.5))
    found = compare(one, other, 20)["auc"]
    assert found["difference"] > 0 and np.isnan(found["interval"]).all()


def test_strangers_are_drawn_one_by_one():
    models = [rows(noise=noise, seed=1) for noise in (0.5, 1.0)]
    strangers = [one._replace(users=np.full(len(one.users), NO_USER)) for one in models]
    widths = [np.diff(compare(*pair, 100)["auc"]["interval"])[0] for pair in (models, strangers)]
    assert widths[1] == pytest.approx(widths[0], rel=0.4)
    assert np.isnan(compare(*strangers, 5)["gauc"]["difference"])


class Answers(NamedTuple):
    """What a model is given and answers, of two labels: scores, labels, weights (N, 2), users."""

    names: tuple[str, str]
    scores: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    users: torch.Tensor


COUNTRY = {"country": ("de", "nl", "null")}


def two_labels(seed, names=("click", "like")) -> Answers:
    """Return a model's answers of two labels, a third of whose rows lack the second."""
    one = rows(600, users=100, seed=seed)
    third = np.arange(600) % 3 == 0
    labels = np.stack([one.labels, 1 - one.labels], 1)
    scores = np.stack([one.scores, 1 - one.scores], 1)
    weights = np.stack([one.weights, np.where(third, 0, one.weights)], 1)
    columns = (torch.from_numpy(part).float() for part in (scores, labels, weights))
    return Answers(names, *columns, torch.from_numpy(one.users))


def report(answers, replicates, slices=COUNTRY):
    """Return what a comparison says of the answers, two thirds of the rows in each batch."""
    comparison = Comparison([one.names for one in answers], slices, True, replicates)
    codes = (np.arange(600) % 4 == 0).astype(np.int32)
    for part in (slice(0, 400), slice(400, 600)):
        last = [one[part] for one in answers[-1][2:]]
        comparison.update(
            [one.scores[part] for one in answers], last, {name: codes[part] for name in slices}
        )
    return comparison.finish()


def test_a_label_that_no_row_has_yet_is_not_defined_and_the_first_one_is():
    one = two_labels(1)
    late = one.weights.clone()
    late[:, 1] = 0  # it comes days later
    one = one._replace(weights=late)
    found = report([one, one], 5)
    assert found["labels"]["click"]["differences"]["auc"]["difference"] == 0.0
    differences = found["labels"]["like"]["differences"]
    assert all(np.isnan(differences[name]["difference"]) for name in COMPARED)
    assert np.isnan(differences["drift"]) and np.isnan(differences["mean_move"])
    assert "  label like: not defined" in compared_lines(["A", "B"], summed(found))


def summed(found):
    """Return an answer whose models have what a line shows beside the metrics."""
    return found | {"models": [{"rows": 600.0, **one} for one in found["models"]]}


def test_labels_and_slices_are_compared_on_their_own_rows():
    answers = [two_labels(2), two_labels(3)]
    found = report(answers, 20)
    assert str(found["labels"]["click"]["differences"]) == str(found["differences"])
    second = [rows(600, users=100, seed=seed) for seed in (2, 3)]
    kept = np.flatnonzero(np.arange(600) % 3)
    second = [one.take(kept)._replace(labels=1 - one.labels[kept]) for one in second]
    second = [one._replace(scores=1 - one.scores) for one in second]
    expected = compare(*second, 20)["auc"]["difference"]
    like = found["labels"]["like"]["differences"]["auc"]
    assert like["difference"] == pytest.approx(expected, abs=1e-6)
    parts = found["slices"]["country"]
    assert [(one["slice"], one["rows"]) for one in parts] == [("de", 450), ("nl", 150)]
    chosen = np.flatnonzero(np.arange(600) % 4 == 0)
    pair = [rows(600, users=100, seed=seed).take(chosen) for seed in (2, 3)]
    difference = compare(*pair, 20)["auc"]["difference"]
    assert parts[1]["differences"]["auc"]["difference"] == pytest.approx(difference, abs=1e-6)
    lines = compared_lines(["a", "b"], summed(found))
    assert [line.split(":")[0] for line in lines[2:]] == [
        *("a - b", "  label click", "  label like", "  country de", "  country nl")
    ]
    assert all("calibration +" in line or "calibration -" in line for line in lines[2:])
    alone = summed(report(answers[:1], 5))
    assert compared_lines(["a"], alone)[-1].endswith("] over 150 rows")


def test_only_the_labels_of_both_models_are_compared():
    found = report([two_labels(2), two_labels(3, ("click", "share"))], 5)
    assert "labels" not in found


@pytest.mark.parametrize("changed", ["labels", "weights", "users"])
def test_models_that_were_given_other_rows_are_refused(changed):
    one = two_labels(2)
    other = one._replace(**{changed: getattr(one, changed).flip(0)})
    checked = Checked([one.names, other.names], one.names)
    for model, answers in enumerate((one, other)):
        checked.add(model, answers[1:])
    with pytest.raises(
        ValueError, match=r"different rows \(600 and 600\); their schemas must name"
    ):
        checked.check("logs", "click")


def test_labels_in_another_order_are_the_same_rows_and_features_may_differ():
    one = two_labels(2)
    other = Answers(("click", "like"), *(part.clone() for part in one[1:]))._replace(
        scores=one.scores / 2
    )
    checked = Checked([one.names, other.names], one.names)
    for model, answers in enumerate((one, other)):
        checked.add(model, answers[1:])
    checked.check("logs", "click")
    empty = Checked([one.names], one.names)
    empty.add(0, (one.scores, one.labels, torch.zeros_like(one.weights), one.users))
    with pytest.raises(ValueError, match="logs: expected rows with a label 'click', got none"):
        empty.check("logs", "click")


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
    values = [compare(shift, base, 2)["drift"] for shift in shifts]
    assert values == sorted(values)
    assert values[0] < 1e-12 and values[2] > 0.25
    assert np.isnan(drift(np.zeros(3), np.ones(3)))


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

# SPDX-License-Identifier: MIT
"""Metrics equal their textbook definitions, for any distribution, any batching and any ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from trainer.metrics.auc import BUFFER_ROWS, MAX_BINS, ScoreDistribution, rank_keys
from trainer.metrics.functions import EPSILON
from trainer.metrics.gauc import NO_USER, GroupedRows
from trainer.metrics.metrics import Metrics, undefined
from trainer.telemetry.running_stats import Window


def column(values, dtype=torch.float32) -> torch.Tensor:
    return torch.as_tensor(np.array(values), dtype=dtype).reshape(-1, 1)


def evaluate(scores, labels, weights=None, groups=None, batch: int = 1000, **options):
    metrics = Metrics(["click"], **options)
    weights = np.ones(len(scores)) if weights is None else weights
    groups = np.zeros(len(scores), np.int64) if groups is None else groups
    for start in range(0, len(scores), batch):
        part = slice(start, start + batch)
        metrics.update(
            column(scores[part]),
            column(labels[part]),
            column(weights[part]),
            torch.as_tensor(groups[part]),
        )
    return metrics.compute()


def brute_gauc(scores, labels, weights, groups) -> tuple[float, float]:
    areas, totals = [], []
    for group in np.unique(groups):
        rows = (groups == group) & (weights > 0)
        if len(np.unique(labels[rows])) == 2:
            areas.append(roc_auc_score(labels[rows], scores[rows], sample_weight=weights[rows]))
            totals.append(weights[rows].sum())
    if not areas:
        return math.nan, math.nan
    return float(np.average(areas, weights=totals)), float(np.mean(areas))


def distribution_case(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    noise, signal = rng.normal(size=(2, size))
    if name == "rare_clicks":
        scores, rate = 1 / (1 + np.exp(7 - signal - noise)), 1 / (1 + np.exp(7.5 - signal))
    elif name == "heavy_ties":
        scores = np.round(1 / (1 + np.exp(-signal - noise)), 2)
        scores[: size // 2] = 0.5
        rate = 1 / (1 + np.exp(2 - signal))
    elif name == "narrow_interval":
        scores, rate = 0.001 + 1e-4 * rng.random(size), np.full(size, 0.01)
        rate = rate + (scores - 0.001) * 2000
    elif name == "near_constant":
        scores, rate = 0.03 + 1e-9 * np.round(4 * signal), 1 / (1 + np.exp(3 - signal))
    elif name == "two_clusters":
        scores = np.where(signal > 0, 1e-6, 0.9) + 1e-7 * rng.random(size)
        rate = np.where(signal > 0, 0.001, 0.5)
    else:
        scores = np.sort(1 / (1 + np.exp(-3 * signal)))
        rate = scores
    return scores.astype(np.float32), (rng.random(size) < rate).astype(np.float32)


CASES = ("rare_clicks", "heavy_ties", "narrow_interval", "near_constant", "two_clusters", "sorted")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]),
            st.booleans(),
            st.sampled_from([0.0, 0.5, 1.0, 3.0]),
            st.integers(-2, 3),
        ),
        min_size=1,
        max_size=40,
    ),
    batch=st.integers(1, 7),
)
def test_metrics_equal_their_definitions_on_any_small_log(rows, batch):
    scores, labels, weights, groups = (np.array(part) for part in zip(*rows, strict=True))
    result = evaluate(scores, labels.astype(float), weights, groups, batch=batch)
    used = weights > 0
    assert result["rows"] == used.sum()
    if not used.any():
        assert math.isnan(result["auc"]) and math.isnan(result["logloss"])
        return
    y, p, w = labels[used], scores[used], weights[used]
    clipped = np.clip(p, EPSILON, 1 - EPSILON)
    logloss = log_loss(y, np.stack([1 - clipped, clipped], 1), sample_weight=w, labels=[0, 1])
    assert result["logloss"] == pytest.approx(logloss, abs=1e-7)
    assert result["label_mean"] == pytest.approx(np.average(y, weights=w))
    if 0 < y.mean() < 1:
        rate = np.average(y, weights=w)
        entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
        assert result["auc"] == pytest.approx(roc_auc_score(y, p, sample_weight=w), abs=1e-12)
        assert result["ne"] == pytest.approx(logloss / entropy)
    else:
        assert math.isnan(result["auc"]) and math.isnan(result["ne"])
    if y.any():
        assert result["calibration"] == pytest.approx((w * p).sum() / w[y].sum(), rel=1e-6)
    else:
        assert math.isnan(result["calibration"])
    if groups[used].any():
        weighted, plain = brute_gauc(scores, labels, weights, groups)
        assert result["gauc"] == pytest.approx(weighted, abs=1e-12, nan_ok=True)
        assert result["gauc_unweighted"] == pytest.approx(plain, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_auc_is_exact_while_distinct_scores_fit(name):
    scores, labels = distribution_case(name, 50_000)
    assert evaluate(scores, labels)["auc"] == pytest.approx(
        roc_auc_score(labels, scores), abs=1e-10
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("max_bins", [2**10, 2**14])
def test_auc_keeps_its_bound_when_scores_no_longer_fit(name, max_bins):
    scores, labels = distribution_case(name, 200_000)
    distribution = ScoreDistribution(max_bins, buffer_rows=20_000)
    for start in range(0, len(scores), 10_000):
        part = slice(start, start + 10_000)
        distribution.add(scores[part], labels[part], 1 - labels[part])
    assert len(distribution._low) <= max_bins + 20_000
    error = abs(distribution.auc() - roc_auc_score(labels, scores))
    assert error <= 0.75 * distribution.tolerance
    assert 0.75 * ScoreDistribution().tolerance < 1e-5


def test_what_an_auc_holds_is_bounded_whatever_the_number_of_rows():
    """A billion rows are 1,900 buffers; what is held after each is bounded by the same numbers."""
    row_bytes, bin_bytes = 4 + 8 + 8, 32
    assert bin_bytes * MAX_BINS + row_bytes * BUFFER_ROWS < 64 * 2**20
    rng = np.random.default_rng(5)
    small = ScoreDistribution(max_bins=2**10, buffer_rows=2**9)
    for number in range(400):  # ever new scores, ever more crowded
        scores = (0.5 + (rng.random(300) - 0.5) / (1 + number)).astype(np.float32)
        labels = (rng.random(300) < scores).astype(np.float64)
        small.add(scores, labels, 1 - labels)
        assert small.state_bytes <= bin_bytes * 2**10 + row_bytes * (2**9 + 300)
    assert small.auc() > 0.5


def test_auc_of_three_million_distinct_scores_is_within_one_in_a_million():
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(3_000_000, generator=generator, dtype=torch.float64).pow(4).float().numpy()
    labels = (torch.rand(3_000_000, generator=generator).numpy() < scores * 0.01).astype(np.float32)
    distribution = ScoreDistribution()
    distribution.add(scores, labels, 1 - labels)
    exact = ScoreDistribution(2**23)
    exact.add(scores, labels, 1 - labels)
    assert abs(distribution.auc() - exact.auc()) < 1e-6
    assert len(exact._low) > 2**21 > len(distribution._low)


def test_bins_are_cut_when_later_scores_crowd_into_one():
    rng = np.random.default_rng(3)
    wide, narrow = rng.random(20_000), 0.001 + 1e-4 * rng.random(400_000)
    scores = np.concatenate([wide, narrow]).astype(np.float32)
    rate = np.where(scores < 0.00105, 0.2, 0.4)
    labels = (rng.random(len(scores)) < rate).astype(np.float32)
    distribution = ScoreDistribution(2**12, buffer_rows=5_000)
    for start in range(0, len(scores), 5_000):
        part = slice(start, start + 5_000)
        distribution.add(scores[part], labels[part], 1 - labels[part])
    error = abs(distribution.auc() - roc_auc_score(labels, scores))
    assert error <= distribution.tolerance


@pytest.mark.parametrize("max_bins", [2**12, 2**21])
def test_merged_distributions_equal_one(max_bins):
    scores, labels = distribution_case("rare_clicks", 100_000)
    parts = [ScoreDistribution(max_bins, buffer_rows=5_000) for _ in range(3)]
    for index, part in enumerate(parts):
        part.add(scores[index::3], labels[index::3], 1 - labels[index::3])
    parts[0].merge(parts[1])
    parts[0].merge(parts[2])
    parts[0].merge(ScoreDistribution(max_bins))
    error = abs(parts[0].auc() - roc_auc_score(labels, scores))
    assert error <= (1e-10 if max_bins > 100_000 else parts[0].tolerance)


def test_keys_order_as_scores_do():
    scores = np.array([-np.inf, -1.5, -1e-40, -0.0, 0.0, 1e-45, 1e-8, 0.5, 1.0], np.float32)
    keys = rank_keys(scores)
    assert keys[3] == keys[4]
    assert (np.diff(np.delete(keys, 3)) > 0).all()


def test_constant_scores_have_an_auc_of_one_half():
    for labels in ([0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]):
        assert evaluate(np.full(4, 0.3), np.array(labels))["auc"] == 0.5


def test_standard_error_matches_the_spread_over_repeated_draws():
    rng = np.random.default_rng(5)
    areas, errors = [], []
    for _ in range(200):
        labels = (rng.random(400) < 0.3).astype(np.float64)
        scores = 1 / (1 + np.exp(-labels - rng.normal(size=400)))
        result = evaluate(scores, labels)
        areas.append(result["auc"])
        errors.append(result["auc_standard_error"])
    assert np.mean(errors) == pytest.approx(np.std(areas), rel=0.15)


def test_rows_without_weight_change_nothing():
    rng = np.random.default_rng(0)
    scores, labels, groups = rng.random(60), rng.integers(0, 2, 60), rng.integers(1, 5, 60)
    expected = evaluate(scores, labels, None, groups)
    padded = evaluate(
        np.append(scores, [0.9] * 20),
        np.append(labels, [0] * 20),
        np.append(np.ones(60), np.zeros(20)),
        np.append(groups, [1] * 20),
        batch=16,
    )
    assert padded == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_predictions_that_are_not_finite_are_counted_and_reported():
    scores = np.array([0.1, np.nan, 0.8, np.inf, 0.6])
    labels, groups = np.array([0, 1, 1, 0, 0]), np.array([1, 1, 1, 1, 1])
    result = evaluate(scores, labels, None, groups)
    finite = evaluate(scores[[0, 2, 4]], labels[[0, 2, 4]], None, groups[:3])
    assert result["nonfinite_predictions"] == 2 and result["rows"] == 5
    assert result["auc"] == finite["auc"] == 1.0
    assert result["logloss"] == finite["logloss"]


def test_a_nonfinite_prediction_of_a_row_without_weight_is_not_counted():
    result = evaluate(np.array([np.nan, 0.5]), np.array([0, 1]), np.array([0.0, 1.0]))
    assert result["nonfinite_predictions"] == 0 and result["rows"] == 1


def test_one_class_has_no_auc_and_no_rows_have_no_metrics():
    negatives = evaluate(np.array([0.1, 0.2]), np.array([0, 0]), None, np.array([1, 1]))
    for key in ("auc", "gauc", "ne", "calibration", "auc_standard_error"):
        assert math.isnan(negatives[key]), key
    assert negatives["logloss"] > 0
    empty = evaluate(np.empty(0), np.empty(0))
    assert empty["rows"] == 0 and math.isnan(empty["logloss"])


def test_saturated_predictions_have_a_finite_logloss():
    result = evaluate(np.array([0.0, 1.0]), np.array([1, 0]))
    assert result["logloss"] == pytest.approx(-math.log(EPSILON))


def test_a_log_without_users_has_no_gauc():
    result = evaluate(np.array([0.1, 0.9]), np.array([0, 1]))
    assert math.isnan(result["gauc"]) and result["auc"] == 1.0


def measured(labels, groups=None, weight=1.0):
    """Return the metrics of rows of the labels `click` and `like`, all of `weight`."""
    labels = torch.tensor(labels, dtype=torch.float32)
    metrics = Metrics(["click", "like"], grouped=groups is not None)
    users = torch.tensor(groups or [0] * len(labels))
    scores = torch.linspace(0.1, 0.9, labels.numel()).view_as(labels)
    metrics.update(scores, labels, torch.full_like(labels, weight), users)
    return metrics.compute()


def test_a_schema_without_users_has_no_gauc_at_all_and_that_is_said():
    metrics = measured([[0, 1], [1, 0]])
    assert not [key for key in metrics if "gauc" in key]
    (line,) = undefined(metrics, ["click", "like"])
    assert line.startswith("no gauc: the schema names no user (`user: COLUMN`")
    assert {key for key in measured([[0, 1], [1, 0]], [1, 1]) if "gauc" in key} > {"gauc"}


def test_metrics_that_the_rows_leave_undefined_are_said_with_the_reason():
    def said(*arguments, **options):
        return undefined(measured(*arguments, **options), ["click", "like"])

    assert said([[0, 1], [1, 0]], [1, 1]) == []
    assert said([[0, 1], [1, 0]], [1, 2]) == [
        "click_gauc is null: no user has both values of label 'click'",
        "like_gauc is null: no user has both values of label 'like'",
    ]
    assert said([[0, 1], [1, 1]], [1, 1]) == [
        "like_auc is null: label 'like' is 1 in every test row"
    ]
    assert said([[0, 1], [1, 0]], [1, 1], weight=0.0) == [
        f"no metric of label {name!r}: in every test row it is null, has weight 0 or got no "
        "finite prediction"
        for name in ("click", "like")
    ]
    one = Metrics(["click"])
    column = torch.tensor([[0.0], [0.0]])
    one.update(column, column, column + 1, torch.tensor([1, 2]))
    assert undefined(one.compute(), ["click"]) == [
        "auc is null: label 'click' is 0 in every test row"
    ]


def test_rows_of_unknown_users_stay_out_of_gauc_alone():
    scores, labels = np.array([0.1, 0.9, 0.2, 0.8]), np.array([0, 1, 1, 0])
    groups = np.array([7, 7, NO_USER, NO_USER])
    result = evaluate(scores, labels, None, groups)
    assert result["gauc"] == 1.0 and result["gauc_users"] == 1
    assert result["auc"] == 0.75 and result["rows"] == 4


def test_several_labels_are_reported_each_and_as_a_macro_mean():
    rng = np.random.default_rng(2)
    scores, labels = rng.random((500, 3)), rng.integers(0, 2, (500, 3)).astype(float)
    labels[:, 2] = 0
    weights = rng.integers(0, 3, (500, 3)).astype(float)
    groups = rng.integers(0, 9, 500)
    metrics = Metrics(["click", "buy", "share"])
    metrics.update(*(torch.as_tensor(part) for part in (scores, labels, weights, groups)))
    result = metrics.compute()
    for k, name in enumerate(("click", "buy", "share")):
        single = evaluate(scores[:, k], labels[:, k], weights[:, k], groups)
        for key in ("auc", "gauc", "gauc_unweighted", "logloss", "ne", "calibration"):
            got = result[f"{name}_{key}"]
            assert got == pytest.approx(single[key], abs=1e-12, nan_ok=True), (name, key)
    assert result["auc"] == result["click_auc"]
    assert result["macro_auc"] == pytest.approx((result["click_auc"] + result["buy_auc"]) / 2)
    assert result["rows"] == (weights > 0).any(1).sum()


def test_computing_twice_gives_the_same_and_reset_forgets():
    metrics = Metrics(["click"])
    batch = (column([0.2, 0.7]), column([0, 1]), column([1, 1]), torch.tensor([1, 1]))
    metrics.update(*batch)
    assert metrics.compute() == pytest.approx(metrics.compute(), nan_ok=True)
    metrics.reset()
    assert metrics.compute()["rows"] == 0


def test_users_are_sampled_by_hash_when_rows_exceed_the_cap():
    rng = np.random.default_rng(4)
    groups = rng.integers(0, 4000, 60_000)
    labels = (rng.random(60_000) < 0.4).astype(float)
    scores = np.clip(0.4 * rng.random(60_000) + 0.3 * labels, 0, 1)
    exact = evaluate(scores, labels, None, groups)
    sampled = evaluate(scores, labels, None, groups, max_user_rows=20_000)
    again = evaluate(scores[::-1], labels[::-1], None, groups[::-1].copy(), max_user_rows=20_000)
    assert exact["gauc_users_sampled"] == 1.0
    assert sampled["gauc_users_sampled"] in (0.25, 0.125)
    assert sampled["gauc_users"] == pytest.approx(4000 * sampled["gauc_users_sampled"], rel=0.15)
    assert sampled["gauc"] == pytest.approx(exact["gauc"], abs=0.01)
    assert again["gauc"] == pytest.approx(sampled["gauc"], abs=1e-12)
    assert sampled["auc"] == exact["auc"]


def test_one_user_beyond_the_cap_does_not_grow_memory():
    rows = GroupedRows(1, max_rows=10)
    for _ in range(100):
        rows.add(np.full(7, 5), np.ones((7, 3, 1), np.float32))
    assert rows._num_rows <= 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((column([2.0]), column([1]), column([1]), torch.tensor([1])), "are they logits"),
        ((column([0.5]), column([7]), column([1]), torch.tensor([1])), "labels of label 'click'"),
        ((column([0.5]), column([1]), column([-1]), torch.tensor([1])), "weights of label 'click'"),
        ((torch.tensor([0.5]), column([1]), column([1]), torch.tensor([1])), "predictions must"),
        ((column([0.5]), column([1]), column([1]), column([1])), "groups must have shape"),
    ],
)
def test_input_outside_its_range_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Metrics(["click"]).update(*arguments)


def test_label_names_must_be_unique():
    with pytest.raises(ValueError, match="unique"):
        Metrics(["click", "click"])


def test_a_window_summarises_the_latest_examples_only():
    rng = np.random.default_rng(6)
    scores, labels = rng.random(1000), rng.integers(0, 2, 1000)
    weights = rng.integers(0, 2, 1000)
    window = Window(300)
    for start in range(0, 1000, 64):
        part = slice(start, start + 64)
        window.add(column(scores[part]), column(labels[part]), column(weights[part]))
    summary = window.summary()
    used = np.flatnonzero(weights[-300:]) + 700
    assert summary["auc"] == pytest.approx(roc_auc_score(labels[used], scores[used]), abs=1e-9)
    assert summary["prediction_std"] == pytest.approx(scores[used].std(), abs=1e-6)
    assert summary["prediction_max"] == pytest.approx(scores[used].max())
    assert len(window._batches) <= 6
    assert all(math.isnan(value) for value in Window(10).summary().values())


def two_rank_part(runtime, cut: int, options: dict) -> dict[str, float]:
    scores, labels = distribution_case("rare_clicks", 30_000)
    rng = np.random.default_rng(8)
    groups, weights = rng.integers(1, 40, 30_000), rng.integers(0, 3, 30_000)
    part = slice(0, cut) if runtime.rank == 0 else slice(cut, None)
    return evaluate(scores[part], labels[part], weights[part], groups[part], **options)


def whole(options: dict) -> dict[str, float]:
    scores, labels = distribution_case("rare_clicks", 30_000)
    rng = np.random.default_rng(8)
    groups, weights = rng.integers(1, 40, 30_000), rng.integers(0, 3, 30_000)
    return evaluate(scores, labels, weights, groups, **options)


@pytest.mark.dist
@pytest.mark.parametrize("cut", [0, 7_001, 15_000, 30_000])
def test_two_ranks_equal_one(processes, cut):
    """Users lie on both ranks; at the outer cuts one rank has no row at all."""
    first, second = processes.run(two_rank_part, cut, {})
    assert first == second
    assert first == pytest.approx(whole({}), abs=1e-10)


@pytest.mark.dist
def test_two_ranks_keep_the_bound_and_sample_the_same_users(processes):
    options = {"max_bins": 2**12, "max_user_rows": 5_000}
    first, second = processes.run(two_rank_part, 25_000, options)
    expected = whole({})
    assert first == second
    assert first["auc"] == pytest.approx(expected["auc"], abs=8 / 2**12)
    assert first["gauc_users_sampled"] < 1
    assert first["logloss"] == pytest.approx(expected["logloss"], abs=1e-12)

# SPDX-License-Identifier: MIT
"""Intervals hold what a reference says; reliability and users' activity equal plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.metrics.bootstrap import _POISSON, Bootstrap
from trainer.metrics.details import Details
from trainer.metrics.gauc import NO_USER
from trainer.metrics.metrics import Metrics


def rows(count=20_000, users=600, seed=0):
    """Scores, labels, weights and users, labels drawn from a distortion of the scores."""
    draw = np.random.default_rng(seed)
    user = np.minimum(draw.zipf(1.4, count), users).astype(np.int64) * 1_000_003
    score = np.clip(draw.beta(1, 20, count), 1e-4, 1).astype(np.float32)
    label = (draw.random(count) < np.clip(1.3 * score, 0, 1)).astype(np.float32)
    weight = draw.integers(0, 4, count).astype(np.float32)
    return score, label, weight, user


def feed(metrics, parts, replicates=100, batch=700):
    details = Details(replicates)
    details.begin(metrics)
    for start in range(0, len(parts[0]), batch):
        part = [torch.from_numpy(one[start : start + batch]) for one in parts]
        batch_rows = (*(one[:, None] for one in part[:3]), part[3])
        metrics.update(*batch_rows)
        details.update(*batch_rows)
    details.finish(metrics.compute())
    return details.values


def deep(parts, replicates=100, **options):
    return feed(Metrics(["click"], **options), parts, replicates)


def area(score, label, weight):
    order = np.argsort(score, kind="stable")
    score, positive, negative = (
        score[order],
        (weight * label)[order],
        (weight * (1 - label))[order],
    )
    _, inverse = np.unique(score, return_inverse=True)
    positive, negative = np.bincount(inverse, positive), np.bincount(inverse, negative)
    below = np.cumsum(negative) - negative / 2
    return positive @ below / (positive.sum() * negative.sum())


def user_reference(parts):
    """(rows, weight, AUC or NaN) of each user, one after the other."""
    score, label, weight, user = (one[parts[2] > 0] for one in parts)
    found = []
    for one in np.unique(user):
        mine = user == one
        both = 0 < label[mine].sum() < mine.sum()
        value = area(score[mine], label[mine], weight[mine]) if both else np.nan
        found.append((mine.sum(), weight[mine].sum(), value))
    return np.array(found)


def bootstrap(parts, replicates=200):
    """Percentile intervals of AUC, logloss, calibration and GAUC, users drawn with replacement."""
    score, label, weight, user = (one[parts[2] > 0].astype(np.float64) for one in parts)
    _, code = np.unique(user, return_inverse=True)
    loss = -np.log(np.where(label > 0, score, 1 - score))
    areas = user_reference(parts)
    both = np.isfinite(areas[:, 2])
    draw, found = np.random.default_rng(1), []
    for _ in range(replicates):
        times = np.bincount(
            draw.integers(0, code.max() + 1, code.max() + 1), minlength=code.max() + 1
        )
        w = weight * times[code]
        mine = (times * areas[:, 1])[both]
        found.append(
            (
                area(score, label, w),
                (w * loss).sum() / w.sum(),
                (w * score).sum() / (w * label).sum(),
                mine @ areas[both, 2] / mine.sum(),
            )
        )
    names = ("auc", "logloss", "calibration", "gauc")
    return dict(zip(names, np.percentile(found, (2.5, 97.5), 0).T, strict=True))


def test_intervals_are_those_of_a_bootstrap_over_users():
    parts = rows()
    found = deep(parts, 200)["intervals"]
    for name, expected in bootstrap(parts).items():
        width = expected[1] - expected[0]
        assert found[name] == pytest.approx(expected, abs=0.25 * width), name


def test_users_make_intervals_wider_than_rows_on_their_own_do():
    draw = np.random.default_rng(3)
    user = np.repeat(np.arange(1, 201), 50)
    taste = draw.normal(size=201)[user]  # a user's rows resemble each other
    score = (1 / (1 + np.exp(-draw.normal(size=len(user)) - taste))).astype(np.float32)
    label = (draw.random(len(user)) < 1 / (1 + np.exp(-2 * taste))).astype(np.float32)
    ones = np.ones(len(user), np.float32)
    widths = [
        np.diff(deep((score, label, ones, groups))["intervals"]["auc"])[0]
        for groups in (user, np.zeros_like(user), np.full_like(user, NO_USER))
    ]
    assert widths[0] > 2 * widths[1]
    assert widths[2] == pytest.approx(widths[1], rel=0.4)


def test_an_interval_holds_the_truth_as_often_as_it_says():
    held = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        label = (np.arange(400) % 2).astype(np.float32)
        score = (1 / (1 + np.exp(-draw.normal(size=400) - label))).astype(np.float32)
        parts = (score, label, np.ones(400, np.float32), np.zeros(400, np.int64))
        low, high = deep(parts)["intervals"]["auc"]
        held += low < 0.7602 < high  # of normal(1) against normal(0)
    assert held >= 34


def test_scores_that_lie_close_together_have_the_same_interval():
    score, label, weight, user = rows()
    wide = deep((score, label, weight, user))["intervals"]["auc"]
    close = deep(((0.5 + 1e-3 * score).astype(np.float32), label, weight, user))["intervals"]["auc"]
    assert close == pytest.approx(wide, abs=2e-3)


def test_reliability_is_that_of_the_rows_between_its_edges():
    score, label, weight, user = rows()
    found = deep((score, label, weight, user), 8)["reliability"]
    assert len(found["bins"]) == 20
    gaps = 0.0
    for one in found["bins"]:
        inside = (score >= np.float32(one["low"])) & (score < np.float32(one["high"]))
        mass = weight[inside].sum()
        assert one["weight"] == pytest.approx(mass)
        assert one["weight"] == pytest.approx(weight.sum() / 20, rel=0.1)
        assert one["prediction"] == pytest.approx((weight * score)[inside].sum() / mass)
        assert one["label"] == pytest.approx((weight * label)[inside].sum() / mass)
        gaps += mass * abs(one["prediction"] - one["label"])
    assert found["ece"] == pytest.approx(gaps / weight.sum())


def test_gauc_by_activity_is_that_of_the_users_in_each_range():
    parts = rows(4_000)
    reference = user_reference(parts)
    found = deep(parts, 8)["user_activity"]
    assert sum(one["users"] for one in found) == len(reference)
    for one in found:
        chosen = reference[
            (reference[:, 0] >= one["from_rows"]) & (reference[:, 0] <= one["to_rows"])
        ]
        both = chosen[np.isfinite(chosen[:, 2])]
        assert (one["users"], one["users_with_both"]) == (len(chosen), len(both))
        assert one["rows"] == chosen[:, 0].sum()
        if len(both):
            assert one["gauc"] == pytest.approx(np.average(both[:, 2], weights=both[:, 1]))


def test_how_often_a_user_counts_follows_poisson():
    assert _POISSON.mean() == pytest.approx(1, abs=1e-3)
    assert _POISSON.var() == pytest.approx(1, abs=1e-3)
    draws = Bootstrap(Metrics(["click"]), replicates=40)._draw(np.arange(5_000))
    assert (draws[0] == 1).all()
    assert draws[1:].mean() == pytest.approx(1, abs=0.01)
    assert np.abs(np.corrcoef(draws[1:]) - np.eye(40)).max() < 0.08


def test_rows_without_a_class_leave_the_intervals_out():
    score, _, weight, user = rows(100)
    found = deep((score, np.zeros(100, np.float32), weight, user), 8)
    assert set(found["intervals"]) == {"logloss"}
    nothing = deep(tuple(one[:0] for one in (score, score, weight, user)), 8)
    assert nothing["intervals"] == {}
    assert nothing["reliability"] == {"bins": [], "ece": 0.0}


def test_every_label_has_intervals_reliability_and_activity_of_its_own():
    score, label, weight, user = rows(3_000)
    other = np.where(np.arange(3_000) % 2, weight, 0).astype(np.float32)
    columns = [np.stack(pair, 1) for pair in ((score, 1 - score), (label, 1 - label))]
    columns.append(np.stack([weight, other], 1))
    batch = [torch.from_numpy(one) for one in (*columns, user)]
    metrics, details = Metrics(["click", "like"]), Details(20)
    details.begin(metrics)
    metrics.update(*batch)
    details.update(*batch)
    details.finish(metrics.compute())
    found = details.values
    assert list(found["labels"]) == ["click", "like"]
    for name, parts in (
        ("click", (score, label, weight, user)),
        ("like", (1 - score, 1 - label, other, user)),
    ):
        alone = feed(Metrics(["x"]), parts, 20, batch=3_000)
        assert "labels" not in alone
        for key, value in alone["intervals"].items():
            assert found["labels"][name]["intervals"][key] == pytest.approx(value, abs=1e-6)
        assert found["labels"][name]["reliability"] == alone["reliability"]
        assert str(found["labels"][name]["user_activity"]) == str(alone["user_activity"])
    assert {name: found[name] for name in found["labels"]["click"]} == found["labels"]["click"]


def two_ranks(runtime, parts):
    own = [one[:12_000] if runtime.is_first else one[12_000:] for one in parts]
    batch = 1_000 if runtime.is_first else 667  # the same number of updates each
    return feed(Metrics(["click"]), own, 20, batch)


@pytest.mark.dist
def test_two_ranks_say_what_one_says(processes):
    parts = rows()
    alone = deep(parts, 20)
    first, second = processes.run(two_ranks, parts)
    assert str(first) == str(second)  # NaN, too
    for name, interval in alone["intervals"].items():
        assert first["intervals"][name] == pytest.approx(interval, abs=3e-4), name
    assert first["user_activity"] == [
        pytest.approx(one, abs=1e-6, nan_ok=True) for one in alone["user_activity"]
    ]
    assert first["reliability"]["ece"] == pytest.approx(alone["reliability"]["ece"], abs=1e-3)

# SPDX-License-Identifier: MIT
from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

from pipelines.experiments.analysis import AnalysisConfig, analyse
from pipelines.experiments.user_totals import Metric, UserTotals

CTR = Metric.parse("ctr=click/rows")
CVR = Metric.parse("cvr=order/click")
CONFIG = AnalysisConfig(metrics=(CTR, CVR), control="A", replicates=0)
_SUM = "sum of "


def _totals(users, arms, clicks, rows, orders=None, days=None):
    count = len(users)
    columns = {
        "user": pa.array(users),
        "arm": pa.array(arms, pa.large_string()),
        "day": pa.array(days if days is not None else [""] * count, pa.large_string()),
        _SUM + "click": pa.array(np.asarray(clicks, float)),
        _SUM + "rows:click": pa.array(np.asarray(rows, float)),
        _SUM + "order": pa.array(np.asarray(clicks if orders is None else orders, float)),
    }
    return UserTotals(table=pa.table(columns), sums=("click", "rows:click", "order"), rows=count)


def _random(seed=0, count=4_000, lift=0.0, share=0.5, days=None):
    generator = np.random.default_rng(seed)
    arms = np.where(generator.random(count) < share, "A", "B")
    rows = 1 + generator.poisson(4, count)
    clicks = generator.binomial(rows, np.where(arms == "A", 0.2, 0.2 * (1 + lift)))
    orders = generator.binomial(clicks, 0.3)
    return _totals(np.arange(count), arms, clicks, rows, orders, days)


def test_a_planted_lift_is_found_in_its_metric_alone():
    result = analyse(_random(lift=0.2), CONFIG)
    assert result["verdicts"] == [result["verdicts"][0]]
    assert result["verdicts"][0].startswith("B is better than A in ctr: +")
    effects = result["metrics"]["cvr"]["effects"]["B"]
    assert effects["lift_low"] < 0 < effects["lift_high"]
    assert result["doubts"] == []


def test_no_lift_is_no_verdict():
    (verdict,) = analyse(_random(), CONFIG)["verdicts"]
    assert verdict.startswith("B cannot be told from A in ctr: -")


def test_shares_that_are_off_take_the_verdict_away():
    result = analyse(_random(lift=0.3, share=0.4), CONFIG)
    assert "is not decided" in result["verdicts"][0]
    assert "planned shares" in result["doubts"][0]
    planned = AnalysisConfig(metrics=(CTR,), control="A", shares={"A": 2, "B": 3}, replicates=0)
    assert analyse(_random(lift=0.3, share=0.4), planned)["doubts"] == []


def test_users_of_two_arms_are_left_out_and_said():
    totals = _random(count=2_000)
    copies = totals.table.slice(0, 30)
    other = ["B" if arm == "A" else "A" for arm in copies["arm"].to_pylist()]
    copies = copies.set_column(1, "arm", pa.array(other, pa.large_string()))
    totals.table = pa.concat_tables([totals.table, copies])
    result = analyse(totals, CONFIG)
    assert result["users_in_two_arms"] == 30
    assert sum(arm["users"] for arm in result["arms"].values()) == 1_970
    assert any("30 users (1.5%) have rows in several arms" in line for line in result["doubts"])


def test_small_numbers_are_said():
    doubts = analyse(_random(count=100), CONFIG)["doubts"]
    assert any("below 1,000 errors are rough" in line for line in doubts)
    assert any("have any order; below 50" in line for line in doubts)


def test_a_metric_without_a_denominator_has_no_effect_and_says_so():
    users = np.arange(2_000)
    arms = np.where(users % 2, "A", "B")
    clicks = np.where(arms == "A", 1, 0)
    result = analyse(_totals(users, arms, clicks, np.ones(2_000)), CONFIG)
    assert result["metrics"]["cvr"]["effects"] == {}
    assert any("click is 0 in an arm" in line for line in result["doubts"])
    assert result["verdicts"] == ["B: no lift of ctr can be stated."]


def test_cuped_uses_what_users_did_before_and_new_users_count_as_average():
    generator = np.random.default_rng(3)
    count = 6_000
    taste = generator.beta(1, 4, count)
    arms = np.where(generator.random(count) < 0.5, "A", "B")
    rows = np.full(count, 10)
    now = _totals(np.arange(count), arms, generator.binomial(rows, taste), rows)
    known = np.arange(0, count, 2)
    clicks = generator.binomial(rows[known], taste[known])
    before = _totals(known, [None] * len(known), clicks, rows[known])
    effect = analyse(now, CONFIG, before)["metrics"]["ctr"]["effects"]["B"]
    assert 0.2 < effect["cuped"]["variance_reduction"] < 0.6
    assert effect["cuped"]["standard_error"] < effect["standard_error"]
    everyone = _totals(np.arange(count), [None] * count, generator.binomial(rows, taste), rows)
    better = analyse(now, CONFIG, everyone)["metrics"]["ctr"]["effects"]["B"]
    assert better["cuped"]["variance_reduction"] > effect["cuped"]["variance_reduction"]


def test_looks_are_by_day_cumulative_and_never_widen():
    generator = np.random.default_rng(4)
    days = [f"2026-01-{1 + day:02d}" for day in generator.integers(0, 6, 6_000)]
    config = AnalysisConfig(metrics=(CTR,), control="A", effect=0.1, replicates=0)
    result = analyse(_random(count=6_000, lift=0.3, days=days), config)
    looks = result["metrics"]["ctr"]["effects"]["B"]["looks"]
    assert [look["day"] for look in looks] == sorted(set(days))
    assert all(one["low"] <= other["low"] for one, other in itertools.pairwise(looks))
    assert all(one["p_value"] >= other["p_value"] for one, other in itertools.pairwise(looks))
    final = result["metrics"]["ctr"]["effects"]["B"]
    assert looks[-1]["lift"] == pytest.approx(final["lift"])
    assert looks[-1]["high"] - looks[-1]["low"] > 0.9 * (final["lift_high"] - final["lift_low"])
    assert "valid at every look" in result["verdicts"][0]


@pytest.mark.parametrize(
    ("config", "totals", "message"),
    [
        (AnalysisConfig(metrics=(CTR,), control="C"), _random(), "expected 'C' and another arm"),
        (
            AnalysisConfig(metrics=(CTR,), control="A", shares={"A": 1.0, "X": 1.0}),
            _random(),
            "one for each arm",
        ),
        (CONFIG, _totals([1, 2, 3], ["A", "A", "B"], [1, 1, 1], [1, 1, 1]), "two users or more"),
        (CONFIG, _totals(range(50), [f"u{i}" for i in range(50)], [1] * 50, [1] * 50), "right col"),
        (CONFIG, _random(count=0), "no row has a user and an arm"),
    ],
    ids=["control", "shares", "one user", "many arms", "nothing"],
)
def test_logs_that_cannot_be_analysed_are_refused(config, totals, message):
    with pytest.raises(ValueError, match=message):
        analyse(totals, config)


def test_impossible_settings_are_refused():
    for settings in (
        {"metrics": ()},
        {"metrics": (CTR, CTR)},
        {"metrics": (CTR,), "level": 1.0},
        {"metrics": (CTR,), "effect": -0.1},
    ):
        with pytest.raises(ValueError):
            AnalysisConfig(control="A", **settings)

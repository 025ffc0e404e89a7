# SPDX-License-Identifier: MIT
from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pipelines.experiments.lift import (
    Arm,
    bootstrap,
    compare,
    compare_adjusted,
    holm,
    influence,
    sample_ratio,
)
from pipelines.experiments.sample_size import users_needed
from pipelines.experiments.sequential import Looks

SIMULATIONS = 2_000


def _arm(generator, users, lift=0.0, taste=None):
    """Users with their own rates and own numbers of rows, so that rows are far from independent."""
    taste = generator.beta(2, 8, users).clip(0, 0.8) if taste is None else taste
    rows = 1 + generator.poisson(4, users)
    return Arm(x=generator.binomial(rows, taste * (1 + lift)).astype(float), y=rows.astype(float))


def test_false_positives_are_five_percent():
    generator = np.random.default_rng(0)
    p_values = [
        compare(_arm(generator, 400), _arm(generator, 500)).p_value for _ in range(SIMULATIONS)
    ]
    rate = np.mean(np.array(p_values) < 0.05)
    assert abs(rate - 0.05) < 4 * math.sqrt(0.05 * 0.95 / SIMULATIONS)


def test_rows_as_units_would_be_wrong():
    # What the test above would show if rows were taken for independent.
    generator = np.random.default_rng(0)
    rejected = 0
    for _ in range(300):
        a, b = (_arm(generator, 400, taste=generator.beta(0.3, 1.2, 400)) for _ in range(2))
        table = [[a.x.sum(), a.y.sum() - a.x.sum()], [b.x.sum(), b.y.sum() - b.x.sum()]]
        rejected += stats.chi2_contingency(table, correction=False).pvalue < 0.05
    assert rejected / 300 > 0.1


def test_intervals_hold_a_planted_lift():
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(SIMULATIONS):
        effect = compare(_arm(generator, 600, lift=0.2), _arm(generator, 600))
        inside += effect.lift_low < 0.2 < effect.lift_high
    assert abs(inside / SIMULATIONS - 0.95) < 4 * math.sqrt(0.05 * 0.95 / SIMULATIONS)


def test_a_mean_of_users_is_compared_as_by_welch():
    generator = np.random.default_rng(2)
    a, b = (Arm(x=generator.gamma(2, 1, n), y=np.ones(n)) for n in (700, 900))
    effect, welch = compare(a, b), stats.ttest_ind(a.x, b.x, equal_var=False)
    assert effect.difference == pytest.approx(a.x.mean() - b.x.mean())
    assert effect.standard_error == pytest.approx(effect.difference / welch.statistic, rel=1e-9)
    ends = welch.confidence_interval(0.95)
    assert (effect.low, effect.high) == pytest.approx((ends.low, ends.high), rel=0.02, abs=1e-4)


def test_bootstrap_and_delta_method_agree():
    generator = np.random.default_rng(3)
    a, b = _arm(generator, 3_000, lift=0.1), _arm(generator, 3_000)
    effect, ends = compare(a, b), bootstrap(a, b, replicates=2_000, seed=0)
    width = effect.lift_high - effect.lift_low
    assert ends is not None
    assert abs(ends[0] - effect.lift_low) < 0.1 * width
    assert abs(ends[1] - effect.lift_high) < 0.1 * width
    assert bootstrap(a, b, replicates=50, seed=0) == bootstrap(a, b, replicates=50, seed=0)


def test_cuped_takes_rho_squared_of_the_variance_and_stays_unbiased():
    generator = np.random.default_rng(4)
    lifts, errors = [], []
    for _ in range(60):
        arms = []
        for lift in (0.1, 0.0):
            taste = generator.beta(2, 8, 2_000).clip(0, 0.8)
            earlier = _arm(generator, 2_000, taste=taste)
            now = _arm(generator, 2_000, lift=lift, taste=taste)
            arms.append((now, earlier))
        ratio = sum(e.x.sum() for _, e in arms) / sum(e.y.sum() for _, e in arms)
        full = [Arm(x=n.x, y=n.y, before=influence(e.x, e.y, ratio)) for n, e in arms]
        effect, reduction = compare_adjusted(*full)
        within = [(a.influence() - a.influence().mean(), a.before - a.before.mean()) for a in full]
        left, right = (np.concatenate(part) for part in zip(*within, strict=True))
        assert reduction == pytest.approx(np.corrcoef(left, right)[0, 1] ** 2, rel=0.02)
        assert effect.standard_error < compare(*full).standard_error
        lifts.append(effect.lift)
        errors.append((effect.lift_high - effect.lift_low) / 3.92)
    mean_error = np.mean(errors) / math.sqrt(len(lifts))
    assert abs(np.mean(lifts) - 0.1) < 4 * mean_error
    assert np.std(lifts) == pytest.approx(np.mean(errors), rel=0.35)


def test_always_valid_looks_keep_their_level_and_plain_ones_do_not():
    generator = np.random.default_rng(5)
    looks, users = 12, 100
    always = naive = missed = 0
    for _ in range(1_000):
        # Users of each look have influence values around the same mean.
        sums = generator.normal(0, 1, (looks, 2, users)).cumsum(0)  # running sums over looks
        sequence, plain = Looks(tau=0.1), False
        for day in range(looks):
            n = (day + 1) * users
            estimate = (sums[day, 0].sum() - sums[day, 1].sum()) / n
            sequence.add(estimate, 2 / n)
            plain |= abs(estimate) > 1.96 * math.sqrt(2 / n)
        always += sequence.p_value < 0.05
        naive += plain
        missed += not sequence.low <= 0 <= sequence.high
    assert always / 1_000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1_000)
    assert missed == always  # the interval and the p value say the same
    assert naive / 1_000 > 0.1


def test_looks_find_a_planted_effect_and_never_forget_it():
    sequence = Looks(tau=0.1)
    for users in (200, 2_000, 20_000):
        sequence.add(0.1, 2 / users)
    assert sequence.p_value < 1e-4 and 0 < sequence.low < 0.1 < sequence.high
    before = sequence.p_value
    sequence.add(0.0, 1.0)
    sequence.add(math.nan, 1.0)
    sequence.add(0.0, 0.0)
    assert sequence.p_value == before
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            Looks(tau=bad)


def test_planned_users_find_the_effect_as_often_as_planned():
    generator = np.random.default_rng(6)
    users = users_needed(0.2, 0.2 * 0.8, 0.1, power=0.8)
    # 1.96 + 0.8416 = 2.8016; squared 7.849; times 4 * .16 / .02^2
    assert users == pytest.approx(7.849 * 4 * 0.16 / 0.02**2, rel=1e-3)
    found = 0
    for _ in range(1_000):
        counts = generator.binomial(users // 2, [0.22, 0.2])
        arms = []
        for count in counts:
            x = np.zeros(users // 2)
            x[:count] = 1
            arms.append(Arm(x=x, y=np.ones(users // 2)))
        found += compare(*arms).p_value < 0.05
    assert abs(found / 1_000 - 0.8) < 0.06


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 0.1), (1, 0, 0.1), (1, 1, 0), (1, 1, math.nan)],
)
def test_sizes_of_nothing_are_refused(numbers):
    with pytest.raises(ValueError, match="above 0"):
        users_needed(*numbers)


def test_shares_that_are_off_are_noticed():
    assert sample_ratio({"A": 50_100, "B": 49_900}, {"A": 1, "B": 1}) > 0.1
    assert sample_ratio({"A": 51_000, "B": 49_000}, {"A": 1, "B": 1}) < 1e-3
    assert sample_ratio({"A": 10_100, "B": 89_900}, {"A": 1, "B": 9}) > 0.1


def test_holm_steps_down_and_keeps_the_order():
    adjusted = holm([0.01, None, 0.04, 0.03])
    assert adjusted[1] is None
    assert [adjusted[place] for place in (0, 3, 2)] == pytest.approx([0.03, 0.06, 0.06])


def test_an_arm_without_events_has_a_difference_and_no_lift():
    generator = np.random.default_rng(7)
    control = _arm(generator, 300)
    empty = Arm(x=np.zeros(300), y=np.ones(300))
    effect = compare(empty, control)
    assert effect.lift is None and effect.difference == pytest.approx(-control.ratio)
    assert effect.p_value is not None
    assert bootstrap(control, empty, replicates=10) is None

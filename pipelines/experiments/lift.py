# SPDX-License-Identifier: MIT
"""What the arms of an experiment differ by: lifts of ratios of sums over users, with their errors.

A metric is R = sum(x) / sum(y) over users. Its error is that of a mean of the users' influence
values, L = R + (x - R y) / mean(y) (the delta method); the users are the independent units.

    difference   d = R_t - R_c                       variance  v_t + v_c
    lift         R_t / R_c - 1, with its interval from log R_t - log R_c, variance
                 v_t / R_t^2 + v_c / R_c^2, where v = var(L) / n

CUPED takes from L what the user did before the experiment: L - theta (Z - mean Z), where Z is the
influence value of the same metric before, and theta = cov(L, Z) / var(Z) over all arms. With the
correlation rho of L and Z the variance falls by rho^2.

The bootstrap draws users with replacement (Poisson weights) and needs no formula for the error.

Sources: Deng, Knoblich and Lu, "Applying the Delta Method in Metric Analytics", 2018; Deng, Xu,
Kohavi and Walker, "Improving the Sensitivity of Online Controlled Experiments by Utilizing
Pre-Experiment Data", 2013 (CUPED).

Shapes: U users of one arm, M replicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
_CHUNK_USERS = 4_096
# Chance of a sample-ratio alarm where the assignment is sound.
SRM_LEVEL = 1e-3


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The users of one arm and their sums of one metric.

    Attributes:
        x: (U,) sums of the numerator.
        y: (U,) sums of the denominator.
        before: (U,) influence values of the metric before the experiment; None: not known.
    """

    x: Floats
    y: Floats
    before: Floats | None = None

    @property
    def ratio(self) -> float:
        """R; not a number where the denominator is 0."""
        below = self.y.sum()
        return float(self.x.sum() / below) if below else math.nan

    def influence(self) -> Floats:
        """Return L of each user; their mean is R."""
        return influence(self.x, self.y, self.ratio)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One arm against the control in one metric.

    Attributes:
        difference: R_t - R_c.
        low: Lower end of the interval of the difference.
        high: Upper end.
        standard_error: Of the difference.
        lift: R_t / R_c - 1; None where a ratio is 0 or not defined.
        lift_low: Lower end of the interval of the lift.
        lift_high: Upper end.
        p_value: Of no difference, two-sided.
    """

    difference: float
    low: float
    high: float
    standard_error: float
    lift: float | None
    lift_low: float | None
    lift_high: float | None
    p_value: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


def influence(x: Floats, y: Floats, ratio: float) -> Floats:
    """Return the (U,) values ratio + (x - ratio y) / mean(y), whose variance / U is that of R."""
    return ratio + (x - ratio * y) / y.mean()


def compare(treatment: Arm, control: Arm, level: float = 0.95) -> Effect:
    """Return the effect by the delta method; both arms have at least two users."""
    return _effect(_moments(treatment), _moments(control), level)


def compare_adjusted(treatment: Arm, control: Arm, level: float = 0.95) -> tuple[Effect, float]:
    """Return the effect after CUPED, and the share of variance that it takes away.

    Args:
        treatment: With `before`.
        control: With `before`.
        level: Of the intervals.
    """
    arms = (treatment, control)
    before = [arm.before for arm in arms if arm.before is not None]
    assert len(before) == len(arms)
    values = [arm.influence() for arm in arms]
    pooled = np.concatenate(before)
    centre = pooled.mean()
    # Within arms, so that the effect itself is no part of the covariance.
    left = np.concatenate([value - value.mean() for value in values])
    right = np.concatenate([one - one.mean() for one in before])
    spread = right @ right
    theta = left @ right / spread if spread > 0 else 0.0
    adjusted = [value - theta * (one - centre) for value, one in zip(values, before, strict=True)]
    top, bottom = ((float(v.mean()), float(v.var(ddof=1) / len(v))) for v in adjusted)
    effect = _effect(top, bottom, level)
    total = sum(value.var(ddof=1) / len(value) for value in values)
    left_over = sum(value.var(ddof=1) / len(value) for value in adjusted)
    return effect, float(1 - left_over / total) if total > 0 else 0.0


def bootstrap(
    treatment: Arm, control: Arm, replicates: int = 1_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Return the percentile interval of the lift over users drawn with replacement.

    Args:
        treatment: An arm.
        control: Another.
        replicates: M.
        seed: Of the draws; users are drawn in their order.
        level: Of the interval.

    Returns:
        The ends; None where a replicate has no lift (a sum of 0).
    """
    generator = np.random.default_rng(seed)
    top, bottom = (_replicates(arm, replicates, generator) for arm in (treatment, control))
    with np.errstate(divide="ignore", invalid="ignore"):
        lifts = (top[0] / top[1]) / (bottom[0] / bottom[1]) - 1  # (M,)
    if not np.isfinite(lifts).all():
        return None
    tail = (1 - level) / 2
    low, high = np.quantile(lifts, [tail, 1 - tail])
    return float(low), float(high)


def sample_ratio(counts: Mapping[str, int], shares: Mapping[str, float]) -> float:
    """Return the p value of a chi-squared test that users came in the planned shares.

    Args:
        counts: Users of each arm.
        shares: Relative shares of the same arms.
    """
    expected = np.array([shares[arm] for arm in counts])
    expected = expected / expected.sum() * sum(counts.values())
    return float(stats.chisquare(list(counts.values()), expected).pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values that hold for all of several arms at once (Holm's step-down method)."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = largest
    return adjusted


def _moments(arm: Arm) -> tuple[float, float]:
    """Return R and the variance of R."""
    return arm.ratio, float(arm.influence().var(ddof=1) / len(arm.x))


def _effect(treatment: tuple[float, float], control: tuple[float, float], level: float) -> Effect:
    """Return the effect of two ratios with their variances."""
    (top, top_variance), (bottom, bottom_variance) = treatment, control
    wide = float(stats.norm.ppf((1 + level) / 2))
    difference, error = top - bottom, math.sqrt(top_variance + bottom_variance)
    lift = lift_low = lift_high = None
    p_value = float(2 * stats.norm.sf(abs(difference) / error)) if error > 0 else None
    if top > 0 and bottom > 0:
        log_lift = math.log(top / bottom)
        log_error = math.sqrt(top_variance / top**2 + bottom_variance / bottom**2)
        lift = math.expm1(log_lift)
        lift_low, lift_high = (_exp(log_lift + side * wide * log_error) for side in (-1, 1))
        p_value = float(2 * stats.norm.sf(abs(log_lift) / log_error)) if log_error > 0 else None
    return Effect(
        difference=difference,
        low=difference - wide * error,
        high=difference + wide * error,
        standard_error=error,
        lift=lift,
        lift_low=lift_low,
        lift_high=lift_high,
        p_value=p_value,
    )


def _exp(value: float) -> float:
    return math.expm1(min(value, 700.0))


def _replicates(arm: Arm, replicates: int, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Return the (M,) sums of x and y over users drawn with replacement."""
    sums = np.zeros((replicates, 2))
    both = np.stack([arm.x, arm.y], 1)  # (U, 2)
    for start in range(0, len(both), _CHUNK_USERS):
        part = both[start : start + _CHUNK_USERS]
        drawn = generator.poisson(1.0, (replicates, len(part)))  # (M, users of the chunk)
        sums += drawn @ part
    return sums[:, 0], sums[:, 1]

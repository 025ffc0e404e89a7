# SPDX-License-Identifier: MIT
"""Intervals that hold at every look at once, for an experiment that is watched day by day.

An interval of 95 % that is looked at every day misses the truth more often than in 5 % of
experiments. The mixture sequential probability ratio test stays right at every look. For an
estimate t with variance V and effects spread normally around 0 with deviation tau,

    Lambda = sqrt(V / (V + tau^2)) exp(tau^2 t^2 / (2 V (V + tau^2)))
    p      = min over the looks so far of 1 / Lambda
    h      = sqrt(V (V + tau^2) / tau^2 (2 log(1 / alpha) + log((V + tau^2) / V)))

where h is half the width of the interval.

tau is the size of effect that the test is most sensitive to. It is chosen before the experiment.
Here t is the log of the ratio of two arms, so that tau does not depend on the data.

Source: Johari, Koomen, Pekelis and Walsh, "Always Valid Inference", 2022; Robbins, "Statistical
Methods Related to the Law of the Iterated Logarithm", 1970.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(kw_only=True)
class Looks:
    """The looks at one arm in one metric, in order of time.

    Args:
        tau: The spread of log lifts that the test expects, above 0.
        level: Of the intervals, between 0 and 1.

    Attributes:
        p_value: The least so far; valid at any time.
        low: Lower end of the log lift, of all looks so far.
        high: Upper end.
    """

    tau: float
    level: float = 0.95
    p_value: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        """Check tau and level."""
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"effect: expected one above 0, planned beforehand, got {self.tau}")
        if not 0 < self.level < 1:
            raise ValueError(f"level: expected a share between 0 and 1, got {self.level}")

    def add(self, estimate: float, variance: float) -> None:
        """Add a look.

        Args:
            estimate: The log of the ratio of the arms, from all users so far.
            variance: Of the estimate; a look without one adds nothing.
        """
        if not (math.isfinite(estimate) and math.isfinite(variance) and variance > 0):
            return
        spread = self.tau**2
        total = variance + spread
        exponent = spread * estimate**2 / (2 * variance * total)
        log_ratio = 0.5 * math.log(variance / total) + exponent
        self.p_value = min(self.p_value, math.exp(-max(log_ratio, 0.0)))
        alpha = 1 - self.level
        bound = 2 * math.log(1 / alpha) + math.log(total / variance)
        half = math.sqrt(variance * total / spread * bound)
        self.low = max(self.low, estimate - half)
        self.high = min(self.high, estimate + half)

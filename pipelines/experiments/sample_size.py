# SPDX-License-Identifier: MIT
"""How many users an experiment takes to find an effect, from a log or from a rate.

    n = (z_(1 - alpha / 2) + z_power)^2 (var(L) / share_t + var(L) / share_c) / (lift R)^2

users in all arms together. L is the influence value of a user (`pipelines/experiments/lift.py`);
shares are of all users who take part. It is for one look at the end.

Source: Kohavi, Tang and Xu, "Trustworthy Online Controlled Experiments", 2020, chapter 17.
"""

from __future__ import annotations

import math

from scipy import stats


def users_needed(
    ratio: float,
    variance: float,
    lift: float,
    shares: tuple[float, float] = (0.5, 0.5),
    level: float = 0.95,
    power: float = 0.8,
) -> int:
    """Return the users of both arms together.

    Args:
        ratio: R without the effect, above 0.
        variance: Of the influence values of users, above 0; r (1 - r) for a share r of users.
        lift: The relative effect to find, such as 0.02.
        shares: Of the users, of treatment and control.
        level: 1 less the share of false alarms, two-sided.
        power: The chance to find the effect.

    Raises:
        ValueError: A number out of its range.
    """
    for name, value in (("ratio", ratio), ("variance", variance), ("lift", abs(lift))):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    for name, value in (("level", level), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name}: expected a share between 0 and 1, got {value}")
    if min(shares) <= 0 or sum(shares) > 1 + 1e-9:
        raise ValueError(f"shares: expected two above 0 with a sum up to 1, got {shares}")
    wide = float(stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(power))
    both = variance / shares[0] + variance / shares[1]
    return math.ceil(wide**2 * both / (lift * ratio) ** 2 * sum(shares))

# SPDX-License-Identifier: MIT
"""Analyse an experiment: users by arm, every metric against the control, what makes it doubtful.

The result is plain data for JSON, the console and the page (`pipelines/experiments/page.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from pipelines.experiments.lift import (
    SRM_LEVEL,
    Arm,
    bootstrap,
    compare,
    compare_adjusted,
    holm,
    influence,
    sample_ratio,
)
from pipelines.experiments.sequential import Looks
from pipelines.experiments.user_totals import USERS, Metric, UserTotals
from trainer.runtime.printable import printable

pc: Any = pyarrow.compute
# Below this number of users, or of users with an event, the normal distribution is no good guide.
FEW_USERS = 1_000
FEW_EVENTS = 50
# A larger share of users in two arms means that users are not assigned, rows are.
_MANY_IN_TWO = 0.01
MAX_ARMS = 20


@dataclass(frozen=True, kw_only=True)
class AnalysisConfig:
    """How to analyse.

    Args:
        metrics: The first decides; the others explain.
        control: The arm that the others are compared with.
        shares: Planned relative shares of the arms; empty: equal.
        level: Of the intervals.
        effect: The lift that looks by day are most sensitive to; 0: one look, at the end.
        replicates: Of the bootstrap; 0: none.
        seed: Of the bootstrap.
    """

    metrics: tuple[Metric, ...]
    control: str
    shares: Mapping[str, float] = field(default_factory=dict)
    level: float = 0.95
    effect: float = 0.0
    replicates: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        names = [metric.name for metric in self.metrics]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"metric: expected one or more with different names, got {names}")
        if not 0 < self.level < 1:
            raise ValueError(f"level: expected a share between 0 and 1, got {self.level}")
        if self.effect < 0 or self.replicates < 0:
            raise ValueError(
                f"effect and replicates must not be negative, got {self.effect}, {self.replicates}"
            )


@dataclass(kw_only=True)
class _Users:
    """The users of one arm who are in no other: their ids and sums."""

    ids: pa.Array
    sums: np.ndarray


def analyse(
    totals: UserTotals, config: AnalysisConfig, before: UserTotals | None = None
) -> dict[str, Any]:
    """Return what the arms differ by.

    Args:
        totals: Of the experiment's log; by day if `config.effect` is given.
        config: How to analyse.
        before: Of a log from before the experiment, with the same metrics, for CUPED.

    Raises:
        ValueError: No control, no other arm, an unplanned arm, or fewer than two users in an arm.
    """
    users, in_two = _by_arm(*totals.until())
    _check_arms(users, config)
    counts = {name: len(arm.ids) for name, arm in users.items()}
    shares = config.shares or dict.fromkeys(counts, 1.0)
    p_ratio = sample_ratio(counts, shares)
    planned = sum(shares.values())
    result: dict[str, Any] = {
        "control": config.control,
        "level": config.level,
        "rows": totals.rows,
        "left_out": dict(totals.left_out),
        "users_in_two_arms": in_two,
        "arms": {
            name: {
                "users": count,
                "share": count / sum(counts.values()),
                "planned": shares[name] / planned,
            }
            for name, count in counts.items()
        },
        "sample_ratio_p": p_ratio,
        "metrics": {},
    }
    for metric in config.metrics:
        earlier = None if before is None else _before(users, before, metric)
        result["metrics"][metric.name] = _of_metric(metric, users, totals, config, earlier)
    if config.effect:
        _add_looks(result, totals, config)
    result["doubts"] = _doubts(result, before is not None)
    result["verdicts"] = _verdicts(result, config)
    return result


def _by_arm(ids: pa.Array, arms: pa.Array, sums: np.ndarray) -> tuple[dict[str, _Users], int]:
    """Return the users of each arm, and the number of users who are in several and left out."""
    if not len(ids):
        raise ValueError("logs: no row has a user and an arm; check the columns")
    same = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)  # rows come by user
    several = np.zeros(len(ids), bool)
    several[1:] |= same
    several[:-1] |= same
    # Of each such user the first row counts.
    first = np.concatenate([[True], ~same])
    names = pc.unique(arms).sort()
    if len(names) > MAX_ARMS:
        raise ValueError(
            f"arm: expected at most {MAX_ARMS} arms, got {len(names):,}, such as "
            f"{[printable(str(name)) for name in names[:3].to_pylist()]}; is it the right column?"
        )
    found = {}
    for name in names.to_pylist():
        chosen = pc.equal(arms, name).to_numpy(zero_copy_only=False) & ~several
        found[name] = _Users(ids=ids.filter(pa.array(chosen)), sums=sums[chosen])
    return found, int((several & first).sum())


def _check_arms(users: Mapping[str, _Users], config: AnalysisConfig) -> None:
    arms = [printable(name) for name in users]
    if config.control not in users or len(users) < 2:
        raise ValueError(
            f"control: expected {config.control!r} and another arm in the log, got arms {arms}"
        )
    if config.shares and set(config.shares) != set(users):
        raise ValueError(
            f"shares: expected one for each arm of the log, {arms}, got {list(config.shares)}"
        )
    for name, arm in users.items():
        if len(arm.ids) < 2:
            raise ValueError(
                f"arm {printable(name)!r}: expected two users or more, got {len(arm.ids)}"
            )


def _sums(metric: Metric, names: Sequence[str], sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (U,) numerators and denominators of a metric."""
    above, below = metric.columns()
    y = np.ones(len(sums)) if below == USERS else sums[:, names.index(below)]
    return sums[:, names.index(above)], y


def _before(
    users: Mapping[str, _Users], before: UserTotals, metric: Metric
) -> dict[str, np.ndarray] | None:
    """Return the influence values before the experiment; users who are new have the mean."""
    ids, _, sums = before.until()
    if ids.type != next(iter(users.values())).ids.type:
        raise ValueError(
            "before: users are of another type than in the experiment's log; write them as one"
        )
    x, y = _sums(metric, before.sums, sums)
    if not y.sum():
        return None
    values = influence(x, y, x.sum() / y.sum())
    found = {}
    for name, arm in users.items():
        places = pc.index_in(arm.ids, ids)
        known = places.is_valid().to_numpy(zero_copy_only=False)
        earlier = np.full(len(known), values.mean())
        earlier[known] = values[places.drop_null().to_numpy()]
        found[name] = earlier
    return found


def _of_metric(
    metric: Metric,
    users: Mapping[str, _Users],
    totals: UserTotals,
    config: AnalysisConfig,
    earlier: Mapping[str, np.ndarray] | None,
) -> dict[str, Any]:
    """Return a metric's value in each arm and the effect of each arm."""
    arms: dict[str, Arm] = {}
    for name, one in users.items():
        x, y = _sums(metric, totals.sums, one.sums)
        arms[name] = Arm(x=x, y=y, before=None if earlier is None else earlier[name])
    result: dict[str, Any] = {
        "numerator": metric.numerator,
        "denominator": metric.denominator,
        "values": {name: arm.ratio for name, arm in arms.items()},
        "events": {name: float(arm.x.sum()) for name, arm in arms.items()},
        "users_with_events": {name: int((arm.x != 0).sum()) for name, arm in arms.items()},
        "effects": {},
    }
    control = arms[config.control]
    for name, arm in arms.items():
        if name == config.control or not (arm.y.sum() and control.y.sum()):
            continue
        effect = compare(arm, control, config.level).as_dict()
        if config.replicates:
            ends = bootstrap(arm, control, config.replicates, config.seed, config.level)
            effect["bootstrap_low"], effect["bootstrap_high"] = ends or (None, None)
        if earlier is not None:
            adjusted, reduction = compare_adjusted(arm, control, config.level)
            effect["cuped"] = {**adjusted.as_dict(), "variance_reduction": reduction}
        result["effects"][name] = effect
    effects = list(result["effects"].values())
    for effect, p_value in zip(effects, holm([_best(e)["p_value"] for e in effects]), strict=True):
        effect["p_holm"] = p_value
    return result


def _best(effect: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the effect after CUPED where there is one."""
    return effect.get("cuped", effect)


def _add_looks(result: dict[str, Any], totals: UserTotals, config: AnalysisConfig) -> None:
    """Add to every effect the looks at the end of each day."""
    looks: dict[tuple[str, str], Looks] = {}
    tau = math.log1p(config.effect)
    for day in totals.days:
        users, _ = _by_arm(*totals.until(day))
        if any(name not in users or len(users[name].ids) < 2 for name in result["arms"]):
            continue  # an arm without users yet
        once = replace(config, replicates=0)
        for metric in config.metrics:
            effects = _of_metric(metric, users, totals, once, None)["effects"]
            for name, effect in effects.items():
                look = looks.setdefault((metric.name, name), Looks(tau=tau, level=config.level))
                look.add(*_log_lift(effect, config.level))
                goal = result["metrics"][metric.name]["effects"].get(name)
                if goal is not None:
                    goal.setdefault("looks", []).append(_look(day, effect, look))


def _log_lift(effect: Mapping[str, Any], level: float) -> tuple[float, float]:
    """Return the log of the ratio of two arms and its variance."""
    from scipy import stats

    if effect["lift"] is None:
        return math.nan, math.nan
    width = math.log1p(effect["lift_high"]) - math.log1p(effect["lift_low"])
    error = width / (2 * float(stats.norm.ppf((1 + level) / 2)))
    return math.log1p(effect["lift"]), error**2


def _look(day: str, effect: Mapping[str, Any], look: Looks) -> dict[str, Any]:
    ends = [math.expm1(min(end, 700.0)) for end in (look.low, look.high)]
    return {
        "day": day,
        "lift": effect["lift"],
        "p_value": look.p_value,
        "low": ends[0] if math.isfinite(look.low) else None,
        "high": ends[1] if math.isfinite(look.high) else None,
    }


def _doubts(result: Mapping[str, Any], has_before: bool) -> list[str]:
    """Return what makes the numbers doubtful, each in a sentence."""
    doubts = []
    if result["sample_ratio_p"] < SRM_LEVEL:
        doubts.append(
            f"Users did not come in the planned shares (p = {result['sample_ratio_p']:.2g}): users "
            "are lost or assigned differently, and no number here can be trusted until that is "
            "understood."
        )
    in_two, users = result["users_in_two_arms"], sum(a["users"] for a in result["arms"].values())
    if in_two:
        share = in_two / (in_two + users)
        doubt = f"{in_two:,} users ({share:.1%}) have rows in several arms and are left out"
        many = ": rows are assigned, not users" if share > _MANY_IN_TWO else ""
        doubts.append(f"{doubt}{many}.")
    doubts += [f"{rows:,} rows have {reason}." for reason, rows in result["left_out"].items()]
    for name, arm in result["arms"].items():
        if arm["users"] < FEW_USERS:
            doubts.append(
                f"Arm {name} has {arm['users']:,} users; below {FEW_USERS:,} errors are rough."
            )
    for name, metric in result["metrics"].items():
        for arm, events in metric["users_with_events"].items():
            if events < FEW_EVENTS:
                doubts.append(
                    f"{name}: {events:,} users of arm {arm} have any {metric['numerator']}; below "
                    f"{FEW_EVENTS} the interval is no guide."
                )
        missing = [arm for arm in result["arms"] if arm != result["control"]]
        missing = [arm for arm in missing if arm not in metric["effects"]]
        if missing:
            doubts.append(f"{name}: {metric['denominator']} is 0 in an arm, so there is no ratio.")
        if has_before and not any("cuped" in one for one in metric["effects"].values()):
            doubts.append(f"{name}: the log from before has no {metric['denominator']}: no CUPED.")
    return doubts


def _verdicts(result: Mapping[str, Any], config: AnalysisConfig) -> list[str]:
    """Return a sentence for each arm about the metric that decides."""
    name = config.metrics[0].name
    sentences = []
    for arm, effect in result["metrics"][name]["effects"].items():
        low, high, how = _decisive(effect)
        if low is None or high is None:
            sentences.append(f"{arm}: no lift of {name} can be stated.")
            continue
        interval = f"{low:+.2%} to {high:+.2%} ({config.level:.0%} interval{how})"
        if result["sample_ratio_p"] < SRM_LEVEL:
            word = "is not decided, because users did not come in the planned shares"
        elif low > 0:
            word = f"is better than {config.control}"
        elif high < 0:
            word = f"is worse than {config.control}"
        else:
            word = f"cannot be told from {config.control}"
        sentences.append(f"{arm} {word} in {name}: {interval}.")
    return sentences


def _decisive(effect: Mapping[str, Any]) -> tuple[float | None, float | None, str]:
    """Return the ends of the interval that decides, and what kind it is."""
    if effect.get("looks"):
        last = effect["looks"][-1]
        return last["low"], last["high"], ", valid at every look"
    best = _best(effect)
    return best["lift_low"], best["lift_high"], ", CUPED" if "cuped" in effect else ""

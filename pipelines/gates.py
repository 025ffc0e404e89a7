# SPDX-License-Identifier: MIT
"""Whether a candidate may serve: thresholds on its own metrics, and on what changed.

A gate says yes or names every reason for no, with the number, the threshold and the setting. A
number that is missing is a no: a metric that could not be computed protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Thresholds.

    min_rows: of the evaluation. min_auc: the candidate's. max_calibration_error: |predicted /
      observed - 1|.
    max_auc_loss, max_gauc_loss, max_logloss_gain: how much worse than the serving model it may be.
      Of AUC and logloss, the whole 95 % interval of the paired difference has to be worse than that
      to refuse, unless `strict`: then the difference itself.
    max_drift: population stability index of the predictions against the serving model's; above 0.25
      a distribution is commonly called shifted.
    """

    min_rows: int = 1000
    min_auc: float = 0.5
    max_calibration_error: float = 0.25
    max_auc_loss: float = 0.002
    max_gauc_loss: float = 0.01
    max_logloss_gain: float = 0.005
    max_drift: float = 0.5
    strict: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"gate {name}: expected a number >= 0, got {value}")

    def reasons(
        self,
        candidate: Mapping[str, Any],
        serving: Mapping[str, Any] | None,
        differences: Mapping[str, Any] | None,
    ) -> list[str]:
        """Return why the candidate must not serve; nothing if it may.

        candidate, serving: metrics on the same rows; no serving model in the first night.
        differences: candidate - serving, as `trainer.compare` gives them.
        """
        found = [
            _below("rows", candidate.get("rows"), self.min_rows, "min_rows"),
            _below("auc", candidate.get("auc"), self.min_auc, "min_auc"),
        ]
        calibration = candidate.get("calibration")
        error = None if calibration is None else abs(calibration - 1)
        found.append(_above("calibration error", error, self.max_calibration_error))
        bad = candidate.get("nonfinite_predictions")
        found.append(f"{bad:,.0f} predictions are not finite" if bad else "")
        if serving is not None and differences is not None:
            found += self._compared(candidate, serving, differences)
        return [reason for reason in found if reason]

    def _compared(
        self,
        candidate: Mapping[str, Any],
        serving: Mapping[str, Any],
        differences: Mapping[str, Any],
    ) -> list[str]:
        auc, logloss = differences["auc"], differences["logloss"]
        losses = [auc["difference"], auc["interval"][1]]
        gains = [logloss["difference"], logloss["interval"][0]]
        which = 0 if self.strict else 1
        lost = None if losses[which] is None else -losses[which]
        found = [
            _above(f"loss of auc{_interval(auc)}", lost, self.max_auc_loss, "max_auc_loss"),
            _above(
                f"gain of logloss{_interval(logloss)}",
                gains[which],
                self.max_logloss_gain,
                "max_logloss_gain",
            ),
            _above(
                "drift of predictions (population stability index)",
                differences.get("drift"),
                self.max_drift,
                "max_drift",
            ),
        ]
        pair = candidate.get("gauc"), serving.get("gauc")
        if pair[1] is not None:
            lost = None if pair[0] is None else pair[1] - pair[0]
            found.append(_above("loss of gauc", lost, self.max_gauc_loss, "max_gauc_loss"))
        return found


def _interval(value: Mapping[str, Any]) -> str:
    low, high = value["interval"]
    if low is None or high is None:
        return ""
    return f" (difference {value['difference']:+.5f}, 95 % [{low:+.5f}, {high:+.5f}])"


def _above(
    what: str, value: float | None, limit: float, name: str = "max_calibration_error"
) -> str:
    if value is None or not math.isfinite(value):
        return f"{what} is not known ({name} {limit:g})"
    return f"{what} is {value:.5f}, above {_option(name)} {limit:g}" if value > limit else ""


def _below(what: str, value: float | None, limit: float, name: str) -> str:
    if value is None or not math.isfinite(value):
        return f"{what} is not known ({name} {limit:g})"
    return f"{what} is {value:,.5g}, below {_option(name)} {limit:g}" if value < limit else ""


def _option(name: str) -> str:
    """Return the option of the nightly pipeline that sets a gate's limit."""
    return f"--gate-{name.replace('_', '-')}"

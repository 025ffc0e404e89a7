# SPDX-License-Identifier: MIT
"""Whether a candidate may serve: thresholds on its own metrics, and on what changed.

A gate passes a candidate, or lists every reason against it with the number, the threshold and the
setting. A number that is missing is a reason, too: a metric that could not be computed protects
nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.orchestration.threshold_options import option, threshold


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Thresholds of a candidate, options --gate-NAME; the help of each is its documentation.

    Of AUC, GAUC, logloss and calibration the whole 95 % interval of the paired difference has to be
    worse than the threshold to refuse, unless `strict`: then the difference itself.
    """

    min_rows: int = threshold(1000, "least rows to evaluate on")
    min_auc: float = threshold(0.5, "least AUC of the candidate")
    max_calibration_error: float = threshold(0.25, "of |predicted / observed - 1|")
    max_auc_loss: float = threshold(0.002, "how much less than the serving model's AUC")
    max_gauc_loss: float = threshold(0.01, "how much less than the serving model's GAUC")
    max_logloss_gain: float = threshold(0.005, "how much more than the serving model's logloss")
    max_calibration_gain: float = threshold(
        0.15, "how much more than the serving model's |ln(predicted / observed)|"
    )
    max_drift: float = threshold(
        0.5, "population stability index of the predictions; above .25 they have commonly shifted"
    )
    strict: bool = threshold(False, "differences themselves count, not their intervals")

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"gate {name}: expected a number >= 0, got {value}")
        if self.min_auc > 1:
            raise ValueError(f"gate min_auc: expected a number from 0 to 1, got {self.min_auc}")

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
            found += self._compared(serving, differences)
        return [reason for reason in found if reason]

    def _compared(self, serving: Mapping[str, Any], differences: Mapping[str, Any]) -> list[str]:
        found = [
            self._lost("auc", differences["auc"], self.max_auc_loss),
            self._gained("logloss", differences["logloss"], self.max_logloss_gain),
            self._gained(
                "calibration", differences["calibration_error"], self.max_calibration_gain
            ),
            _above(
                "drift of predictions (population stability index)",
                differences.get("drift"),
                self.max_drift,
                "max_drift",
            ),
        ]
        if serving.get("gauc") is not None:  # where there are users
            found.append(self._lost("gauc", differences["gauc"], self.max_gauc_loss))
        return found

    def _lost(self, name: str, value: Mapping[str, Any], limit: float) -> str:
        """Say by how much a metric that should be large has fallen, if by too much."""
        found = value["difference"] if self.strict else value["interval"][1]
        lost = None if found is None else -found
        return _above(f"loss of {name}{_interval(value)}", lost, limit, f"max_{name}_loss")

    def _gained(self, name: str, value: Mapping[str, Any], limit: float) -> str:
        """Say by how much a metric that should be small has risen, if by too much."""
        found = value["difference"] if self.strict else value["interval"][0]
        return _above(f"gain of {name}{_interval(value)}", found, limit, f"max_{name}_gain")


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
    return f"{what} is {value:.5f}, above {option('gate', name)} {limit:g}" if value > limit else ""


def _below(what: str, value: float | None, limit: float, name: str) -> str:
    if value is None or not math.isfinite(value):
        return f"{what} is not known ({name} {limit:g})"
    return (
        f"{what} is {value:,.5g}, below {option('gate', name)} {limit:g}" if value < limit else ""
    )

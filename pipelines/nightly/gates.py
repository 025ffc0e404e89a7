# SPDX-License-Identifier: MIT
"""Whether a candidate may serve: thresholds on its own metrics, and on what changed.

A gate passes a candidate, or lists every reason against it with the number, the threshold and the
setting. A number that is missing is a reason, too: a metric that could not be computed protects
nobody.

By how much a candidate may be worse than the serving model is set for every metric that has a gate
in `trainer/metrics/spec.py`. A metric over users, such as GAUC, decides only where it speaks for
the log: on many logs few users have both values of the label on one day, and their order then
refuses candidates that are better for everyone. Where it does not decide, a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pipelines.orchestration.threshold_options import option, threshold
from trainer.metrics.spec import METRICS, Metric
from trainer.metrics.validity import all_doubts

Class = TypeVar("Class")


def _with_metrics(cls: type[Class]) -> type[Class]:
    """Give a class a threshold for each metric that has a gate: `max_auc_loss`."""
    for metric in _gated():
        way = "less" if metric.better == "higher" else "more"
        value = f"|ln {metric.name}|" if metric.better == "one" else metric.title
        text = f"how much {way} than the serving model's {value}"
        cls.__annotations__[metric.gate_setting] = "float"
        setattr(cls, metric.gate_setting, threshold(metric.gate, text))
    return cls


def _gated() -> list[Metric]:
    return [metric for metric in METRICS.values() if metric.gate is not None]


@dataclass(frozen=True, kw_only=True)
@_with_metrics
class GateConfig:
    """Thresholds of a candidate, options --gate-NAME; the help of each is its documentation.

    Of metrics the whole 95 % interval of the paired difference has to be worse than the threshold
    to refuse, unless `strict`: then the difference itself.
    """

    min_rows: int = threshold(1000, "least rows to evaluate on")
    min_auc: float = threshold(0.5, "least AUC of the candidate")
    max_calibration_error: float = threshold(0.25, "of |predicted / observed - 1|")
    max_drift: float = threshold(
        0.5, "population stability index of the predictions; above .25 they have commonly shifted"
    )
    min_gauc_users: int = threshold(
        200, "least users with both values of the label for GAUC to decide"
    )
    min_gauc_share: float = threshold(
        0.2, "least share of the rows that such users have for GAUC to decide"
    )
    strict: bool = threshold(False, "differences themselves count, not their intervals")

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"gate {name}: expected a number >= 0, got {value}")
        for name in ("min_auc", "min_gauc_share"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"gate {name}: expected a number from 0 to 1, got {getattr(self, name)}"
                )

    def reasons(
        self,
        candidate: Mapping[str, Any],
        serving: Mapping[str, Any] | None,
        differences: Mapping[str, Any] | None,
    ) -> list[str]:
        """Return why the candidate must not serve; nothing if it may.

        Args:
            candidate: Metrics of the candidate.
            serving: Those of the serving model on the same rows; None in the first night.
            differences: Candidate - serving, as `trainer.compare` gives them.
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

    def notes(self, candidate: Mapping[str, Any], serving: Mapping[str, Any] | None) -> list[str]:
        """Return what a person should know although it decides nothing.

        Args:
            candidate: Metrics of the candidate.
            serving: Those of the serving model on the same rows; None in the first night.
        """
        found = []
        for name, model in (("candidate", candidate), ("serving", serving)):
            if model is not None:
                doubtful = all_doubts(model, {"intervals": model.get("intervals")})
                found += [f"{name}: {text} ({key})" for key, text in doubtful.items()]
        if serving is not None and serving.get("gauc") is not None and not self._per_user(serving):
            found.append(
                f"gauc does not decide: {serving.get('gauc_users', 0):,.0f} users with "
                f"{serving.get('gauc_share') or 0:.1%} of the rows have both values of the label "
                f"({option('gate', 'min_gauc_users')} {self.min_gauc_users}, "
                f"{option('gate', 'min_gauc_share')} {self.min_gauc_share:g})"
            )
        return found

    def _compared(self, serving: Mapping[str, Any], differences: Mapping[str, Any]) -> list[str]:
        found = [
            self._worse(metric, differences[metric.difference])
            for metric in _gated()
            # Where there are users, and they speak for the log.
            if not metric.per_user
            or (serving.get(metric.name) is not None and self._per_user(serving))
        ]
        return [
            *found,
            _above(
                "drift of predictions (population stability index)",
                differences.get("drift"),
                self.max_drift,
                "max_drift",
            ),
        ]

    def _per_user(self, model: Mapping[str, Any]) -> bool:
        """Return whether enough users with enough rows have both values of the label."""
        users, share = (model.get(name) for name in ("gauc_users", "gauc_share"))
        enough = users is None or users >= self.min_gauc_users
        return enough and (share is None or share >= self.min_gauc_share)

    def _worse(self, metric: Metric, value: Mapping[str, Any]) -> str:
        """Say by how much a metric is worse, if by too much."""
        limit = getattr(self, metric.gate_setting)
        if metric.better == "higher":
            found = value["difference"] if self.strict else value["interval"][1]
            found, what = None if found is None else -found, "loss"
        else:
            found, what = value["difference"] if self.strict else value["interval"][0], "gain"
        text = f"{what} of {metric.name}{_interval(value)}"
        return _above(text, found, limit, metric.gate_setting)


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

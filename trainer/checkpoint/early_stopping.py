# SPDX-License-Identifier: MIT
"""Early stopping: training ends when evaluations no longer get better, and the best model counts.

After every epoch the model is evaluated on the validation rows and has a checkpoint. `best.json`
in the folder of checkpoints names the one with the best metric. It is what commands use that are
given the run's folder, and what the run's own test metrics are of.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.layout import MANIFEST, complete, step_name
from trainer.checkpoint.storage import Folder, read_bounded, write_durably
from trainer.metrics.spec import METRICS
from trainer.runtime.atomic_files import parse_json, to_json
from trainer.runtime.credentials import without_credentials
from trainer.runtime.runtime import RunError, Runtime

BEST = "best.json"
_MAX_BYTES = 4096
# Where a manifest holds the state: its attributes, and what each may be.
_KEY = "early_stopping"
_SAVED: dict[str, tuple[type, ...]] = {
    "validated_step": (int,),
    "validations": (int,),
    "stale": (int,),
    "best_step": (int,),
    "best_value": (float, type(None)),
    "reference": (float, type(None)),
}


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """When training ends before its last epoch.

    Attributes:
        patience: validations in a row that may pass without improvement; after so many, training
            ends. 0: never. One follows each epoch, on `data.validation_days` and
            `data.validation_rows` (the last training day, if neither is set). The best checkpoint
            by `checkpoint.best_metric` is kept, tested, and used by other commands.
        min_change: how much the metric must gain on its last improvement to be another one.
    """

    patience: int = 0
    min_change: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.patience < 0:
            raise ValueError(
                f"early_stopping.patience: expected at least 0 (0: never), got {self.patience}"
            )
        if not (math.isfinite(self.min_change) and self.min_change >= 0):
            raise ValueError(
                f"early_stopping.min_change: expected a number >= 0, got {self.min_change}"
            )
        if self.min_change and not self.patience:
            raise ValueError(
                "early_stopping.min_change: has no effect without early_stopping.patience; set "
                "the patience, or remove it"
            )


class EarlyStopping:
    """Which validation was the best, and whether training is over. The same on all ranks.

    Args:
        config: the settings.
        metric: the name of the metric that decides.
        directory: the folder of the run's checkpoints.
        runtime: this process among the ranks, which all follow the first one's values.

    Attributes:
        validated_step: step of the latest validation, or -1.
        best_step: step of the best validation that has a checkpoint, or -1.
        best_value: its metric.
        stale: validations since the last improvement.
        validations: how many there were.
        reference: the metric of the last improvement.
    """

    def __init__(
        self, config: EarlyStoppingConfig, metric: str, directory: Folder, runtime: Runtime
    ) -> None:
        self.config, self.metric = config, metric
        self._directory, self._runtime = directory, runtime
        self.validated_step = self.best_step = -1
        self.best_value: float | None = None
        self.stale = self.validations = 0
        self.reference: float | None = None

    @property
    def active(self) -> bool:
        """Whether the run validates at all."""
        return self.config.patience > 0

    @property
    def best(self) -> Folder | None:
        """The best checkpoint so far, if there is one."""
        return self._directory / step_name(self.best_step) if self.best_step >= 0 else None

    @property
    def over(self) -> bool:
        """Whether patience has run out."""
        return 0 < self.config.patience <= self.stale

    def waits(self, step: int) -> bool:
        """Return whether `step`, at which training ends, is still to be validated."""
        return self.active and self.validated_step < step

    def validated(self, step: int, metrics: Mapping[str, Any], kept: bool) -> None:
        """Take note of a validation, and name its checkpoint if it is the best so far. Collective.

        Args:
            step: finished steps.
            metrics: what the evaluation found. A metric without a value is no improvement.
            kept: whether the model has a checkpoint; only such a one can be the best.

        Raises:
            RunError: the best checkpoint cannot be named; raised on all ranks.
        """
        found = self._of_first(float(metrics.get(self.metric, math.nan)))
        self.validated_step, self.validations = step, self.validations + 1
        improved = self._gain(found, self.reference) > self.config.min_change
        self.stale = 0 if improved else self.stale + 1
        if improved:
            self.reference = found
        if kept and self._gain(found, self.best_value) > 0:
            self.best_step, self.best_value = step, found
            self._name_best()

    def describe(self) -> str:
        """Return where the best validation was, and how many since were no better, in words."""
        metric = METRICS[self.metric]
        best = f"no checkpoint with a {self.metric}"
        if self.best_value is not None:
            best = f"best {self.metric} {self.best_value:{metric.form}} at step {self.best_step:,}"
        count = f"{self.stale} of {self.config.patience}" if self.stale else "the latest"
        since = f"{count} validations without improvement" if self.stale else f"{count} one"
        end = "; training ends" if self.over else ""
        return f"early stopping: {best}; {since}{end}"

    def record(self) -> dict[str, Any]:
        """Return what metrics.json holds of it; nothing without patience."""
        found = {
            "metric": self.metric,
            "best_step": self.best_step if self.best_step >= 0 else None,
            "best_value": self.best_value,
            "validations": self.validations,
            "stopped_early": self.over,
        }
        return {_KEY: found} if self.active else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from, as plain data; nothing without patience."""
        if not self.active:
            return {}
        values = {name: getattr(self, name) for name in _SAVED}
        return {_KEY: {**values, "metric": self.metric}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a manifest that holds `state_dict`.

        Raises:
            ValueError: another metric has decided so far, or the values are damaged.
        """
        if not self.active:
            return
        found = state.get(_KEY)
        values = found if isinstance(found, dict) else {}
        metric = values.get("metric")
        if metric != self.metric and metric in METRICS:
            raise ValueError(
                f"checkpoint.best_metric: expected {metric}, by which this run has chosen its best "
                f"checkpoint so far, got {self.metric}; set it back, or choose another --output"
            )
        for name, kinds in _SAVED.items():
            if type(values.get(name)) not in kinds:
                raise ValueError(
                    f"manifest.json: damaged (key {_KEY!r}, {name}: got {values.get(name)!r:.40}); "
                    "go on from an older checkpoint"
                )
            setattr(self, name, values[name])

    def _of_first(self, value: float) -> float:
        """Return the first rank's value on all ranks: a last bit must not part them."""
        shared = torch.tensor([value], dtype=torch.float64, device=self._runtime.device)
        dist.broadcast(shared, group=self._runtime.group, group_src=0)
        return float(shared)

    def _name_best(self) -> None:
        """Write which checkpoint is the best. Collective."""
        error = [""]
        path = self._directory / BEST
        if self._runtime.is_first:
            named = {"step": self.best_step, self.metric: self.best_value}
            try:
                write_durably(path, to_json(named))
            except Exception as caught:  # any file system's; the other ranks must not wait for ever
                error[0] = without_credentials(str(caught) or type(caught).__name__)
        dist.broadcast_object_list(error, group=self._runtime.patient, group_src=0)
        if error[0]:
            raise RunError(
                f"{path}: cannot be written ({error[0]}); make room, and run the same command "
                "again: it goes on from the newest checkpoint"
            )

    def _gain(self, value: float, before: float | None) -> float:
        """Return by how much `value` is better; any value is better than none."""
        if math.isnan(value) or before is None:
            return -math.inf if math.isnan(value) else math.inf
        score = METRICS[self.metric].score
        return score(value) - score(before)


def best(directory: Folder) -> Folder | None:
    """Return the complete checkpoint that `best.json` in `directory` names; None if it names none.

    Anybody may have written the file. It can lead to a checkpoint in the same folder only.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        step = parse_json(read_bounded(directory / BEST, _MAX_BYTES))["step"]
        if type(step) is int and step >= 0 and (directory / step_name(step) / MANIFEST).is_file():
            return directory / step_name(step)
    return None


def newest_or_best(directory: Folder) -> Folder | None:
    """Return the checkpoint of `directory` to use: its best if one is named, else its newest."""
    found = complete(directory)
    return (best(directory) or found[-1]) if found else None

# SPDX-License-Identifier: MIT
"""When a run saves: by steps, by the clock, and never so often that saving costs much."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.metrics.spec import choosable

# Steps between two looks at the clock, because all ranks have to agree on what it says.
_LOOK_STEPS = 10
# Largest share of the time that saving by the clock may take.
_SAVING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, where, and which stay. One is always written at the run's end.

    interval_steps: every so many steps; 0: not by steps.
    interval_seconds: when so many seconds have passed since the last one, which is what a killed
      run loses at most (and up to 10 steps, and the time of writing); longer where training would
      stand still for more than 5 % of the time. A run that is shorter pays nothing. 0: not by the
      clock.
    folder: where they are written, a folder or a URL that fsspec understands (s3://bucket/name); a
      relative folder is below the run's folder; empty: `checkpoints` there. User and password of a
      URL are not kept: the environment, or the same command, gives them again.
    asynchronous: whether training goes on while they are written, which takes memory for a copy of
      the state on every machine; where there is none, training waits.
    keep: how many of the newest stay.
    keep_best: how many of those with the best metric stay; with it, every evaluation has a
      checkpoint (evaluate_epochs).
    best_metric: of the evaluation; which way is better, `trainer/metrics/spec.py` says.
    keep_every_hours: the first in each stretch of so many hours stays; 0: no such rule.
    """

    interval_steps: int = 0
    interval_seconds: float = 600.0
    folder: str = ""
    asynchronous: bool = True
    keep: int = 2
    keep_best: int = 0
    best_metric: str = "auc"
    keep_every_hours: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.interval_steps < 0 or self.keep < 1:
            raise ValueError(
                f"checkpoint: interval_steps must not be negative and keep must be at least 1, got "
                f"{self.interval_steps} and {self.keep}"
            )
        if self.keep_best < 0:
            raise ValueError(f"checkpoint.keep_best: expected at least 0, got {self.keep_best}")
        for name, without in (("interval_seconds", "by the clock"), ("keep_every_hours", "by age")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"checkpoint.{name}: expected a number >= 0 (0: not {without}), got {value}"
                )
        if self.best_metric not in choosable():
            raise ValueError(
                f"checkpoint.best_metric: expected one of {', '.join(choosable())}, got "
                f"{self.best_metric!r}"
            )
        if self.best_metric != type(self).best_metric and not self.keep_best:
            raise ValueError(
                f"checkpoint.best_metric: {self.best_metric!r} has no effect without keep_best; "
                "set keep_best, or remove it"
            )

    def build(self, group: dist.ProcessGroup) -> Cadence:
        """Return the cadence of a run that begins, or goes on, now."""
        return Cadence(self, group)


class Cadence:
    """Says after which steps to save, the same on all ranks."""

    def __init__(
        self,
        config: CheckpointConfig,
        group: dist.ProcessGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._group = group
        self._clock = clock
        self._pause = config.interval_seconds
        self._last = clock()

    def due(self, step: int, busy: bool = False) -> bool:
        """Return whether to save after `step` finished steps. Collective.

        busy: whether a checkpoint is being written; by the clock none is begun meanwhile.
        """
        if self.config.interval_steps and step % self.config.interval_steps == 0:
            return True
        if not self.config.interval_seconds or step % _LOOK_STEPS:
            return False
        passed = torch.tensor([not busy and self._clock() - self._last >= self._pause])
        if self._group.size() > 1:
            # The first rank's clock counts.
            dist.broadcast(passed, group=self._group, group_src=0)
        return bool(passed)

    def saved(self, started: float) -> None:
        """Take note of a checkpoint that training has stood still for since `started`."""
        self._last = self._clock()
        self._pause = max(self.config.interval_seconds, (self._last - started) / _SAVING_SHARE)

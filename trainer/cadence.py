# SPDX-License-Identifier: MIT
"""When a run saves: by steps, by the clock, and never so often that saving costs much."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Steps between two looks at the clock, because all ranks have to agree on what it says.
_LOOK_STEPS = 10
# Largest share of the time that saving by the clock may take.
_SAVING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept. One is always written at the run's end.

    interval_steps: every so many steps; 0: not by steps.
    interval_seconds: when so many seconds have passed since the last one, which is what a killed
      run loses at most (and up to 10 steps); longer where saving would take more than 5 % of the
      time. A run that is shorter pays nothing. 0: not by the clock.
    keep: how many of the newest stay.
    """

    interval_steps: int = 0
    interval_seconds: float = 600.0
    keep: int = 2

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.interval_steps < 0 or self.keep < 1:
            raise ValueError(
                f"checkpoint: interval_steps must not be negative and keep must be at least 1, got "
                f"{self.interval_steps} and {self.keep}"
            )
        if not (math.isfinite(self.interval_seconds) and self.interval_seconds >= 0):
            raise ValueError(
                "checkpoint.interval_seconds: expected a number >= 0 (0: not by the clock), got "
                f"{self.interval_seconds}"
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

    def due(self, step: int) -> bool:
        """Return whether to save after `step` finished steps. Collective."""
        if self.config.interval_steps and step % self.config.interval_steps == 0:
            return True
        if not self.config.interval_seconds or step % _LOOK_STEPS:
            return False
        passed = torch.tensor([self._clock() - self._last >= self._pause])
        if self._group.size() > 1:
            # The first rank's clock counts.
            dist.broadcast(passed, group=self._group, group_src=0)
        return bool(passed)

    def saved(self, started: float) -> None:
        """Take note of a checkpoint whose writing began at `started`, by the same clock."""
        self._last = self._clock()
        self._pause = max(self.config.interval_seconds, (self._last - started) / _SAVING_SHARE)

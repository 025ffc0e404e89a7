# SPDX-License-Identifier: MIT
"""When a run saves: by steps, by the clock, and with a bound on the time spent saving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.metrics.spec import choosable

# Steps between two readings of the clock; each reading is a broadcast to all ranks.
_LOOK_STEPS = 10
# Largest share of the time that saving by the clock may take.
_SAVING_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, where, and which are kept. A run always writes one at its end.

    Attributes:
        interval_steps: steps between checkpoints; 0 disables saving by steps.
        interval_seconds: seconds between checkpoints; 0 disables saving by the clock. A killed run
            loses at most this much training, plus 10 steps and the time of writing. The interval
            grows where saving would stop training for more than 5 % of the time. A shorter run pays
            nothing.
        folder: where they are written, a folder or a URL that fsspec understands
            (s3://bucket/name). A relative folder is below the run's folder; empty means
            `checkpoints` there. User and password of a URL are not stored: the environment, or the
            same command, provides them again.
        asynchronous: whether training continues while they are written. This needs memory for a
            copy of the state on every machine; without that memory training waits.
        keep: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the best metric to keep; with it, every evaluation has
            a checkpoint (evaluate_epochs).
        best_metric: the evaluation metric that decides, of keep_best and of early_stopping;
            `trainer/metrics/spec.py` defines which direction is better.
        keep_every_hours: keep the first checkpoint of each period of this many hours; 0 disables
            the rule.
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

    def build(self, group: dist.ProcessGroup) -> Cadence:
        """Return the cadence of a run that starts or resumes now."""
        return Cadence(self, group)


class Cadence:
    """Decides after which steps to save, identically on all ranks.

    Args:
        config: the intervals.
        group: the process group of all ranks.
        clock: returns seconds.
    """

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

        Args:
            step: number of finished steps.
            busy: whether a checkpoint is being written; the clock starts no other one meanwhile.
        """
        if self.config.interval_steps and step % self.config.interval_steps == 0:
            return True
        if not self.config.interval_seconds or step % _LOOK_STEPS:
            return False
        passed = torch.tensor([not busy and self._clock() - self._last >= self._pause])
        if self._group.size() > 1:
            # All ranks use the first rank's clock.
            dist.broadcast(passed, group=self._group, group_src=0)
        return bool(passed)

    def saved(self, started: float) -> None:
        """Record a checkpoint that has stopped training since `started`."""
        self._last = self._clock()
        self._pause = max(self.config.interval_seconds, (self._last - started) / _SAVING_SHARE)

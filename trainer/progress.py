# SPDX-License-Identifier: MIT
"""Where a run stands: what it has trained so far, and what it has found and taken over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.config import TrainConfig
from trainer.data.loader import Loader

# What a manifest holds of a run's progress; `load_state_dict` sets these and nothing else.
_SAVED = ("step", "rows", "epoch", "padded_rows", "train_seconds", "wait_seconds", "ranks")


@dataclass(kw_only=True)
class Progress:
    """The counters of one run, the same on all ranks but for seconds.

    Attributes:
        step: finished steps.
        rows: examples trained, of all ranks, without padding.
        epoch: the epoch of the next step, from 0.
        epoch_start: finished steps when that epoch began.
        padded_rows: rows of weight 0 that made the last steps of epochs even.
        train_seconds: time in training steps and between them, without evaluations.
        wait_seconds: of these, the time that this rank waited for its loader.
        ranks: effective ranks of the evaluations so far, each with its step.
        inherited: the checkpoint that each inherited part came from; None if there is none.
    """

    step: int = 0
    rows: int = 0
    epoch: int = 0
    epoch_start: int = 0
    padded_rows: int = 0
    train_seconds: float = 0.0
    wait_seconds: float = 0.0
    ranks: list[dict[str, Any]] = field(default_factory=list)
    inherited: dict[str, str] | None = None
    _clock: tuple[float, float] | None = field(default=None, init=False, repr=False)

    def add_step(self, taken: int, rows_until: int) -> int:
        """Count a finished step and return its examples without padding.

        Args:
            taken: rows of the step's batches on all ranks, padding included.
            rows_until: examples of all epochs up to the end of this one. Every step takes full
                batches but the last of an epoch, which is padded.
        """
        rows = min(taken, rows_until - self.rows)
        self.step += 1
        self.rows += rows
        self.padded_rows += taken - rows
        return rows

    def begin_epoch(self, steps_done: int) -> None:
        """Begin the current epoch, or go on in it after `steps_done` of its steps."""
        self.epoch_start = self.step - steps_done

    def end_epoch(self, num_steps: int) -> None:
        """End the current epoch if all of its `num_steps` steps are done.

        An epoch that `max_steps` cut is not over: a run that inherits its position continues it.
        """
        self.epoch += self.step - self.epoch_start == num_steps

    def start_clock(self, waited: float) -> None:
        """Begin to count seconds of training.

        Args:
            waited: seconds of waiting for input so far, as an `InputTimer` counts them.
        """
        self._clock = time.perf_counter(), waited

    def count_seconds(self, waited: float) -> None:
        """Add the time since the last call, if the clock runs."""
        if self._clock is not None:
            before, self._clock = self._clock, (time.perf_counter(), waited)
            self.train_seconds += self._clock[0] - before[0]
            self.wait_seconds += self._clock[1] - before[1]

    def stop_clock(self, waited: float) -> None:
        """Add the time since the last call and stop: what follows is no training."""
        self.count_seconds(waited)
        self._clock = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from, as plain data."""
        return {**{name: getattr(self, name) for name in _SAVED}, "inherited": self.inherited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`, of this run or of one whose position is inherited."""
        for name in _SAVED:
            setattr(self, name, state[name])
        # An evaluation at the step that is resumed from is made again.
        self.ranks = [record for record in state["ranks"] if record["step"] < self.step]
        self.inherited = state.get("inherited")


def plan_steps(
    config: TrainConfig, progress: Progress, loader: Loader, inherits: bool
) -> tuple[int, int]:
    """Return how many steps the schedule has, and after which step the run ends.

    Args:
        config: epochs and limits.
        progress: where the run begins.
        loader: of the training rows, at that place. At another world size than before, the rest of
            its epoch takes other steps than planned.
        inherits: whether the run begins with what others have trained.

    Raises:
        ValueError: the inherited position leaves no step to train.
    """
    rest = len(loader) - loader.step

    def after(epochs: int) -> int:
        """Return the step after which `epochs` epochs are done."""
        later = epochs - progress.epoch - 1
        if not loader.num_epochs:
            return progress.step + rest + later * (loader.steps_of(0) if later else 0)
        done = range(progress.epoch + 1, epochs)
        return progress.step + rest + sum(loader.steps_of(epoch) for epoch in done)

    total = after(loader.num_epochs or config.epochs)
    if config.max_steps:
        total = min(total, config.max_steps)
    end = min(total, after(config.stop_epoch)) if config.stop_epoch else total
    if inherits and progress.step >= end:
        raise ValueError(
            f"epochs: the run that data_position comes from has trained {progress.epoch} epochs "
            f"({progress.step:,} steps), which leaves none to train; raise epochs, or begin anew "
            "with --inherit.sources data_position fresh"
        )
    return total, end

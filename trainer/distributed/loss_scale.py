# SPDX-License-Identifier: MIT
"""What a step decides and reports, as numbers that stay on the device that computes.

The host never asks for them in a step: what a step decides stays where it was decided, and is read
when a log line, a checkpoint or a failure needs it.

Source: dynamic scaling as in Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

MAX_SCALE = 2.0**32


class LossScale:
    """A scale that halves at an overflow and doubles after `growth_interval` good steps.

    Args:
        initial: the scale at the start.
        dynamic: whether the scale changes at all.
        growth_interval: good steps until it doubles.
        device: where steps are decided.

    Attributes:
        scale: the scale of the next step, 0-d float64 on `device`.
        num_skipped: steps skipped so far, 0-d float64 on `device`.
        consecutive_skips: steps skipped in a row, 0-d float64 on `device`.
    """

    def __init__(
        self, initial: float, dynamic: bool, growth_interval: int, device: torch.device
    ) -> None:
        self.dynamic, self.growth_interval = dynamic, growth_interval
        self.scale = torch.tensor(initial, dtype=torch.float64, device=device)
        self.num_skipped, self.consecutive_skips, self._good_steps = (
            torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)
        )

    def update(self, overflow: Tensor) -> None:
        """Count a step.

        Args:
            overflow: whether it overflowed, 0-d bool.
        """
        good_steps = self._good_steps + 1
        grown, halved = self.scale, self.scale
        if self.dynamic:
            grows = good_steps >= self.growth_interval
            grown = torch.where(grows, (2.0 * self.scale).clamp(max=MAX_SCALE), self.scale)
            good_steps = torch.where(grows, 0.0, good_steps)
            halved = 0.5 * self.scale
        self.scale = torch.where(overflow, halved, grown)
        self._good_steps = torch.where(overflow, 0.0, good_steps)
        self.num_skipped = self.num_skipped + overflow
        self.consecutive_skips = torch.where(overflow, self.consecutive_skips + 1, 0.0)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers from which `load_state_dict` goes on."""
        return {
            "loss_scale": self.scale.item(),
            "good_steps": int(self._good_steps.item()),
            "num_skipped": int(self.num_skipped.item()),
            "consecutive_skips": int(self.consecutive_skips.item()),
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`; a scale that does not move keeps its own."""
        if self.dynamic:
            self.scale.fill_(float(state["loss_scale"]))
            self._good_steps.fill_(int(state["good_steps"]))
        self.num_skipped.fill_(int(state["num_skipped"]))
        self.consecutive_skips.fill_(int(state["consecutive_skips"]))


class StepNumbers(NamedTuple):
    """The numbers of a `Step` where they were computed, each 0-d float64."""

    loss: Tensor
    weight_sum: Tensor
    skipped: Tensor
    gradient_norm: Tensor
    loss_scale: Tensor
    num_skipped: Tensor


class Step:
    """What a step did, the same on all ranks. Reading a number waits for the device."""

    def __init__(self, on_device: StepNumbers) -> None:
        self.on_device = on_device

    @functools.cached_property
    def _numbers(self) -> list[float]:
        return torch.stack(self.on_device).tolist()

    @property
    def loss(self) -> float:
        """Mean over the weight of all ranks."""
        return self._numbers[0]

    @property
    def weight_sum(self) -> float:
        """The weight of all ranks."""
        return self._numbers[1]

    @property
    def skipped(self) -> bool:
        """Whether nothing was changed."""
        return bool(self._numbers[2])

    @property
    def gradient_norm(self) -> float:
        """Of the unscaled gradient, before clipping."""
        return self._numbers[3]

    @property
    def loss_scale(self) -> float:
        """The one used."""
        return self._numbers[4]

    @property
    def num_skipped(self) -> int:
        """Steps skipped for overflow since the run began."""
        return int(self._numbers[5])


class HostCopy:
    """A number on its way to the host: reading it waits for what was queued before it, not after.

    Args:
        value: 0-d, on any device.
    """

    def __init__(self, value: Tensor) -> None:
        self._copy = value.to("cpu", non_blocking=True)
        self._ready = None
        if value.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> float:
        """Return the number."""
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._copy)


class StopVote:
    """Whether the run is to end, as all ranks know it at the same step.

    Attributes:
        wanted: whether this rank wants it; the vote travels with the next step.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._counts: list[HostCopy] = []

    def count(self, votes: Tensor) -> None:
        """Record the votes of a step.

        Args:
            votes: how many ranks wanted to stop, 0-d.
        """
        self._counts = [*self._counts[-1:], HostCopy(votes)]

    def decided(self, latest: bool = False) -> bool:
        """Return whether any rank wanted it at the step before the last.

        Args:
            latest: read the last step too, which waits for the device.
        """
        return any(count.read() for count in (self._counts if latest else self._counts[:-1]))


def power_of_two(value: Tensor) -> Tensor:
    """Return the power of two nearest below a 0-d float64 `value`; 1 for 0."""
    exponent = torch.frexp(value)[1] - 1
    return torch.where(value > 0, torch.ldexp(torch.ones_like(value), exponent), 1.0)

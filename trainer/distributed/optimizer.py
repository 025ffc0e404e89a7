# SPDX-License-Identifier: MIT
"""AdamW for the dense weights, its state for checkpoints, and the schedule of learning rates.

A checkpoint holds the state of any optimizer whose state a step without gradients leaves alone, so
that another one than AdamW is a change of this file only.

The schedule is a pure function of the step, so resuming at a step restores it without any state.
Tables take their rate inside backward, so it has to be set before: `Schedule.apply` comes before a
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from embeddings.optimizer import DEFAULT_EPS


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The factor on every learning rate, by step.

    Attributes:
        warmup_steps: steps of linear rise, the first at 1 / warmup_steps.
        decay: after the warm-up, `constant`, or falling to `final_factor` at the run's last step,
            by a line or half a cosine.
        final_factor: where decay ends; without effect on `constant`, where it must stay at its
            default.
        scale_sparse: whether the tables' rate follows too.
    """

    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_factor: float = 0.0
    scale_sparse: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.warmup_steps < 0:
            raise ValueError(
                f"schedule.warmup_steps: expected an integer >= 0, got {self.warmup_steps}"
            )
        if self.decay not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"schedule.decay: expected 'constant', 'linear' or 'cosine', got {self.decay!r}"
            )
        if not 0 <= self.final_factor <= 1:
            raise ValueError(
                f"schedule.final_factor: expected a number in [0, 1], got {self.final_factor}"
            )
        if self.decay == "constant" and self.final_factor != type(self).final_factor:
            raise ValueError(
                "schedule.final_factor: has no effect on decay 'constant', got "
                f"{self.final_factor}; remove it, or choose 'linear' or 'cosine'"
            )

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor of step 0 to total_steps - 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        remaining = max(1, total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / remaining)
        fall = progress if self.decay == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
        return 1.0 - (1.0 - self.final_factor) * fall

    def build(self, total_steps: int, dense: Optimizer, sparse: Optimizer) -> Schedule:
        """Return the schedule of a run.

        Args:
            total_steps: of the whole run.
            dense: optimizer of the dense weights.
            sparse: fused optimizer of the tables.
        """
        return Schedule(self, total_steps, dense, sparse)


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig:
    """AdamW on the dense weights.

    Attributes:
        learning_rate: before the schedule's factor.
        beta1: decay of the mean of gradients, a step.
        beta2: decay of the mean of their squares.
        eps: added to the root of that mean.
        weight_decay: decoupled, on matrices only. Vectors (biases, gains of norms) and scalars
            (softening exponents) do not decay.
        schedule: of the learning rate.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = DEFAULT_EPS
    weight_decay: float = 0.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"dense.{name}: expected a number > 0, got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"dense.{name}: expected a number in [0, 1), got {getattr(self, name)}"
                )
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"dense.weight_decay: expected a number >= 0, got {self.weight_decay}")

    def describe(self) -> str:
        """Return the optimizer and its numbers as one line, for a run's log."""
        numbers = f"betas {self.beta1:g} and {self.beta2:g}, weight decay {self.weight_decay:g}"
        return f"adamw, learning rate {self.learning_rate:g}, eps {self.eps:g}, {numbers}"

    def build(self, parameters: Mapping[str, nn.Parameter]) -> AdamW:
        """Return the optimizer of `parameters`, by name (`Parallel.dense_parameters`)."""
        weights = [p for p in parameters.values() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in weights if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )


class Schedule:
    """Sets learning rates by step. Stateless: `apply` with the step to resume at is enough."""

    def __init__(
        self, config: ScheduleConfig, total_steps: int, dense: Optimizer, sparse: Optimizer
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self._sparse = sparse
        scaled = [dense, sparse] if config.scale_sparse else [dense]
        groups = cast(list[dict[str, Any]], [g for part in scaled for g in part.param_groups])
        self._groups = [(group, float(group["lr"])) for group in groups]

    def apply(self, step: int) -> float:
        """Set the learning rates of `step` (0 is the first) and return the factor on them."""
        factor = self.config.factor(step, self.total_steps)
        for group, start in self._groups:
            group["lr"] = start * factor
        # A fused optimizer's step changes no weight; it hands the rate to the lookup kernels.
        if self.config.scale_sparse:
            self._sparse.step()
        return factor


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates of an optimizer's groups, for logs."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def optimizer_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Return a dense optimizer's state by parameter name, sharing memory with it.

    A weight that has had no gradient yet has no state. It gets the one that its first step would
    begin with, so that a checkpoint holds, and a fresh run can be filled with, the same tensors at
    any moment.

    torch.distributed.checkpoint's get_optimizer_state_dict is not used. It creates a state by a
    step, so the count of steps, and Adam's bias correction with it, is one too high. Once any
    weight has a state, it also leaves out the weights that have none.

    Args:
        optimizer: any whose state a step with gradients of zero leaves as it begins, but for the
            entry `step`.
        parameters: by name; those that the optimizer does not hold have no state.

    Raises:
        RuntimeError: the optimizer keeps a state that is no tensor, or that such a step changes.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if id(parameter) in groups:
            state = optimizer.state[parameter]
            if not state:
                state.update(_first_state(optimizer, groups[id(parameter)], parameter))
            _check_tensors(optimizer, state)
            found[name] = dict(state)
    return found


def _first_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, Tensor]:
    """Return the state that a weight's first step begins with."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = torch.zeros_like(parameter)
    kind: Any = type(optimizer)
    other = kind([{**group, "params": [twin]}], lr=group["lr"])
    other.step()
    state = dict(other.state[twin])
    _check_tensors(optimizer, state)
    before = {key: value.clone() for key, value in state.items()}
    other.step()
    for key, value in before.items():
        after = other.state[twin][key]
        if key == "step":
            before[key] = torch.zeros_like(value)
        elif not bool(torch.equal(value, after)):
            raise RuntimeError(
                f"checkpoint: {kind.__name__} keeps {key!r}, which a step without a gradient "
                "changes; expected a dense optimizer whose state waits for gradients"
            )
    return before


def _check_tensors(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise RuntimeError(
                f"checkpoint: {type(optimizer).__name__} keeps {key!r} as a "
                f"{type(value).__name__}, expected a tensor, which a checkpoint can hold"
            )

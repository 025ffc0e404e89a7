# SPDX-License-Identifier: MIT
"""Prediction heads: a tower's output to one logit a task (or a class).

Where positives are rare, a bias that starts at 0 predicts one half for every row, and the first
steps push the whole model, tables included, towards the base rate before they tell rows apart.
`prior` starts the bias there instead.

Source: of the prior, Lin et al., Focal Loss for Dense Object Detection, 2017, section 3.3.
Shapes: D input width, K tasks; "..." is any number of leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from models.experts import PLE, Layers, MMoE, ParallelMLP, TaskTowers, chained_logits
from models.layers import MLP, Activation, check_choices, xavier_linear
from models.losses import TaskLoss

HeadKind = Literal["shared_bottom", "mmoe", "ple", "esmm"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What stands between a tower and its logits, and how tasks add up to a loss.

    Args:
        kind: `shared_bottom`: layers that all tasks share. `mmoe`: experts that all share, with a
            gate a task. `ple`: experts of each task beside shared ones, in levels. `esmm`: two
            labels, click and conversion; the second is predicted as the product of click and
            conversion after a click, over all rows.
        hidden_units: widths of the layers before the logits; of an expert's layers (`mmoe`, `ple`);
            of each task's own layers (`esmm`).
        activation: after each of them.
        dropout: probability after each of them.
        prior: share of positives p whose logit the biases start at, one number a task or one for
            all; () starts them at 0.
        num_experts: of `mmoe` in all, of `ple` in each group (one a task and one shared).
        num_levels: levels of `ple`; 1 is CGC.
        task_units: widths of each task's own layers behind the experts (`mmoe`, `ple`).
        task_weights: a factor of each task's loss; () for 1 each.
        uncertainty: learn a factor of each task's loss.
    """

    kind: HeadKind = "shared_bottom"
    hidden_units: tuple[int, ...] = (128,)
    activation: Activation = "relu"
    dropout: float = 0.0
    prior: tuple[float, ...] = ()
    num_experts: int = 4
    num_levels: int = 1
    task_units: tuple[int, ...] = ()
    task_weights: tuple[float, ...] = ()
    uncertainty: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "head")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"head: dropout must be in [0, 1), got {self.dropout}")
        if not all(0 < share < 1 for share in self.prior):
            raise ValueError(
                "head: prior is a share of positives between 0 and 1 (both excluded) for each task "
                f"or for all, got {self.prior}"
            )
        if not all(0 < weight < math.inf for weight in self.task_weights):
            raise ValueError(
                f"head: task_weights must be positive and finite, got {self.task_weights}"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        """Check the settings of experts."""
        mixes = self.kind in ("mmoe", "ple")
        idle = {"num_experts": mixes, "num_levels": self.kind == "ple", "task_units": mixes}
        for name, used in idle.items():
            if not used and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"head: {name} has no effect on kind {self.kind!r}, got {getattr(self, name)}; "
                    "leave it at its default"
                )
        if min(self.num_experts, self.num_levels) < 1:
            raise ValueError(
                "head: num_experts and num_levels must be at least 1, got "
                f"{self.num_experts} and {self.num_levels}"
            )
        if mixes and not self.hidden_units:
            raise ValueError(
                f"head: kind {self.kind!r} needs hidden_units, the widths of an expert's layers, "
                "got ()"
            )

    def build(self, input_dim: int, num_logits: int) -> nn.Module:
        """Return the head from (..., input_dim) to (..., num_logits); of experts from (B, D).

        Raises:
            ValueError: prior has neither one number nor one for each logit, or the labels do not
                fit the kind.
        """
        if len(self.prior) not in (0, 1, num_logits):
            raise ValueError(
                f"head: prior needs one number, or one for each of {num_logits} logits, got "
                f"{self.prior}"
            )
        if self.kind == "shared_bottom":
            return Head(self, input_dim, num_logits)
        if num_logits < 2 or (self.kind == "esmm" and num_logits != 2):
            expected = "two labels, click and conversion" if self.kind == "esmm" else "two or more"
            raise ValueError(
                f"head: kind {self.kind!r} needs {expected}, got {num_logits} label(s); declare "
                "them in the schema, or use kind 'shared_bottom'"
            )
        return (ESMMHead if self.kind == "esmm" else ExpertHead)(self, input_dim, num_logits)

    def build_loss(self, num_tasks: int) -> TaskLoss:
        """Return the loss of `num_tasks` tasks.

        Raises:
            ValueError: there is not one weight for each task.
        """
        if len(self.task_weights) not in (0, num_tasks):
            raise ValueError(
                f"head: task_weights needs one number for each of {num_tasks} labels, got "
                f"{self.task_weights}"
            )
        return TaskLoss(num_tasks, self.task_weights, self.uncertainty)

    def check_classes(self) -> None:
        """Check that the head can predict classes of actions in place of tasks.

        Raises:
            ValueError: it has a setting of tasks.
        """
        default = type(self)
        for name in ("kind", "prior", "task_weights", "uncertainty"):
            if getattr(self, name) != getattr(default, name):
                raise ValueError(
                    f"model.head.{name}: mode 'user_centric' predicts classes of actions, not "
                    f"tasks, got {getattr(self, name)!r}; set it to {getattr(default, name)!r}"
                )

    def start(self, num_tasks: int) -> Sequence[float]:
        """Return the logit of each task's prior, or ()."""
        shares = self.prior * num_tasks if len(self.prior) == 1 else self.prior
        return [math.log(share / (1 - share)) for share in shares]

    @property
    def layers(self) -> Layers:
        """Activation and dropout."""
        return Layers(self.activation, self.dropout)


class Head(nn.Module):
    """MLP and a linear map to the logits: (..., D) to (..., K) logits."""

    def __init__(self, config: HeadConfig, input_dim: int, num_logits: int) -> None:
        super().__init__()
        self.hidden = MLP(input_dim, config.hidden_units, config.activation, config.dropout)
        self.logits = xavier_linear(self.hidden.output_dim, num_logits)
        if config.prior:
            start = torch.tensor(config.prior).logit().expand(num_logits)
            self.logits.bias = nn.Parameter(start.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., K) logits of (..., D)."""
        return self.logits(self.hidden(inputs))


class ExpertHead(nn.Module):
    """MMoE or PLE and each task's own layers: (B, D) to (B, K) logits."""

    def __init__(self, config: HeadConfig, input_dim: int, num_tasks: int) -> None:
        super().__init__()
        units, experts = config.hidden_units, config.num_experts
        if config.kind == "mmoe":
            self.mixture = MMoE(num_tasks, experts, input_dim, units, config.layers)
        else:
            levels = config.num_levels
            self.mixture = PLE(num_tasks, experts, levels, input_dim, units, config.layers)
        width, start = self.mixture.output_dim, config.start(num_tasks)
        self.tasks = TaskTowers(num_tasks, width, config.task_units, config.layers, start)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, K) logits of (B, D)."""
        return self.tasks(self.mixture(inputs))


class ESMMHead(nn.Module):
    """Layers of click and of conversion after it: (B, D) to (B, 2) logits.

    The logits are those of click, and of click and conversion, so the loss is over all rows, and
    none is of clicked rows alone.

    Raises:
        ValueError: the prior of conversion is not below that of click.
    """

    def __init__(self, config: HeadConfig, input_dim: int, num_tasks: int) -> None:
        super().__init__()
        start: Sequence[float] = ()
        if config.prior:
            click, both = (*config.prior, *config.prior)[:2]
            if both >= click:
                raise ValueError(
                    "head: prior of kind 'esmm' is the share of clicks and the smaller share of "
                    f"conversions, both of all rows, got {config.prior}"
                )
            start = [math.log(one / (1 - one)) for one in (click, both / click)]
        self.hidden = ParallelMLP(2, input_dim, config.hidden_units, config.layers)
        self.tasks = TaskTowers(2, self.hidden.output_dim, (), config.layers, start)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, 2) logits of (B, D)."""
        return chained_logits(self.tasks(self.hidden(inputs.expand(2, *inputs.shape))))

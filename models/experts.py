# SPDX-License-Identifier: MIT
"""Heads of several tasks: mixtures of experts, and a conversion that follows a click.

All experts of a layer, and all tasks' own layers, are one parameter and one batched product each.

Source: of MMoE, Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts, KDD 2018, section 4.2; of PLE, Tang et al., Progressive Layered Extraction,
RecSys 2020, section 4 (CGC is its form of one level); of ESMM, Ma et al., Entire Space Multi-Task
Model, SIGIR 2018, section 2.
Shapes: B examples, D input width, E experts, K tasks, H width of an expert, M experts of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import Activation, PerTokenLinear, activate


class Layers(NamedTuple):
    """What layers between the parts of a head have in common.

    Args:
        activation: after each layer.
        dropout: probability after each activation.
    """

    activation: Activation
    dropout: float


class ParallelMLP(nn.Module):
    """E MLPs side by side, (E, B, D) to (E, B, units[-1]); without units the identity.

    Args:
        num: E.
        in_features: D.
        units: widths of the layers.
        layers: activation and dropout.
    """

    def __init__(self, num: int, in_features: int, units: Sequence[int], layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        self.output_dim = units[-1] if units else in_features
        widths = pairwise([in_features, *units])
        self.linears = nn.ModuleList(PerTokenLinear(num, a, b) for a, b in widths)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (E, B, units[-1]) of (E, B, D)."""
        for linear in self.linears:
            inputs = activate(self.layers.activation, linear(inputs))
            if self.layers.dropout:
                inputs = functional.dropout(inputs, self.layers.dropout, self.training)
        return inputs


class TaskTowers(nn.Module):
    """Each task's own layers and its logit: (K, B, D) to (B, K).

    Args:
        num_tasks: K.
        in_features: D.
        units: widths of a task's layers.
        layers: activation and dropout.
        start: logits that the biases start at, one a task; () for 0.
    """

    def __init__(
        self,
        num_tasks: int,
        in_features: int,
        units: Sequence[int],
        layers: Layers,
        start: Sequence[float],
    ) -> None:
        super().__init__()
        self.hidden = ParallelMLP(num_tasks, in_features, units, layers)
        self.logits = PerTokenLinear(num_tasks, self.hidden.output_dim, 1)
        if start:
            self.logits.bias = nn.Parameter(torch.tensor(start)[:, None])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, K) of (K, B, D)."""
        return self.logits(self.hidden(inputs)).squeeze(2).transpose(0, 1)


class MMoE(nn.Module):
    """Experts that all tasks share, mixed by a gate of each task: (B, D) to (K, B, H).

    f^k(x) = sum_i softmax(W_k x)_i f_i(x).

    Args:
        num_tasks: K.
        num_experts: E.
        input_dim: D.
        units: widths of an expert's layers.
        layers: activation and dropout.
    """

    def __init__(
        self, num_tasks: int, num_experts: int, input_dim: int, units: Sequence[int], layers: Layers
    ) -> None:
        super().__init__()
        self.experts = ParallelMLP(num_experts, input_dim, units, layers)
        self.gates = PerTokenLinear(num_tasks, input_dim, num_experts, bias=False)
        self.output_dim = self.experts.output_dim

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (K, B, H) of (B, D)."""
        num_experts, num_tasks = self.gates.weight.shape[2], self.gates.weight.shape[0]
        experts = self.experts(inputs.expand(num_experts, *inputs.shape))  # (E, B, H)
        gates = self.gates(inputs.expand(num_tasks, *inputs.shape))  # (K, B, E)
        return _mix(gates, experts.expand(num_tasks, *experts.shape))


class ExtractionLevel(nn.Module):
    """One level of PLE: a group of M experts for each task, and one that all tasks share.

    A task's gate mixes its own group and the shared one; the shared gate mixes all groups. A gate
    reads what its group reads.

    Args:
        num_tasks: K.
        num_experts: M.
        input_dim: D.
        units: widths of an expert's layers.
        layers: activation and dropout.
        last: whether no level follows, which leaves out the shared gate.
    """

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        input_dim: int,
        units: Sequence[int],
        layers: Layers,
        last: bool,
    ) -> None:
        super().__init__()
        self.num_tasks, self.num_experts, self.last = num_tasks, num_experts, last
        groups = num_tasks + 1
        self.experts = ParallelMLP(groups * num_experts, input_dim, units, layers)
        self.gates = PerTokenLinear(num_tasks, input_dim, 2 * num_experts, bias=False)
        width = groups * num_experts
        self.shared_gate = None if last else PerTokenLinear(1, input_dim, width, bias=False)
        self.output_dim = self.experts.output_dim

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (K + 1, B, H) of (K + 1, B, D), the shared group last; of the last level K."""
        tasks, size = self.num_tasks, self.num_experts
        # (K + 1, B, D) -> ((K + 1) M, B, H)
        found = self.experts(inputs.repeat_interleave(size, 0))
        groups = found.unflatten(0, (tasks + 1, size))  # (K + 1, M, B, H)
        shared = groups[tasks:].expand(tasks, *groups.shape[1:])
        own = _mix(self.gates(inputs[:tasks]), torch.cat([groups[:tasks], shared], 1))
        if self.shared_gate is None:
            return own
        return torch.cat([own, _mix(self.shared_gate(inputs[tasks:]), found[None])])


class PLE(nn.Module):
    """Levels of extraction: (B, D) to (K, B, H).

    Args:
        num_tasks: K.
        num_experts: M, of each group.
        num_levels: how many levels.
        input_dim: D.
        units: widths of an expert's layers.
        layers: activation and dropout.
    """

    def __init__(
        self,
        num_tasks: int,
        num_experts: int,
        num_levels: int,
        input_dim: int,
        units: Sequence[int],
        layers: Layers,
    ) -> None:
        super().__init__()
        self.num_groups = num_tasks + 1
        widths = [input_dim, *[units[-1]] * (num_levels - 1)]
        self.levels = nn.ModuleList(
            ExtractionLevel(num_tasks, num_experts, width, units, layers, k == num_levels - 1)
            for k, width in enumerate(widths)
        )
        self.output_dim = units[-1]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (K, B, H) of (B, D)."""
        groups = inputs.expand(self.num_groups, *inputs.shape)
        for level in self.levels:
            groups = level(groups)
        return groups


def chained_logits(logits: Tensor) -> Tensor:
    """Return (B, 2) logits of click, and of click and conversion, of (B, 2) own logits a, b.

    ESMM's pCTCVR = pCTR pCVR with pCTR = sigmoid(a), pCVR = sigmoid(b). With p the product, its
    logit is log p - log(1 - p), and 1 - p = sigmoid(-a) + sigmoid(a) sigmoid(-b): no term under- or
    overflows.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    click, conversion = logits.unbind(-1)
    clicked = functional.logsigmoid(click)
    both = clicked + functional.logsigmoid(conversion)
    either_not = torch.logaddexp(
        functional.logsigmoid(-click), clicked + functional.logsigmoid(-conversion)
    )
    return torch.stack([click, both - either_not], -1)


def _mix(gates: Tensor, experts: Tensor) -> Tensor:
    """Return (K, B, H), each task's mixture of E experts.

    Args:
        gates: (K, B, E) logits of the weights.
        experts: (K, E, B, H).
    """
    shares = gates.softmax(-1)[:, :, None]  # (K, B, 1, E)
    return (shares.to(experts.dtype) @ experts.transpose(1, 2)).squeeze(2)

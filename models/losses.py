# SPDX-License-Identifier: MIT
"""Losses as local weighted means, and the mapping between binary labels and action classes.

A loss returns its weight sum too: means of ranks (or of micro-batches) combine exactly only by it.
With all weights zero the loss is 0 and so is its gradient, never 0/0. Logits are read in float32.

An action class is a bit pattern: bit k is the k-th label. So a softmax over 2^K classes
(TokenFormer, equation 21) also gives each label's probability.

Shapes: B examples, K tasks, N positions, C = 2^K action classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def weighted_bce(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of binary cross-entropies and the sum of the weights, two scalars.

    Args:
        logits: (B, K).
        labels: (B, K) in {0, 1}.
        weights: (B, K) >= 0; 0 masks an absent label, whatever its value.
    """
    return _weighted_mean(_cross_entropies(logits, labels, weights), weights)


class TaskLoss(nn.Module):
    """The loss of K tasks: the weighted mean of their cross-entropies, with a factor a task.

    With uncertainty, task k has a learnt s_k = log sigma_k^2, and a row's loss is
    exp(-s_k) * entropy + s_k / 2: the likelihood under softmax of scaled logits, in the
    approximation of the source. The loss stays a mean over rows and labels with weight, so parts
    combine by their weights.

    Source: Kendall et al., Multi-Task Learning Using Uncertainty to Weigh Losses, CVPR 2018,
    section 3.2.

    Args:
        num_tasks: K.
        task_weights: one factor a task; () for 1. The mean is over the rows' weights alone.
        uncertainty: learn s, which starts at 0.
    """

    factors: Tensor | None

    def __init__(
        self, num_tasks: int, task_weights: Sequence[float] = (), uncertainty: bool = False
    ) -> None:
        super().__init__()
        factors = torch.tensor(task_weights) if task_weights else None
        self.register_buffer("factors", factors, persistent=False)
        self.log_variance = nn.Parameter(torch.zeros(num_tasks)) if uncertainty else None

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the sum of the weights, two scalars; arguments of `weighted_bce`."""
        if self.factors is None and self.log_variance is None:
            return weighted_bce(logits, labels, weights)
        losses = _cross_entropies(logits, labels, weights)
        if self.log_variance is not None:
            spread = self.log_variance.float()
            losses = losses * torch.exp(-spread) + spread / 2
        if self.factors is not None:
            losses = losses * self.factors
        return _weighted_mean(losses, weights)


def action_cross_entropy(logits: Tensor, actions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of softmax cross-entropies and the sum of the weights, two scalars.

    Equation 21.

    Args:
        logits: (N, C); N may be 0.
        actions: (N,) int64 classes.
        weights: (N,) >= 0.
    """
    losses = functional.cross_entropy(logits.float(), actions, reduction="none")
    return _weighted_mean(losses, weights)


def action_classes(labels: Tensor) -> Tensor:
    """Return (...,) int64 classes of (..., K) binary labels: bit k is label k."""
    bits = 2 ** torch.arange(labels.shape[-1], device=labels.device)
    return ((labels > 0.5) * bits).sum(-1)


def task_logits(class_logits: Tensor, num_tasks: int) -> Tensor:
    """Return (..., K) logits whose sigmoid is each label's probability under (..., 2^K) class

    logits.

    The probability of label k is the sum over the classes with bit k; its logit is the difference
    of two log-sum-exps, which neither under- nor overflows.

    Raises:
        ValueError: the number of classes is not 2^K.
    """
    num_classes = class_logits.shape[-1]
    if num_classes != 2**num_tasks:
        raise ValueError(
            f"losses: {num_tasks} binary tasks make {2**num_tasks} classes, got {num_classes}"
        )
    classes = torch.arange(num_classes, device=class_logits.device)
    # (K, C): whether class c has bit k
    bits = (classes >> torch.arange(num_tasks, device=classes.device)[:, None]) & 1 == 1
    spread = class_logits.float()[..., None, :]  # (..., 1, C)
    positive = spread.masked_fill(~bits, -torch.inf).logsumexp(-1)
    negative = spread.masked_fill(bits, -torch.inf).logsumexp(-1)
    return positive - negative


def _cross_entropies(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return (B, K) binary cross-entropies; where the weight is 0 the label is not read."""
    return functional.binary_cross_entropy_with_logits(
        logits.float(), torch.where(weights > 0, labels, 0.0), reduction="none"
    )


def _weighted_mean(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    weights = weights.float()
    total = weights.sum()
    # Where the weight is 0 the loss must not enter at all: 0 * inf is NaN.
    weighted = torch.where(weights > 0, losses, 0.0) * weights
    return weighted.sum() / torch.where(total > 0, total, 1.0), total

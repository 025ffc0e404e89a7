# SPDX-License-Identifier: MIT
"""Losses as local weighted means, and the mapping between binary labels and action classes.

A loss returns its weight sum too: means of ranks (or of micro-batches) combine exactly only by it.
With all weights zero the loss is 0 and so is its gradient, never 0/0. Logits are read in float32.

An action class is a bit pattern: bit k is the k-th label. So a softmax over 2^K classes
(TokenFormer, equation 21) also gives each label's probability.

Shapes: B examples, K tasks, N positions, C = 2^K action classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def weighted_bce(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of binary cross-entropies and the sum of the weights, two scalars.

    Args:
        logits: (B, K).
        labels: (B, K) in {0, 1}.
        weights: (B, K) >= 0; 0 masks an absent label, whatever its value.
    """
    losses = functional.binary_cross_entropy_with_logits(
        logits.float(), torch.where(weights > 0, labels, 0.0), reduction="none"
    )
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


def _weighted_mean(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    weights = weights.float()
    total = weights.sum()
    # Where the weight is 0 the loss must not enter at all: 0 * inf is NaN.
    weighted = torch.where(weights > 0, losses, 0.0) * weights
    return weighted.sum() / torch.where(total > 0, total, 1.0), total

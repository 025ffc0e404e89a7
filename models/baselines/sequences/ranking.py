# SPDX-License-Identifier: MIT
"""What a model of sequences becomes as a ranking tower: its state meets the target and the fields.

Papers of sequential recommendation score an item by the product of a state and the item's vector.
As a ranking tower such a model returns `[fields, state, target, state ⊙ target]`: the sum of the
last part is that score, and the head's linear map can read it alone.

Shapes: B examples, F fields, V targets, D token width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def width(num_fields: int, token_dim: int) -> int:
    """Return the width of what `meet` returns."""
    return (num_fields + 3) * token_dim


def meet(fields: Tensor, state: Tensor, targets: Tensor) -> Tensor:
    """Return (B, V, (F + 3)·D) of fields (B, F, D), a state (B, D) and targets (B, V, D)."""
    num_targets = targets.shape[1]
    context = fields.flatten(1)[:, None].expand(-1, num_targets, -1)
    states = state[:, None].expand(-1, num_targets, -1).to(targets.dtype)
    return torch.cat([context, states, targets, states * targets], dim=-1)

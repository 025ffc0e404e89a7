# SPDX-License-Identifier: MIT
"""DeepFM: a factorization machine and a deep network that read the same vectors.

Source: Guo et al., DeepFM, IJCAI 2017, equations 1-4:

    ŷ = σ(y_FM + y_DNN),   y_FM = ⟨w, x⟩ + Σ_{i<j} ⟨V_i, V_j⟩ x_i x_j,   y_DNN = Wᴴ a^(H) + b.

The tower returns [y_FM, a^(H)]; the head without hidden layers is Wᴴ and b. Where w and V lie is
said in `first_order.py`; the head's factor on y_FM is one number more than the paper has. Left
open: initial values (Xavier here).

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.baselines.fields.first_order import check_width, pairs, split
from models.layers import MLP, read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class DeepFMConfig(TowerConfig):
    """DeepFM's settings.

    Args:
        hidden_units: widths of the deep network.
        dropout: probability, in the deep network.
    """

    hidden_units: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.hidden_units:
            raise ValueError(
                "deepfm: hidden_units needs at least one width, got (); without a deep network it "
                "is the tower 'fm'"
            )

    def build(self, num_tokens: int, token_dim: int) -> DeepFM:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return DeepFM(self, num_tokens, token_dim)


class DeepFM(Tower):
    """A factorization machine and a deep network: (B, T, D) to (B, 1 + hidden_units[-1])."""

    def __init__(self, config: DeepFMConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        check_width(token_dim, "deepfm")
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.deep = MLP(num_tokens * (token_dim - 1), config.hidden_units, dropout=config.dropout)
        self.output_dim = 1 + self.deep.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "deepfm")
        first, vectors = split(tokens_BTD)
        machine = first + pairs(vectors)
        deep = self.deep(vectors.flatten(1))
        return torch.cat([machine, deep.to(machine.dtype)], dim=1)

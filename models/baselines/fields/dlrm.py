# SPDX-License-Identifier: MIT
"""DLRM over tokens: pairwise dot products and the tokens themselves into a top MLP.

The plain baseline: no attention, no per-token weights. Field embeddings and dense features have
become tokens before this, which stands in for DLRM's bottom MLP.

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers import MLP, read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(TowerConfig):
    """DLRM's settings.

    Args:
        hidden_units: widths of the top MLP; the last one is the tower's output.
        dropout: probability.
    """

    hidden_units: tuple[int, ...] = (512, 256)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.hidden_units:
            raise ValueError("dlrm: hidden_units needs at least one width, got ()")

    def build(self, num_tokens: int, token_dim: int) -> DLRM:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return DLRM(self, num_tokens, token_dim)


class DLRM(Tower):
    """Dot-product interactions and a top MLP: (B, T, D) to (B, hidden_units[-1])."""

    pairs: Tensor

    def __init__(self, config: DLRMConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        rows, columns = torch.triu_indices(num_tokens, num_tokens, offset=1).unbind()
        self.register_buffer("pairs", rows * num_tokens + columns, persistent=False)
        in_features = len(rows) + num_tokens * token_dim
        self.top = MLP(in_features, config.hidden_units, dropout=config.dropout)
        self.output_dim = self.top.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "dlrm")
        # (B, T·T) -> (B, T (T - 1) / 2): each pair once
        products = (tokens_BTD @ tokens_BTD.mT).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([tokens_BTD.flatten(1).to(products.dtype), products], dim=1))

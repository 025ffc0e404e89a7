# SPDX-License-Identifier: MIT
"""DCN: crosses of all features by vectors of weights, beside a deep network.

Source: Wang et al., Deep & Cross Network, ADKDD 2017, equations 3 and 5:

    x_{l+1} = x_0 (x_lᵀ w_l) + b_l + x_l.

The tower returns both outputs beside each other; the head without hidden layers is equation 5's
combination. DCNv2 has matrices in place of the vectors w_l. Left open: dropout (after each layer of
the deep network here). The paper's batch norms in the deep network are left out.

Shapes: B examples, T tokens, D token width, N = T·D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.layers import MLP, read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class DCNConfig(TowerConfig):
    """DCN's settings.

    Args:
        num_cross_layers: cross layers, at least 1.
        hidden_units: widths of the deep network.
        dropout: probability, in the deep network.
    """

    num_cross_layers: int = 3
    hidden_units: tuple[int, ...] = (512, 256)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.num_cross_layers < 1 or not self.hidden_units:
            raise ValueError(
                "dcn: num_cross_layers must be at least 1 and hidden_units not empty; got "
                f"{self.num_cross_layers} and {self.hidden_units}"
            )

    def build(self, num_tokens: int, token_dim: int) -> DCN:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return DCN(self, num_tokens, token_dim)


class DCN(Tower):
    """Cross layers beside a deep network: (B, T, D) to (B, N + hidden_units[-1])."""

    def __init__(self, config: DCNConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        width = num_tokens * token_dim
        start = torch.randn(config.num_cross_layers, width) * (2 / (width + 1)) ** 0.5
        self.weight = nn.Parameter(start)
        self.bias = nn.Parameter(torch.zeros(config.num_cross_layers, width))
        self.deep = MLP(width, config.hidden_units, dropout=config.dropout)
        self.output_dim = width + self.deep.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "dcn")
        first_BN = crossed_BN = tokens_BTD.flatten(1)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            scale = (crossed_BN * weight).sum(1, keepdim=True)  # (B, 1)
            crossed_BN = first_BN * scale + bias + crossed_BN
        deep = self.deep(first_BN)
        return torch.cat([crossed_BN, deep.to(crossed_BN.dtype)], dim=1)

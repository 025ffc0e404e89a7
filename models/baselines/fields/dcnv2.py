# SPDX-License-Identifier: MIT
"""DCNv2: explicit crosses of all features, beside or below a deep network.

Source: Wang et al., DCN V2, WWW 2021, equations 1 (a cross layer), 2 (its low-rank form) and 3-4
(a mixture of low-rank experts, which is not built here). A cross layer multiplies the input x_0
with a linear map of the layer before:

    x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l,    W_l = U_l V_lᵀ in the low-rank form.

Left open by the paper: initial values (Xavier here) and dropout (after each layer of the deep
network here).

Shapes: B examples, T tokens, D token width, N = T·D, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from models.layers import MLP, check_choices, read_tokens, xavier_linear
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(TowerConfig):
    """DCNv2's settings.

    Args:
        num_cross_layers: cross layers, at least 1.
        rank: R of the low-rank form, `0` for full matrices.
        structure: `parallel` concatenates crosses and deep network, `stacked` feeds the crosses
            into the deep network, `crossnet` has no deep network.
        hidden_units: widths of the deep network.
        dropout: probability, in the deep network.
    """

    num_cross_layers: int = 3
    rank: int = 0
    structure: Literal["parallel", "stacked", "crossnet"] = "parallel"
    hidden_units: tuple[int, ...] = (512, 256)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "dcnv2")
        if self.num_cross_layers < 1 or self.rank < 0:
            raise ValueError(
                "dcnv2: num_cross_layers must be at least 1 and rank at least 0; got "
                f"{self.num_cross_layers} and {self.rank}"
            )
        if not self.hidden_units and self.structure != "crossnet":
            raise ValueError(
                f"dcnv2: structure {self.structure!r} needs hidden_units, got (); "
                "crosses alone are structure 'crossnet'"
            )

    def build(self, num_tokens: int, token_dim: int) -> DCNv2:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return DCNv2(self, num_tokens, token_dim)


class DCNv2(Tower):
    """Cross layers and a deep network: (B, T, D) to (B, output_dim)."""

    def __init__(self, config: DCNv2Config, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.structure = config.structure
        self.num_tokens, self.token_dim = num_tokens, token_dim
        width = num_tokens * token_dim
        self.crosses = nn.ModuleList(
            _cross(width, config.rank) for _ in range(config.num_cross_layers)
        )
        self.deep = None
        self.output_dim = width
        if config.structure != "crossnet":
            self.deep = MLP(width, config.hidden_units, dropout=config.dropout)
            beside = width if config.structure == "parallel" else 0
            self.output_dim = self.deep.output_dim + beside

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "dcnv2")
        first_BN = crossed_BN = tokens_BTD.flatten(1)
        for cross in self.crosses:
            crossed_BN = torch.addcmul(crossed_BN, first_BN, cross(crossed_BN).to(first_BN.dtype))
        if self.deep is None:
            return crossed_BN
        if self.structure == "stacked":
            return self.deep(crossed_BN)
        deep = self.deep(first_BN)
        return torch.cat([crossed_BN.to(deep.dtype), deep], dim=1)


def _cross(width: int, rank: int) -> nn.Module:
    """Return the linear map of a cross layer, (B, N) to (B, N)."""
    if not rank:
        return xavier_linear(width, width)
    return nn.Sequential(xavier_linear(width, rank, bias=False), xavier_linear(rank, width))

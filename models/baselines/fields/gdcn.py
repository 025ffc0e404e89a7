# SPDX-License-Identifier: MIT
"""GDCN: crosses of features whose importance a gate learns, beside or below a deep network.

Source: Wang et al., Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction,
CIKM 2023, equation 2 (a gated cross layer); GDCN-P puts the deep network beside the crosses,
GDCN-S above them:

    c_{l+1} = c_0 ⊙ (W_c c_l + b) ⊙ σ(W_g c_l) + c_l.

Left open by the paper: initial values (Xavier here, zero bias).

Shapes: B examples, T tokens, D token width, N = T·D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from models.layers import MLP, check_choices, read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class GDCNConfig(TowerConfig):
    """GDCN's settings.

    Args:
        num_cross_layers: gated cross layers, at least 1.
        structure: `parallel` is GDCN-P, `stacked` is GDCN-S.
        hidden_units: widths of the deep network.
        dropout: probability, in the deep network.
    """

    num_cross_layers: int = 3
    structure: Literal["parallel", "stacked"] = "parallel"
    hidden_units: tuple[int, ...] = (512, 256)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "gdcn")
        if self.num_cross_layers < 1 or not self.hidden_units:
            raise ValueError(
                "gdcn: num_cross_layers must be at least 1 and hidden_units not empty; got "
                f"{self.num_cross_layers} and {self.hidden_units}"
            )

    def build(self, num_tokens: int, token_dim: int) -> GDCN:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return GDCN(self, num_tokens, token_dim)


class GDCN(Tower):
    """Gated cross layers and a deep network: (B, T, D) to (B, output_dim)."""

    def __init__(self, config: GDCNConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.structure = config.structure
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.width = num_tokens * token_dim
        # [W_c; W_g] of each layer is one product: N to 2N.
        self.maps = nn.ModuleList(_two_maps(self.width) for _ in range(config.num_cross_layers))
        self.bias = nn.Parameter(torch.zeros(config.num_cross_layers, self.width))
        self.deep = MLP(self.width, config.hidden_units, dropout=config.dropout)
        beside = self.width if config.structure == "parallel" else 0
        self.output_dim = self.deep.output_dim + beside

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "gdcn")
        first_BN = crossed_BN = tokens_BTD.flatten(1)
        for map_, bias in zip(self.maps, self.bias, strict=True):
            cross_BN, gate_BN = map_(crossed_BN).to(first_BN.dtype).split(self.width, dim=1)
            gated_BN = (cross_BN + bias) * torch.sigmoid(gate_BN)
            crossed_BN = torch.addcmul(crossed_BN, first_BN, gated_BN)
        if self.structure == "stacked":
            return self.deep(crossed_BN)
        deep = self.deep(first_BN)
        return torch.cat([crossed_BN.to(deep.dtype), deep], dim=1)


def _two_maps(width: int) -> nn.Linear:
    """Return W_c above W_g, each Xavier-normal as a map of its own."""
    linear = nn.Linear(width, 2 * width, bias=False)
    nn.init.normal_(linear.weight, std=width**-0.5)  # Xavier of (N, N): sqrt(2 / 2N)
    return linear

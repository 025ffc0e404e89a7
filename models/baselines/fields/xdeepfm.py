# SPDX-License-Identifier: MIT
"""xDeepFM: a linear part, a compressed interaction network (CIN) and a deep network.

Source: Lian et al., xDeepFM, KDD 2018, equations 6-9. The k-th layer of the CIN has H_k vectors

    X^k_h = Σ_{i,j} W^{k,h}_{ij} (X^{k-1}_i ⊙ X^0_j),   p^k_h = Σ_d X^k_{h,d},

and all p^k_h of all layers are its output. The tower returns [Σ_f w_f, p, a^(H)]; the head without
hidden layers maps them to the logits. Where w_f lies is said in `first_order.py`; the head's factor
on its sum is one number more than the paper has.

The paper's layers have no activation in its best setting, which this is, and no bias; public
implementations add one (`bias`). Left open: initial values (Xavier here).

Shapes: B examples, T tokens, D width of a vector, H vectors of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from models.baselines.fields.first_order import check_width, split
from models.layers import MLP, read_tokens, xavier_linear
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class XDeepFMConfig(TowerConfig):
    """xDeepFM's settings.

    Args:
        cin_units: H_k, vectors of each layer of the CIN.
        bias: whether a CIN layer adds a number to each of its vectors; the paper's does not.
        hidden_units: widths of the deep network.
        dropout: probability, in the deep network.
    """

    cin_units: tuple[int, ...] = (32, 32)
    bias: bool = False
    hidden_units: tuple[int, ...] = (400, 400)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.cin_units or min(self.cin_units) < 1 or not self.hidden_units:
            raise ValueError(
                "xdeepfm: cin_units needs at least one positive width and hidden_units must not be "
                f"empty; got {self.cin_units} and {self.hidden_units}"
            )

    def build(self, num_tokens: int, token_dim: int) -> XDeepFM:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return XDeepFM(self, num_tokens, token_dim)


class XDeepFM(Tower):
    """Linear part, CIN and deep network: (B, T, D) to (B, 1 + ΣH_k + hidden_units[-1])."""

    def __init__(self, config: XDeepFMConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        check_width(token_dim, "xdeepfm")
        self.num_tokens, self.token_dim = num_tokens, token_dim
        widths = [num_tokens, *config.cin_units]
        self.cin = nn.ModuleList(
            xavier_linear(before * num_tokens, width, config.bias)
            for before, width in pairwise(widths)
        )
        self.deep = MLP(num_tokens * (token_dim - 1), config.hidden_units, dropout=config.dropout)
        self.output_dim = 1 + sum(config.cin_units) + self.deep.output_dim

    def fsdp_units(self) -> list[nn.Module]:
        """Return none: layers of the CIN are small."""
        return []

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "xdeepfm")
        linear, vectors = split(tokens_BTD)
        zero_BDT = vectors.mT
        layer_BDH, sums = zero_BDT, [linear]
        for compress in self.cin:
            # (B, D, H, T) -> (B, D, H·T) -> (B, D, H')
            layer_BDH = compress((layer_BDH[..., None] * zero_BDT[..., None, :]).flatten(2))
            sums.append(layer_BDH.sum(1))
        sums.append(self.deep(vectors.flatten(1)))
        return torch.cat([part.to(linear.dtype) for part in sums], dim=1)

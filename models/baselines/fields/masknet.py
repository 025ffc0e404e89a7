# SPDX-License-Identifier: MIT
"""MaskNet: products of features with a mask that the example itself gives.

Source: Wang, She, Zhang, MaskNet, DLP-KDD 2021, equations 5-9. The instance-guided mask of the
embeddings V and a mask block on V, or on a hidden layer h, are

    mask(V) = W_2 ReLU(W_1 V + b_1) + b_2,
    block_V = ReLU(LN(W (mask(V) ⊙ LN_EMB(V)))),   block_h = ReLU(LN(W (mask(V) ⊙ h))),

where LN_EMB normalises every field by itself. `serial` puts blocks on top of one another, each
with a mask of V; `parallel` puts all on V, side by side, and a deep network above them.

Left open by the paper: initial values (Xavier here), epsilon of the norms (1e-5 here).

Shapes: B examples, T tokens, D token width, N = T·D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import MLP, LayerNorm, check_choices, read_tokens, xavier_linear
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class MaskNetConfig(TowerConfig):
    """MaskNet's settings.

    Args:
        structure: `serial` or `parallel`.
        block_units: width of each mask block, one entry a block.
        reduction: width of a mask's hidden layer over the width of its output (the paper's r).
        hidden_units: widths of the deep network above parallel blocks; `serial` has none.
        dropout: probability, after each block and layer.
    """

    structure: Literal["serial", "parallel"] = "serial"
    block_units: tuple[int, ...] = (256, 256)
    reduction: float = 1.0
    hidden_units: tuple[int, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "masknet")
        if not self.block_units or min(self.block_units) < 1 or self.reduction <= 0:
            raise ValueError(
                "masknet: block_units needs at least one positive width and reduction must be "
                f"above 0; got {self.block_units} and {self.reduction}"
            )
        if self.hidden_units and self.structure == "serial":
            raise ValueError(
                f"masknet: hidden_units {self.hidden_units} have no effect on structure 'serial'; "
                "leave them out or choose 'parallel'"
            )

    def build(self, num_tokens: int, token_dim: int) -> MaskNet:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return MaskNet(self, num_tokens, token_dim)


class MaskNet(Tower):
    """Mask blocks on top of one another or side by side: (B, T, D) to (B, output_dim)."""

    def __init__(self, config: MaskNetConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.serial, self.dropout = config.structure == "serial", config.dropout
        width = num_tokens * token_dim
        self.norm = LayerNorm(token_dim)  # of each field, gains shared by fields
        inputs = (
            (width, *config.block_units[:-1]) if self.serial else (width,) * len(config.block_units)
        )
        self.blocks = nn.ModuleList(
            MaskBlock(width, before, after, config.reduction)
            for before, after in zip(inputs, config.block_units, strict=True)
        )
        self.deep = None
        self.output_dim = config.block_units[-1] if self.serial else sum(config.block_units)
        if config.hidden_units:
            self.deep = MLP(self.output_dim, config.hidden_units, dropout=config.dropout)
            self.output_dim = self.deep.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "masknet")
        embedding_BN = tokens_BTD.flatten(1)
        normed_BN = self.norm(tokens_BTD).flatten(1)
        if self.serial:
            hidden = normed_BN
            for block in self.blocks:
                hidden = self._dropped(block(embedding_BN, hidden))
            return hidden
        beside = torch.cat([block(embedding_BN, normed_BN) for block in self.blocks], dim=1)
        beside = self._dropped(beside)
        return beside if self.deep is None else self.deep(beside)

    def _dropped(self, hidden: Tensor) -> Tensor:
        return functional.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class MaskBlock(nn.Module):
    """`ReLU(LN(W (mask(V) ⊙ x)))`: V (B, N) and x (B, before) to (B, after)."""

    def __init__(self, width: int, before: int, after: int, reduction: float) -> None:
        super().__init__()
        hidden = max(1, int(before * reduction))
        self.mask = nn.Sequential(
            xavier_linear(width, hidden), nn.ReLU(), xavier_linear(hidden, before)
        )
        self.linear = xavier_linear(before, after, bias=False)  # the norm that follows has a bias
        self.norm = LayerNorm(after)

    def forward(self, embedding_BN: Tensor, inputs: Tensor) -> Tensor:
        """Return (B, after) of (B, N) and (B, before)."""
        return functional.relu(self.norm(self.linear(self.mask(embedding_BN) * inputs)))

# SPDX-License-Identifier: MIT
"""AutoInt: multi-head attention over fields, layer on layer, makes the feature interactions.

Source: Song et al., AutoInt, CIKM 2019, equations 5-8. With H heads of width A, for field m:

    α_mk = softmax_k((W_q e_m)·(W_k e_k)),   ẽ_m = concat_h Σ_k α_mk W_v e_k,
    e'_m = ReLU(ẽ_m + W_res e_m).

The paper's logits are not scaled; `scale` divides them by sqrt(A). The output is the concatenation
of all fields. AutoInt+ (a deep network beside) is `hidden_units`.

Left open by the paper: initial values (Xavier here).

Shapes: B examples, T tokens, D width of a layer's input, H heads, A width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention.attention import attention
from models.layers import MLP, read_tokens, xavier_linear
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class AutoIntConfig(TowerConfig):
    """AutoInt's settings.

    Args:
        num_layers: attention layers, at least 1.
        num_heads: H, at least 1.
        head_dim: A, at least 1; a layer's output has width H·A.
        scale: whether logits are divided by sqrt(A); the paper does not.
        hidden_units: widths of the deep network of AutoInt+, none for AutoInt.
        dropout: probability, in the deep network.
    """

    num_layers: int = 3
    num_heads: int = 2
    head_dim: int = 16
    scale: bool = False
    hidden_units: tuple[int, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if min(self.num_layers, self.num_heads, self.head_dim) < 1:
            raise ValueError(
                "autoint: num_layers, num_heads and head_dim must be at least 1; got "
                f"{self.num_layers}, {self.num_heads} and {self.head_dim}"
            )

    def build(self, num_tokens: int, token_dim: int) -> AutoInt:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return AutoInt(self, num_tokens, token_dim)


class AutoInt(Tower):
    """Attention over fields, and a deep network beside: (B, T, D) to (B, output_dim)."""

    def __init__(self, config: AutoIntConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        width = config.num_heads * config.head_dim
        scale = config.head_dim**-0.5 if config.scale else 1.0
        self.layers = nn.ModuleList(
            InteractingLayer(width if layer else token_dim, config.num_heads, width, scale)
            for layer in range(config.num_layers)
        )
        self.deep = None
        self.output_dim = num_tokens * width
        if config.hidden_units:
            self.deep = MLP(num_tokens * token_dim, config.hidden_units, dropout=config.dropout)
            self.output_dim += self.deep.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "autoint")
        mixed = tokens_BTD
        for layer in self.layers:
            mixed = layer(mixed)
        if self.deep is None:
            return mixed.flatten(1)
        deep = self.deep(tokens_BTD.flatten(1))
        return torch.cat([mixed.flatten(1).to(deep.dtype), deep], dim=1)


class InteractingLayer(nn.Module):
    """One layer of equations 5-8: (B, T, D) to (B, T, H·A)."""

    def __init__(self, dim: int, num_heads: int, width: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.query, self.key, self.value, self.residual = (
            xavier_linear(dim, width, bias=False) for _ in range(4)
        )

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, H·A) of (B, T, D)."""
        query, key, value = (
            # (B, T, H·A) -> (B, H, T, A)
            map_(tokens_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for map_ in (self.query, self.key, self.value)
        )
        heads_BHTA = attention(query, key, value, scale=self.scale)
        mixed = heads_BHTA.transpose(1, 2).flatten(2)  # (B, T, H·A)
        return functional.relu(mixed + self.residual(tokens_BTD))

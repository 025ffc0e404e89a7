# SPDX-License-Identifier: MIT
"""WuKong: stacked factorization machines, so that layer i reaches interactions of order 2^i.

Source: Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation, ICML 2024,
section 3 (layer, FMB, LCB, the optimized FM). With X (n, D) the embeddings that enter a layer,

    FM(X)   = X (Xᵀ Y),  Y (n, k) learned,            the optimized form of X Xᵀ Y
    FMB(X)  = reshape(MLP(LN(flatten(FM(X))))),       n_F embeddings
    LCB(X)  = W_L X,                                  n_L embeddings
    X'      = LN(concat(FMB(X), LCB(X)) + residual(X)),

where the residual is X, or a learned map (n' , n) of it where the number of embeddings changes.
The attentive form of Y (computed from X) is not built here. The output is all embeddings of the
last layer; the paper's final MLP is the head.

Left open by the paper: initial values (Xavier here), the MLP's activation (ReLU here), epsilon of
the norms (1e-5 here).

Shapes: B examples, T tokens, D token width, n embeddings of a layer, k columns of Y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.layers import MLP, LayerNorm, read_tokens, xavier_linear
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class WuKongConfig(TowerConfig):
    """WuKong's settings.

    Args:
        num_layers: layers, at least 1.
        num_fm: n_F, embeddings that the factorization machine block makes.
        num_linear: n_L, embeddings that the linear compression block makes.
        rank: k, columns of Y.
        hidden_units: hidden widths of the factorization machine block's MLP.
        dropout: probability, in that MLP.
    """

    num_layers: int = 2
    num_fm: int = 8
    num_linear: int = 8
    rank: int = 8
    hidden_units: tuple[int, ...] = (256,)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        sizes = (self.num_layers, self.num_fm, self.num_linear, self.rank)
        if min(sizes) < 1:
            raise ValueError(
                "wukong: num_layers, num_fm, num_linear and rank must be at least 1; got "
                + ", ".join(map(str, sizes))
            )

    def build(self, num_tokens: int, token_dim: int) -> WuKong:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return WuKong(self, num_tokens, token_dim)


class WuKong(Tower):
    """Stacked factorization machines: (B, T, D) to (B, (n_F + n_L)·D)."""

    def __init__(self, config: WuKongConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        made = config.num_fm + config.num_linear
        self.layers = nn.ModuleList(
            WuKongLayer(config, made if layer else num_tokens, token_dim)
            for layer in range(config.num_layers)
        )
        self.output_dim = made * token_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        hidden = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "wukong")
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.flatten(1)


class WuKongLayer(nn.Module):
    """One layer: (B, n, D) to (B, n_F + n_L, D)."""

    def __init__(self, config: WuKongConfig, before: int, dim: int) -> None:
        super().__init__()
        after = config.num_fm + config.num_linear
        self.dim = dim
        self.columns = nn.Parameter(torch.empty(before, config.rank))  # Y (n, k)
        nn.init.xavier_normal_(self.columns)
        self.fm_norm = LayerNorm(before * config.rank)
        self.fm_hidden = MLP(before * config.rank, config.hidden_units, dropout=config.dropout)
        self.fm_output = xavier_linear(self.fm_hidden.output_dim, config.num_fm * dim)
        self.linear = _map_of_embeddings(config.num_linear, before)
        self.residual = _map_of_embeddings(after, before) if after != before else None
        self.norm = LayerNorm(dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (B, n_F + n_L, D) of (B, n, D)."""
        # X (Xᵀ Y): (B, D, n) @ (n, k) -> (B, D, k), then (B, n, D) @ (B, D, k) -> (B, n, k)
        machines = inputs @ (inputs.mT @ self.columns)
        made = self.fm_output(self.fm_hidden(self.fm_norm(machines.flatten(1))))
        made = made.unflatten(1, (-1, self.dim))  # (B, n_F, D)
        compressed = self.linear @ inputs  # (n_L, n) @ (B, n, D) -> (B, n_L, D)
        kept = inputs if self.residual is None else self.residual @ inputs
        return self.norm(torch.cat([made, compressed.to(made.dtype)], dim=1) + kept)


def _map_of_embeddings(after: int, before: int) -> nn.Parameter:
    """Return a learned (after, before) map of embeddings, Xavier-normal."""
    return nn.Parameter(nn.init.xavier_normal_(torch.empty(after, before)))

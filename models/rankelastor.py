# SPDX-License-Identifier: MIT
"""RankElastor: full token mixing and gated per-token feed-forwards (equations 3 and 4).

A block mixes all T·D coordinates by one learned matrix, `vec(M) = LN((W + I) vec(X))`, then gates:
`Z_t = (GELU(M_t W1_t) ⊙ M_t W2_t) W3_t + M_t Wr_t`. RankMixer's parameter-free mixing is the
special case in which W is a commutation matrix.

The authors' released code is another model, so both are here. `paper` is the equations. `code` is
the release: RMSNorm over all T·D coordinates before the mixing and over each token after it,
biases, an extra branch in the gate, a stack of gated units a token, and a residual around them.

The mixing matrix has (T·D)² entries. `mixing_block` mixes blocks of d coordinates, W ⊗ I_d;
`mixing_rank` factors W.

Shapes: B examples, T tokens, D token width, r expansion of the gated units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import PerTokenGLU, PerTokenLinear, check_choices

MixingInit = Literal["xavier", "zero", "commutation"]

# The release's epsilon; the paper's LayerNorm has none and takes the usual one.
_RMS_EPS = 1e-12
_LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class RankElastorConfig:
    """RankElastor's settings.

    variant: `paper` (the equations) or `code` (the authors' release). depth: blocks.
    expansion: r, the gated units' hidden width over their input width.
    hidden_units: `code` only, the widths of each token's stack of gated units; () is one of width
    D. pooling: `mean` over tokens, or `flatten` to T·D (the release, before its prediction MLP).
    mixing_init: `xavier`; `zero`, which starts from no mixing; `commutation`, which starts from
      RankMixer's (needs T to divide D).
    mixing_block: d in W ⊗ I_d; 1 mixes every coordinate. mixing_rank: rank of W's factors, 0 for
    full.
    """

    variant: Literal["paper", "code"] = "paper"
    depth: int = 2
    expansion: float = 3.0
    hidden_units: tuple[int, ...] = ()
    pooling: Literal["mean", "flatten"] = "mean"
    mixing_init: MixingInit = "xavier"
    mixing_block: int = 1
    mixing_rank: int = 0

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        check_choices(self, "rankelastor")
        if self.depth < 1:
            raise ValueError(f"rankelastor: depth must be at least 1, got {self.depth}")
        if self.hidden_units and self.variant == "paper":
            raise ValueError(
                "rankelastor: hidden_units is read by variant='code' only (the paper has one gated "
                f"unit of width D), got {self.hidden_units}; use expansion to widen the paper's"
            )
        if self.mixing_rank and self.mixing_init == "commutation":
            raise ValueError(
                "rankelastor: mixing_init='commutation' has full rank and cannot be factored, got "
                f"mixing_rank={self.mixing_rank}; use mixing_rank=0"
            )

    def build(self, num_tokens: int, token_dim: int) -> RankElastor:
        """Return the tower for (B, num_tokens, token_dim) tokens.

        Raises ValueError if mixing_block or a commutation start does not fit these sizes.
        """
        if token_dim % self.mixing_block:
            raise ValueError(
                "rankelastor: mixing_block must divide the token width, got "
                f"{self.mixing_block} and {token_dim}"
            )
        if self.mixing_init == "commutation" and token_dim % (num_tokens * self.mixing_block):
            raise ValueError(
                "rankelastor: mixing_init='commutation' needs num_tokens * mixing_block to divide "
                f"the token width, got {num_tokens} * {self.mixing_block} and {token_dim}; use "
                "mixing_init='xavier'"
            )
        return RankElastor(self, num_tokens, token_dim)


class RankElastor(nn.Module):
    """RankElastor blocks and pooling: (B, T, D) to (B, D) or (B, T·D)."""

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.output_dim = token_dim * (num_tokens if config.pooling == "flatten" else 1)
        block = PaperBlock if config.variant == "paper" else ReleasedBlock
        self.blocks = nn.ModuleList(
            block(config, num_tokens, token_dim) for _ in range(config.depth)
        )

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD)
        return tokens_BTD.mean(dim=1) if self.pooling == "mean" else tokens_BTD.flatten(1)


class PaperBlock(nn.Module):
    """Equations 3 and 4: (B, T, D) to (B, T, D)."""

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.mixing = ResidualMixing(config, num_tokens, token_dim)
        self.norm = nn.LayerNorm(token_dim, eps=_LAYER_NORM_EPS)
        self.ffn = PerTokenGLU(num_tokens, token_dim, round(config.expansion * token_dim))

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        mixed = self.norm(self.mixing(tokens_BTD))
        return self.ffn(mixed.transpose(0, 1)).transpose(0, 1)


class ReleasedBlock(nn.Module):
    """The released code's block: (B, T, D) to (B, T, D)."""

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.mixing = ResidualMixing(config, num_tokens, token_dim, released=True)
        self.norm = nn.RMSNorm(token_dim, eps=_RMS_EPS)
        self.ffn = ReleasedFFN(config, num_tokens, token_dim)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        mixed = self.norm(self.mixing(tokens_BTD))
        return self.ffn(mixed) + mixed


class ReleasedFFN(nn.Module):
    """A stack of normed gated units a token and a linear map back: (B, T, D) to (B, T, D)."""

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = token_dim
        for unit in config.hidden_units or (token_dim,):
            layers.append(PerTokenRMSNorm(num_tokens, width))
            hidden = round(config.expansion * width)
            layers.append(PerTokenGLU(num_tokens, width, hidden, bias=True, extra_gate=True))
            if unit != width:
                layers.append(PerTokenLinear(num_tokens, width, unit))
            width = unit
        layers.append(PerTokenLinear(num_tokens, width, token_dim))
        self.layers = nn.Sequential(*layers)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        return self.layers(tokens_BTD.transpose(0, 1)).transpose(0, 1)


class PerTokenRMSNorm(nn.Module):
    """RMSNorm with gains of each token's own, (T, B, D) to (T, B, D)."""

    def __init__(self, num_tokens: int, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_tokens, 1, dim))

    def forward(self, tokens_TBD: Tensor) -> Tensor:
        """Return (T, B, D) of (T, B, D)."""
        normed = functional.rms_norm(tokens_TBD, tokens_TBD.shape[-1:], eps=_RMS_EPS)
        return normed * self.gain


class ResidualMixing(nn.Module):
    """Full mixing of coordinates, (B, T, D) to (B, T, D): `X + unvec(W vec(X))`, vec row by row.

    released: W acts on the RMSNorm of vec(X) and has a bias.
    """

    def __init__(
        self, config: RankElastorConfig, num_tokens: int, token_dim: int, released: bool = False
    ) -> None:
        super().__init__()
        size = num_tokens * token_dim
        self.block = config.mixing_block
        self.norm = nn.RMSNorm(size, eps=_RMS_EPS) if released else nn.Identity()
        self.bias = nn.Parameter(torch.zeros(size)) if released else None
        blocks = size // self.block
        rank = config.mixing_rank
        self.weight = nn.Parameter(torch.zeros(rank or blocks, blocks))
        self.left = nn.Parameter(torch.zeros(blocks, rank)) if rank else None
        self._init(config.mixing_init, num_tokens)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        flat = self.norm(tokens_BTD.flatten(1))
        if self.block > 1:
            flat = flat.unflatten(1, (-1, self.block)).mT
        mixed = functional.linear(flat, self.weight)
        if self.left is not None:
            mixed = functional.linear(mixed, self.left)
        if self.block > 1:
            mixed = mixed.mT.flatten(1)
        if self.bias is not None:
            mixed = mixed + self.bias
        return tokens_BTD + mixed.unflatten(1, tokens_BTD.shape[1:])

    @torch.no_grad()
    def _init(self, kind: MixingInit, num_tokens: int) -> None:
        if kind == "commutation":
            source = block_transpose_order(num_tokens, len(self.weight) // num_tokens)
            self.weight[torch.arange(len(source)), source] = 1.0
        elif self.left is not None:
            # One zero factor starts from no mixing and still has a gradient.
            nn.init.xavier_normal_(self.weight)
            if kind == "xavier":
                nn.init.xavier_normal_(self.left)
        elif kind == "xavier":
            nn.init.xavier_normal_(self.weight)


def block_transpose_order(num_tokens: int, dim: int) -> Tensor:
    """Return RankMixer's token mixing as a permutation: flat output k is flat input `order[k]`.

    Each token's `dim` coordinates form num_tokens heads, and token h of the output is the h-th head
    of every token.
    """
    grid = torch.arange(num_tokens * dim).view(num_tokens, num_tokens, dim // num_tokens)
    return grid.transpose(0, 1).reshape(-1)

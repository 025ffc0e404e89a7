# SPDX-License-Identifier: MIT
"""RankElastor: full token mixing and gated per-token feed-forwards (equations 3 and 4).

A block mixes all T·D coordinates by one learned matrix, `vec(M) = LN((W + I) vec(X))`, then gates:
`Z_t = (GELU(M_t W1_t) ⊙ M_t W2_t) W3_t + M_t Wr_t`. RankMixer's parameter-free mixing is the
special case in which W is a commutation matrix.

The authors' released code is another model, so both are here. `paper` is the equations. `code` is
the release: RMSNorm over all T·D coordinates before the mixing and over each token after it,
biases, an extra branch in the gate, a stack of gated units a token, and a residual around them.

The mixing matrix has (T·D)² entries. Three structures have fewer: `mixing_block` mixes blocks of d
coordinates, W ⊗ I_d (d = D: W_T ⊗ I_D, one T x T matrix for all coordinates); `mixing_terms` sums
K Kronecker products A_k ⊗ B_k of T x T and D x D matrices; `mixing_rank` factors W. All of them let
every token reach every other, which the release's fast variants do not.

Shapes: B examples, T tokens, D token width, K terms, r expansion of the gated units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import (
    LayerNorm,
    PerTokenGLU,
    PerTokenLinear,
    PerTokenRMSNorm,
    RMSNorm,
    check_choices,
    read_tokens,
)
from models.tower import Tower, TowerConfig

MixingInit = Literal["xavier", "zero", "commutation"]

# The paper's LayerNorm has none and takes the usual one; that of the release is the RMSNorms'.
_LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class RankElastorConfig(TowerConfig):
    """RankElastor's settings.

    Args:
        variant: `paper` (the equations) or `code` (the authors' release).
        depth: blocks.
        expansion: r, the gated units' hidden width over their input width.
        hidden_units: of `code` only, the widths of each token's stack of gated units; () for one
            unit of width D.
        pooling: `mean` over tokens, or `flatten` to T·D (the release, before its prediction MLP).
        mixing_init: `xavier`; `zero`, no mixing (under `paper` tokens of zeros, as empty histories
            give, then have gradients up to 316 times too large a block); `commutation`, RankMixer's
            (needs T to divide D).
        mixing_block: d in W ⊗ I_d; 1 mixes every coordinate.
        mixing_rank: rank of W's factors, 0 for full.
        mixing_terms: K in the sum of A_k ⊗ B_k, 0 for one matrix.
    """

    variant: Literal["paper", "code"] = "paper"
    depth: int = 2
    expansion: float = 3.0
    hidden_units: tuple[int, ...] = ()
    pooling: Literal["mean", "flatten"] = "mean"
    mixing_init: MixingInit = "xavier"
    mixing_block: int = 1
    mixing_rank: int = 0
    mixing_terms: int = 0

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        check_choices(self, "rankelastor")
        for name, least in (("depth", 1), ("mixing_block", 1), ("mixing_rank", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"rankelastor: {name} must be at least {least}, got {getattr(self, name)}"
                )
        if self.expansion <= 0 or min(self.hidden_units, default=1) < 1:
            raise ValueError(
                "rankelastor: expansion and hidden_units must be positive, got "
                f"{self.expansion} and {self.hidden_units}"
            )
        if self.mixing_terms < 0 or (
            self.mixing_terms and (self.mixing_rank or self.mixing_block > 1)
        ):
            raise ValueError(
                "rankelastor: mixing_terms is positive, or 0 where mixing_rank or mixing_block is "
                f"set (one structure at a time), got mixing_terms={self.mixing_terms}, "
                f"mixing_rank={self.mixing_rank}, mixing_block={self.mixing_block}"
            )
        if self.hidden_units and self.variant == "paper":
            raise ValueError(
                "rankelastor: hidden_units is read by variant='code' only (the paper has one gated "
                f"unit of width D), got {self.hidden_units}; use expansion to widen the paper's"
            )
        if (self.mixing_rank or self.mixing_terms) and self.mixing_init == "commutation":
            raise ValueError(
                "rankelastor: mixing_init='commutation' has full rank and cannot be factored, got "
                f"mixing_rank={self.mixing_rank} and mixing_terms={self.mixing_terms}; set both to "
                "0"
            )

    def build(self, num_tokens: int, token_dim: int) -> RankElastor:
        """Return the tower for (B, num_tokens, token_dim) tokens.

        Raises ValueError if mixing_block, mixing_rank or a commutation start does not fit these
        sizes.
        """
        if min(num_tokens, token_dim) < 1:
            raise ValueError(f"rankelastor: needs tokens, got {num_tokens} of width {token_dim}")
        if token_dim % self.mixing_block:
            raise ValueError(
                "rankelastor: mixing_block must divide the token width, got "
                f"{self.mixing_block} and {token_dim}"
            )
        if self.mixing_rank > num_tokens * token_dim // self.mixing_block:
            raise ValueError(
                "rankelastor: mixing_rank cannot exceed the matrix it factors, "
                f"{num_tokens * token_dim // self.mixing_block} rows, got {self.mixing_rank}; use "
                "0 for a full matrix"
            )
        if self.mixing_init == "commutation" and token_dim % (num_tokens * self.mixing_block):
            raise ValueError(
                "rankelastor: mixing_init='commutation' needs num_tokens * mixing_block to divide "
                f"the token width, got {num_tokens} * {self.mixing_block} and {token_dim}; use "
                "mixing_init='xavier'"
            )
        return RankElastor(self, num_tokens, token_dim)


class RankElastor(Tower):
    """RankElastor blocks and pooling: (B, T, D) to (B, D) or (B, T·D)."""

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.output_dim = token_dim * (num_tokens if config.pooling == "flatten" else 1)
        block = PaperBlock if config.variant == "paper" else ReleasedBlock
        self.blocks = nn.ModuleList(
            block(config, num_tokens, token_dim) for _ in range(config.depth)
        )

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D).

        Raises ValueError if the tokens are not of the sizes that the tower was built for.
        """
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "rankelastor")
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD)
        return tokens_BTD.mean(dim=1) if self.pooling == "mean" else tokens_BTD.flatten(1)


class PaperBlock(nn.Module):
    """Equations 3 and 4: (B, T, D) to (B, T, D)."""

    measured_as = "layer"

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.mixing = ResidualMixing(config, num_tokens, token_dim)
        self.norm = LayerNorm(token_dim, eps=_LAYER_NORM_EPS)
        self.ffn = PerTokenGLU(num_tokens, token_dim, round(config.expansion * token_dim))

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        mixed = self.norm(self.mixing(tokens_BTD))
        return self.ffn(mixed.transpose(0, 1)).transpose(0, 1)


class ReleasedBlock(nn.Module):
    """The released code's block: (B, T, D) to (B, T, D)."""

    measured_as = "layer"

    def __init__(self, config: RankElastorConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.mixing = ResidualMixing(config, num_tokens, token_dim, released=True)
        self.norm = RMSNorm(token_dim)
        self.ffn = ReleasedFFN(config, num_tokens, token_dim)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        mixed = self.norm(self.mixing(tokens_BTD))
        return self.ffn(mixed) + mixed


class ReleasedFFN(nn.Module):
    """A stack of normed gated units a token and a linear map back, (B, T, D) to (B, T, D)."""

    measured_as = "ffn"

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


class ResidualMixing(nn.Module):
    """Full mixing of coordinates, (B, T, D) to (B, T, D): `X + unvec(W vec(X))`, vec row by row.

    released: W acts on the RMSNorm of vec(X) and has a bias. Parameters: `weight` is W, or the
    factor applied first; `left` the one applied second: W = left · weight for a low rank, and for
    K terms weight (K, D, D) holds the B_k and left (T, T, K) the A_k.
    """

    measured_as = "mixing"

    def __init__(
        self, config: RankElastorConfig, num_tokens: int, token_dim: int, released: bool = False
    ) -> None:
        super().__init__()
        size = num_tokens * token_dim
        self.block, self.terms = config.mixing_block, config.mixing_terms
        self.norm = RMSNorm(size) if released else nn.Identity()
        self.bias = nn.Parameter(torch.zeros(size)) if released else None
        blocks, rank = size // self.block, config.mixing_rank
        if self.terms:
            self.weight = nn.Parameter(torch.zeros(self.terms, token_dim, token_dim))
            self.left = nn.Parameter(torch.zeros(num_tokens, num_tokens, self.terms))
        else:
            self.weight = nn.Parameter(torch.zeros(rank or blocks, blocks))
            self.left = nn.Parameter(torch.zeros(blocks, rank)) if rank else None
        self._init(config.mixing_init, num_tokens)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        flat = self.norm(tokens_BTD.flatten(1))  # (B, T·D)
        mixed = self._sum_of_products(flat) if self.terms else self._product(flat)
        if self.bias is not None:
            mixed = mixed + self.bias
        return tokens_BTD + mixed.unflatten(1, tokens_BTD.shape[1:])

    def _product(self, flat: Tensor) -> Tensor:
        if self.block > 1:
            flat = flat.unflatten(1, (-1, self.block)).mT  # (B, d, T·D / d)
        mixed = functional.linear(flat, self.weight)
        if self.left is not None:
            mixed = functional.linear(mixed, self.left)
        return mixed.mT.flatten(1) if self.block > 1 else mixed

    def _sum_of_products(self, flat: Tensor) -> Tensor:
        # A_k X B_k^T for all k: one product with every B_k, one with every A_k side by side.
        assert self.left is not None
        num_tokens, dim = self.left.shape[0], self.weight.shape[-1]
        turned = functional.linear(flat.unflatten(1, (num_tokens, dim)), self.weight.flatten(0, 1))
        turned = turned.view(-1, num_tokens * self.terms, dim)  # (B, T·K, D)
        return torch.matmul(self.left.flatten(1), turned).flatten(1)

    @torch.no_grad()
    def _init(self, kind: MixingInit, num_tokens: int) -> None:
        if kind == "commutation":
            source = block_transpose_order(num_tokens, len(self.weight) // num_tokens)
            self.weight[torch.arange(len(source)), source] = 1.0
        elif self.terms and self.left is not None:
            # Entries of the sum vary as a Xavier start of the whole (T·D)² matrix does.
            nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
            if kind == "xavier":
                nn.init.normal_(self.left, std=(num_tokens * self.terms) ** -0.5)
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

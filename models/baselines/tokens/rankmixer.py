# SPDX-License-Identifier: MIT
"""RankMixer: tokens exchange heads without parameters, then each goes through weights of its own.

A layer is `S = LN(mix(X) + X)`, `X' = LN(PFFN(S) + S)`. `mix` cuts each of the T tokens into T
heads and makes token h of the h-th head of every token, so T must divide the width. It is
RankElastor's mixing with a commutation matrix for W (see `block_transpose_order`).

From the RankMixer paper's equations; the layers hold about 2 k L T D² weights (k the expansion).
Its sparse mixture of experts is not here.

Shapes: B examples, T tokens, D token width, k expansion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from models.layers import LayerNorm, Measured, PerTokenFFN, PerTokenGLU, check_choices, read_tokens
from models.tower import Tower, TowerConfig

_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class RankMixerConfig(TowerConfig):
    """RankMixer's settings.

    Args:
        num_layers: L.
        expansion: k, hidden width of the per-token feed-forwards over D.
        ffn: `gelu` (the paper), `relu`, or RankElastor's gated unit `glu` (ablations of its paper).
        pooling: `mean` over tokens, or `flatten` to T·D.
    """

    num_layers: int = 2
    expansion: float = 4.0
    ffn: Literal["gelu", "relu", "glu"] = "gelu"
    pooling: Literal["mean", "flatten"] = "mean"

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "rankmixer")
        if self.num_layers < 1 or self.expansion <= 0:
            raise ValueError(
                "rankmixer: num_layers must be at least 1 and expansion positive, got "
                f"{self.num_layers} and {self.expansion}"
            )

    def build(self, num_tokens: int, token_dim: int) -> RankMixer:
        """Return the tower for (B, num_tokens, token_dim) tokens.

        Raises ValueError if num_tokens does not divide token_dim.
        """
        if num_tokens < 1 or token_dim < 1:
            raise ValueError(
                f"rankmixer: needs tokens of a width, got {num_tokens} tokens of {token_dim}"
            )
        if token_dim % num_tokens:
            fitting = [count for count in range(1, token_dim + 1) if token_dim % count == 0]
            below = token_dim // num_tokens * num_tokens
            widths = [width for width in (below, below + num_tokens) if width]
            raise ValueError(
                "rankmixer: every token is cut into as many heads as there are tokens, so the "
                f"number of tokens must divide their width; got {num_tokens} tokens of width "
                f"{token_dim}. Set model.tokenizer.token_dim to a multiple of {num_tokens} "
                f"({' or '.join(map(str, widths))}), or model.tokenizer.num_tokens (summaries of "
                "histories are tokens too) so that the tokens are one of "
                f"{', '.join(map(str, fitting))}"
            )
        return RankMixer(self, num_tokens, token_dim)


class RankMixer(Tower):
    """RankMixer layers and pooling: (B, T, D) to (B, D) or (B, T·D)."""

    def __init__(self, config: RankMixerConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.pooling = config.pooling
        self.output_dim = token_dim * (num_tokens if config.pooling == "flatten" else 1)
        self.layers = nn.ModuleList(
            RankMixerLayer(config, num_tokens, token_dim) for _ in range(config.num_layers)
        )

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D).

        Raises ValueError if the tokens are not of the sizes that the tower was built for.
        """
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "rankmixer")
        for layer in self.layers:
            tokens_BTD = layer(tokens_BTD)
        return tokens_BTD.mean(dim=1) if self.pooling == "mean" else tokens_BTD.flatten(1)


class RankMixerLayer(nn.Module):
    """Token mixing and per-token feed-forwards, each with residual and LayerNorm."""

    measured_as = "layer"

    def __init__(self, config: RankMixerConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        hidden = round(config.expansion * token_dim)
        self.mixing_norm = LayerNorm(token_dim, eps=_EPS)
        self.mixed = Measured("mixing")
        self.ffn_norm = LayerNorm(token_dim, eps=_EPS)
        if config.ffn == "glu":
            self.ffn: nn.Module = PerTokenGLU(num_tokens, token_dim, hidden, bias=True)
        else:
            self.ffn = PerTokenFFN(num_tokens, token_dim, hidden, config.ffn)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        mixed = self.mixed(self.mixing_norm(mix_tokens(tokens_BTD) + tokens_BTD))
        if isinstance(self.ffn, PerTokenGLU):
            fed = self.ffn(mixed.transpose(0, 1)).transpose(0, 1)
        else:
            fed = self.ffn(mixed)
        return self.ffn_norm(fed + mixed)


def mix_tokens(tokens_BTD: Tensor) -> Tensor:
    """Return (B, T, D) in which token h is the h-th of T heads of every token, side by side."""
    num_tokens = tokens_BTD.shape[1]
    heads = tokens_BTD.unflatten(2, (num_tokens, -1))  # (B, T, T, D / T)
    return heads.transpose(1, 2).flatten(2)

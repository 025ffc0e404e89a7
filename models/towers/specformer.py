# SPDX-License-Identifier: MIT
"""SpecFormer: attention over spectrally softened tokens (equations 16-29 of the SpecFormer paper).

A layer's attention logits are three terms: scores of the softened tokens, `S = H* Wq (H* Wk)ᵀ`; a
bias `P = p pᵀ` that keeps the principal directions which softening pushed down; and scores of the
unsoftened
tokens with projections of their own, `S̄ = H W̄q (H W̄k)ᵀ`. The values are the tokens,
unprojected: `softmax(S + α P + γ S̄) H`. Residual, LayerNorm, per-token feed-forward, LayerNorm;
the tower's output is the mean over tokens.

Two scores are each computed as one bilinear form, `H (Wq Wkᵀ) Hᵀ`: the product of the weights is
formed once a batch, which halves the projections. The defaults are the paper's equations to the
letter. For production prefer `logit_scale="rsqrt_dim"` (without it S̄ outweighs S by far once tokens
are normalised) and `position_bias="diagonal"` (sign-free and smooth).

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from models.attention.attention import attention
from models.layers import LayerNorm, Measured, PerTokenFFN, check_choices, widen
from models.spectral.spectral import (
    DEFAULT_FLOOR,
    PositionBias,
    position_bias,
    position_vector,
    soften,
)
from models.spectral.spectrum import Eigensolver, Precision, decompose
from models.tower import Tower, TowerConfig

Softening = Literal["power", "relative", "none"]
Value = Literal["tokens", "projected", "softened"]


@dataclass(frozen=True, kw_only=True)
class SpecFormerConfig(TowerConfig):
    """SpecFormer's settings; the paper's ablations (a) to (g) are values of them.

    Args:
        num_layers: SpecFormer layers.
        ffn_ratio: hidden width of the per-token feed-forward over D.
        alpha: weight of the position bias; 0 removes it (d).
        gamma: weight of the unsoftened scores; 0 removes them (f).
        logit_scale: `none` (the paper) or `rsqrt_dim`, which multiplies both scores by 1/√D.
        softening: `power`, σ^τ (the paper); `relative`, σ1 (σ/σ1)^τ, which keeps the tokens' scale;
            `none` (a).
        value: `tokens` (the paper), `projected` by a learned matrix (b) or `softened` (c).
        position_bias: `rank1` (the paper), `diagonal`, `identity` (e) or `none`.
        through_vectors: whether gradients of `rank1` flow into the singular vectors too.
        softened_scores: False drops S (g).
        score_form: `terms` adds three matrices; `concat` is one attention call of width 2D + 1. The
            results are equal; `terms` is faster wherever it was measured (models/README.md).
        floor: eigenvalues are floored at this share of the largest.
        norm_eps: epsilon of the LayerNorms.
        precision: `measured` decomposes in float32 what is conditioned well enough; `double`
            decomposes everything in float64.
        eigensolver: `auto`, compiled code where it is there and else LAPACK; `lapack`, one matrix
            after the other; `jacobi`, all at once.
        warmup: share of a run's steps, from the first, in which γ S̄ alone makes the logits. The
            paper takes 0.05; it is 1 in a run that is the warm-up.
    """

    num_layers: int = 3
    ffn_ratio: float = 4.0
    alpha: float = 1e-3
    gamma: float = 0.8
    logit_scale: Literal["none", "rsqrt_dim"] = "none"
    softening: Softening = "power"
    value: Value = "tokens"
    position_bias: PositionBias = "rank1"
    through_vectors: bool = False
    softened_scores: bool = True
    score_form: Literal["terms", "concat"] = "terms"
    floor: float = DEFAULT_FLOOR
    norm_eps: float = 1e-5
    precision: Precision = "measured"
    eigensolver: Eigensolver = "auto"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        check_choices(self, "specformer")
        if self.num_layers < 1:
            raise ValueError(f"specformer: num_layers must be at least 1, got {self.num_layers}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"specformer: warmup: expected a share in [0, 1], got {self.warmup}")
        if self.warmup and not self.gamma:
            raise ValueError(
                "specformer: warmup trains gamma's term alone, so it needs gamma > 0, got "
                f"warmup={self.warmup} with gamma=0; set warmup to 0"
            )
        if not 0 < self.floor < 1:
            raise ValueError(f"specformer: floor must be between 0 and 1, got {self.floor}")
        if self.through_vectors and not (self.has_position and self.position_bias == "rank1"):
            raise ValueError(
                "specformer: through_vectors takes effect only with position_bias='rank1' and "
                f"alpha > 0, got position_bias={self.position_bias!r}, alpha={self.alpha}"
            )
        if self.score_form == "concat" and self.position_bias not in ("rank1", "none"):
            raise ValueError(
                "specformer: score_form='concat' needs position_bias 'rank1' or 'none', got "
                f"{self.position_bias!r}; use score_form='terms'"
            )
        if not (self.has_softening or self.has_position) and (
            self.precision != "measured" or self.eigensolver != "auto"
        ):
            raise ValueError(
                "specformer: precision and eigensolver take effect only with softening or a "
                f"position bias, got precision={self.precision!r}, "
                f"eigensolver={self.eigensolver!r}; leave them at 'measured' and 'auto'"
            )
        if not (self.softened_scores or self.gamma or self.has_position):
            raise ValueError(
                "specformer: softened_scores=False with alpha=0 and gamma=0 leaves no attention "
                "logits; keep one of the three terms"
            )

    @property
    def has_position(self) -> bool:
        """Whether the logits have a position bias."""
        return self.position_bias != "none" and self.alpha != 0

    @property
    def has_softening(self) -> bool:
        """Whether softened tokens are read anywhere."""
        return self.softening != "none" and (self.softened_scores or self.value == "softened")

    def build(self, num_tokens: int, token_dim: int) -> SpecFormer:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return SpecFormer(self, num_tokens, token_dim)


class SpecFormer(Tower):
    """SpecFormer layers and the mean over tokens: (B, T, D) to (B, D)."""

    def __init__(self, config: SpecFormerConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.config = config
        self.output_dim = token_dim
        self.layers = nn.ModuleList(
            SpecFormerLayer(config, num_tokens, token_dim) for _ in range(config.num_layers)
        )

    def set_progress(self, fraction: float) -> None:
        """Turn the warm-up on or off for a step after the share `fraction` of a run."""
        if self.config.warmup:
            self.set_warmup(fraction < self.config.warmup)

    def set_warmup(self, enabled: bool) -> None:
        """Turn the warm-up on or off: logits are γ S̄ alone, everything else is as it is.

        Parameters that the warm-up does not read get zero gradients, not none, so that distributed
        reducers get a gradient of each of them in each step.

        Raises ValueError if γ is 0.
        """
        if enabled and not self.config.gamma:
            raise ValueError("specformer: the warm-up trains gamma's term alone, and gamma is 0")
        for layer in self.layers:
            assert isinstance(layer, SpecFormerLayer)
            layer.warmup = enabled

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, D) of (B, T, D)."""
        tokens_BTD = widen(tokens_BTD, "specformer")
        for layer in self.layers:
            tokens_BTD = layer(tokens_BTD)
        return tokens_BTD.mean(dim=1)


class SpecFormerLayer(nn.Module):
    """One layer (equations 16-29): (B, T, D) to (B, T, D)."""

    measured_as = "layer"

    def __init__(self, config: SpecFormerConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.config = config
        self.warmup = False
        self.scale = token_dim**-0.5 if config.logit_scale == "rsqrt_dim" else 1.0
        self.query = _square(token_dim) if config.softened_scores else None
        self.key = _square(token_dim) if config.softened_scores else None
        self.spatial_query = _square(token_dim) if config.gamma else None
        self.spatial_key = _square(token_dim) if config.gamma else None
        self.value = _square(token_dim) if config.value == "projected" else None
        # τ = sigmoid(a); one-element vector because sharders refuse scalars.
        self.a = nn.Parameter(torch.zeros(1)) if config.has_softening else None
        # β = 0 would be a stationary point.
        needs_beta = config.has_position and config.position_bias != "identity"
        self.beta = nn.Parameter(torch.tensor([0.0, 1.0, 0.0])) if needs_beta else None
        self.attention_map = Measured("attention")
        self.attention_norm = LayerNorm(token_dim, eps=config.norm_eps)
        self.ffn = PerTokenFFN(num_tokens, token_dim, round(config.ffn_ratio * token_dim))
        self.ffn_norm = LayerNorm(token_dim, eps=config.norm_eps)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        attended = self._warmup(tokens_BTD) if self.warmup else self._attend(tokens_BTD)
        tokens_BTD = self.attention_norm(attended + tokens_BTD)
        return self.ffn_norm(tokens_BTD + self.ffn(tokens_BTD))

    def learned(self) -> dict[str, float]:
        """Return the layer's learned spectral scalars: `tau`, `beta0`, `beta1`, `beta2`."""
        values: dict[str, float] = {}
        if self.a is not None:
            values["tau"] = float(self.a.detach().sigmoid())
        if self.beta is not None:
            values |= {f"beta{k}": float(b) for k, b in enumerate(self.beta.detach())}
        return values

    def _attend(self, tokens: Tensor) -> Tensor:
        config = self.config
        softened, bias, position = tokens, None, None
        if config.has_softening or config.has_position:
            # The gradient of singular vectors is one over gaps that float32 cannot tell.
            precision = "double" if config.through_vectors else config.precision
            # values (B, n), vectors (B, T or D, n) with n = min(T, D)
            spectrum = decompose(tokens, precision, config.eigensolver)
            tau = self.a.sigmoid()[0] if self.a is not None else 1.0
            # (B, T, D) and (B, n)
            powered, sigma = soften(tokens, tau, spectrum, config.floor)
            if config.has_softening:
                softened = powered
            if config.softening == "relative":
                softened = softened * (sigma[:, :1, None] ** (1.0 - tau)).to(softened.dtype)
            beta = self.beta if self.beta is not None else sigma.new_zeros(3)
            if config.has_position and config.position_bias == "rank1":
                position = position_vector(tokens, sigma, spectrum, beta, config.through_vectors)
                position = position.to(softened.dtype)  # (B, T)
            elif config.has_position:
                bias = position_bias(config.position_bias, tokens, sigma, spectrum, beta)
                bias = bias.to(softened.dtype)
        value = self._value(softened if config.value == "softened" else tokens)
        if config.score_form == "concat":
            return self._concatenated(tokens, softened, position, value)
        if position is not None:
            bias = position[:, :, None] * position[:, None, :]  # (B, T, T)
        logits = None if bias is None else config.alpha * bias
        if self.query is not None and self.key is not None:
            scores = _bilinear(softened, self.query, self.key, self.scale)
            logits = scores if logits is None else logits + scores
        if self.spatial_query is not None and self.spatial_key is not None:
            scale = config.gamma * self.scale
            scores = _bilinear(tokens, self.spatial_query, self.spatial_key, scale)
            logits = scores if logits is None else logits + scores
        assert logits is not None
        return self.attention_map(logits.softmax(dim=-1)) @ value  # (B, T, T) @ (B, T, D)

    def _concatenated(
        self, tokens: Tensor, softened: Tensor, position: Tensor | None, value: Tensor
    ) -> Tensor:
        """Attend by one call over `[s H*Wq, α p, γ s H W̄q] · [H*Wk, p, H W̄k]`."""
        queries, keys = [], []
        if self.query is not None and self.key is not None:
            queries.append(self.scale * (softened @ self.query))
            keys.append(softened @ self.key)
        if position is not None:
            queries.append(self.config.alpha * position[..., None])
            keys.append(position[..., None])
        if self.spatial_query is not None and self.spatial_key is not None:
            queries.append(self.config.gamma * self.scale * (tokens @ self.spatial_query))
            keys.append(tokens @ self.spatial_key)
        query, key = torch.cat(queries, -1), torch.cat(keys, -1)  # (B, T, 2D + 1) each
        heads = (x[:, None] for x in (query, key, value.to(query.dtype)))
        return attention(*heads, scale=1.0)[:, 0]

    def _warmup(self, tokens: Tensor) -> Tensor:
        assert self.spatial_query is not None and self.spatial_key is not None
        scale = self.config.gamma * self.scale
        logits = _bilinear(tokens, self.spatial_query, self.spatial_key, scale)
        for unread in (self.query, self.key, self.a, self.beta):
            if unread is not None:
                logits = logits + 0.0 * unread.sum()
        return self.attention_map(logits.softmax(dim=-1)) @ self._value(tokens)

    def _value(self, tokens: Tensor) -> Tensor:
        return tokens if self.value is None else tokens @ self.value


def _square(dim: int) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_normal_(torch.empty(dim, dim)))


def _bilinear(tokens: Tensor, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return `scale · (X Wq)(X Wk)ᵀ` (B, T, T), projecting X once."""
    # (B, T, D) @ (D, D) @ (B, D, T)
    return (tokens @ (scale * (query @ key.mT))) @ tokens.mT

# SPDX-License-Identifier: MIT
"""The one way to attend: kernels behind one function, a reference beside it, and the masks.

`attention` calls `scaled_dot_product_attention`, which picks a flash kernel where one fits (on the
CPU: equal key and value widths, with or without a mask). `reference_attention` is the definition
that the tests compare it with. A mask is boolean, True where a query may see a key, and broadcasts
to (B, H, Q, S); a query that sees nothing gets zeros.

The masks are TokenFormer's (equations 12, 14, 15): causal, shrinking sliding windows, static tokens
dropped from sliding layers. Two additions the paper leaves open: candidates of one request see the
context and themselves only, and keys that pad a ragged batch are seen by nobody.

Shapes: B examples, H heads, Q queries, S keys or stream positions, F static (field) tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ + mask) v, (B, H, Q, Dv).

    query: (B, H, Q, Dk); key: (B, H, S, Dk); value: (B, H, S, Dv).
    mask: boolean (True = visible) or additive, broadcast to (B, H, Q, S); excludes `causal`, which
    lets query i see keys 0 to i. scale: 1/√Dk unless given.
    """
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return what `attention` returns, step by step and without kernels."""
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = causal_mask(query.shape[-2], logits.device)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1.0)) @ value


def causal_mask(num_positions: int, device: torch.device | None = None) -> Tensor:
    """Return (S, S): position i sees positions 0 to i."""
    return sliding_mask(num_positions, None, device)


def sliding_mask(
    num_positions: int, window: int | None, device: torch.device | None = None
) -> Tensor:
    """Return (S, S): position i sees j when 0 <= i - j < window (None: no limit), itself included.

    Equations 12 and 14.
    """
    index = torch.arange(num_positions, device=device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def discard_static(mask: Tensor, num_static: int) -> Tensor:
    """Return (S, S) `mask` in which no later position sees the first `num_static` (equation 15).

    Static positions still see each other.
    """
    index = torch.arange(mask.shape[-1], device=mask.device)
    static = index < num_static
    return mask & ~(~static[:, None] & static[None, :])


def bidirectional_static(mask: Tensor, num_static: int) -> Tensor:
    """Return (S, S) `mask` in which the first `num_static` positions all see each other."""
    static = torch.arange(mask.shape[-1], device=mask.device) < num_static
    return mask | (static[:, None] & static[None, :])


def isolate_candidates(mask: Tensor, num_candidates: int) -> Tensor:
    """Return (S, S) `mask` in which the last `num_candidates` positions do not see each other."""
    num_positions = mask.shape[-1]
    index = torch.arange(num_positions, device=mask.device)
    candidate = index >= num_positions - num_candidates
    other = index[:, None] != index[None, :]
    return mask & ~(candidate[:, None] & candidate[None, :] & other)


def hide_padding(mask: Tensor, key_valid: Tensor) -> Tensor:
    """Return (B, 1, Q, S): `mask` (Q, S) without the keys where `key_valid` (B, S) is False."""
    return mask & key_valid[:, None, None, :]


def bfts_masks(
    num_static: int,
    num_positions: int,
    num_full_layers: int,
    windows: tuple[int, ...],
    device: torch.device | None = None,
) -> list[Tensor]:
    """Return one (S, S) mask a layer: full causal layers, then sliding ones without static tokens.

    num_static: leading field tokens, the separator not counted: it stays visible. windows: one a
    sliding layer, in tokens, counting the token itself.
    """
    full = [causal_mask(num_positions, device)] * num_full_layers
    return full + [
        discard_static(sliding_mask(num_positions, window, device), num_static)
        for window in windows
    ]

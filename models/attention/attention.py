# SPDX-License-Identifier: MIT
"""The one way to attend: kernels behind one function, a reference beside it, and the masks.

`attention` takes rectangles (B, H, S, d) with a mask, or packed rows (P, H, d) with a `Band`, which
says by rule which rows see which. Rectangles go to `scaled_dot_product_attention`, which picks a
flash kernel where one fits (on the CPU: equal key and value widths, with or without a mask). For
packed rows `kernel_for` picks one of `models/attention/kernels.py`; `describe` says in words what
it will pick, `kernels.in_use` what has run. `reference_attention` is the definition that the tests
compare all of them with. A mask is boolean, True where a query may see a key, and broadcasts to
(B, H, Q, S); a query that sees nothing gets zeros.

The masks are TokenFormer's (equations 12, 14, 15): causal, shrinking sliding windows, static tokens
dropped from sliding layers. Two additions the paper leaves open: candidates of one request see the
context and themselves only, and keys that pad a ragged batch are seen by nobody.

Shapes: B examples, H heads, Q queries, S keys or stream positions, P packed rows, F static (field)
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from models.attention import kernels
from models.attention.jagged import Band

Kernel = Literal["flash", "flex", "banded", "padded"]

_KERNELS: dict[Kernel, Callable[[Tensor, Tensor, Tensor, Band, float | None], Tensor]] = {
    "flash": kernels.flash,
    "flex": kernels.flex,
    "banded": kernels.banded,
    "padded": kernels.padded,
}
_NAMES: dict[Kernel, str] = {
    "flash": "flash-attn on packed rows",
    "flex": "FlexAttention on packed rows",
    "banded": "scaled_dot_product_attention on chunks of packed rows",
    "padded": "scaled_dot_product_attention on padded rows",
}
# Shorter streams have too few blocks of 128 rows for FlexAttention to skip any.
_FLEX_ROWS = 256


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Band | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ + mask) v, (B, H, Q, Dv), or (Q, H, d) of packed rows.

    Args:
        query: (B, H, Q, Dk), or (Q, H, d) with a `Band`.
        key: (B, H, S, Dk), or (P, H, d) with a `Band`.
        value: (B, H, S, Dv), or (P, H, d) with a `Band`.
        mask: boolean (True = visible) or additive, broadcast to (B, H, Q, S); or a `Band`.
        causal: whether query i sees keys 0 to i alone; excludes a mask.
        scale: 1/√Dk unless given.
    """
    if not isinstance(mask, Band):
        return kernels.sdpa(query, key, value, mask, causal=causal, scale=scale)
    if causal:
        raise ValueError("attention: a Band is causal by itself; leave causal out")
    if not len(query):
        # An empty sum, so that gradients of nothing are zeros and not missing.
        return query * (key.sum() + value.sum())
    kernel = kernel_for(query.device, query.dtype, query.shape[-1], mask)
    if not torch.compiler.is_compiling():
        kernels.note(kernel, _NAMES[kernel], query.device.type, query.dtype)
    return _KERNELS[kernel](query, key, value, mask, scale)


def kernel_for(device: torch.device, dtype: torch.dtype, width: int, band: Band) -> Kernel:
    """Return the kernel for packed rows of heads of `width` that see each other as `band` says."""
    on_gpu, half = device.type == "cuda", dtype in (torch.float16, torch.bfloat16)
    if on_gpu and half and not band.num_mutual and width <= 256 and kernels.flash_version():
        return "flash"
    window = band.window
    # A chunk's keys are its own rows and a window, a rectangle's are all columns; queries that are
    # the last rows alone make a small rectangle.
    short = window is not None and 2 * (window + kernels.chunk_of(window)) <= band.longest
    if short and not band.are_last:
        return "banded"
    if on_gpu and band.longest >= _FLEX_ROWS and 16 <= width <= 256 and dtype != torch.float64:
        return "flex"
    return "padded"


def describe(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Return one line: the kernels for packed rows of heads of `width`, and why no others."""
    offsets = torch.zeros(2, dtype=torch.int64)
    bands = (Band(offsets, 1 << 16), Band(offsets, 1 << 16, 16), Band(offsets, 1))
    chosen: list[Kernel] = [kernel_for(device, dtype, width, band) for band in bands]
    kinds = "; ".join(
        f"{kind} by {_NAMES[kernel]}"
        for kind, kernel in zip(("long streams", "windows", "short streams"), chosen, strict=True)
    )
    version = kernels.flash_version()
    flash = f"flash-attn {version}" if version else "flash-attn not installed"
    form = str(dtype).removeprefix("torch.")
    if device.type != "cuda":
        flash += ", flash-attn and FlexAttention need a GPU"
    elif version and chosen[0] != "flash":
        flash += ", which needs float16 or bfloat16 and heads of at most 256"
    return f"attention on {device.type} in {form}: {kinds} ({flash})"


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Band | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return what `attention` returns, step by step and without kernels."""
    if isinstance(mask, Band):
        heads = [part.transpose(0, 1) for part in (query, key, value)]
        matrix = mask.mask(len(key))
        return reference_attention(*heads, mask=matrix, scale=scale).transpose(0, 1)
    if not key.shape[-2]:
        # Nothing to see: zeros, and no largest logit to take.
        return query @ key.mT @ value
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

    Args:
        num_static: leading field tokens, the separator not counted: it stays visible.
        windows: one a sliding layer, in tokens, counting the token itself.
    """
    full = [causal_mask(num_positions, device)] * num_full_layers
    return full + [
        discard_static(sliding_mask(num_positions, window, device), num_static)
        for window in windows
    ]

# SPDX-License-Identifier: MIT
"""Attention kernels over packed rows. Each applies the mask of a `Band` and skips masked blocks.

- `padded`: one call of `scaled_dot_product_attention` on a rectangle; any band, any device.
- `banded`: short chunks of rows, each against itself and the window before it. The cost grows with
  rows times window, and ragged examples are not padded. Windows only, any device.
- `flash`: the `flash-attn` package, which supports ragged inputs and windows; CUDA, half precision.
- `flex`: FlexAttention, which compiles the band's rule into a kernel; CUDA.

`models/attention/attention.py` chooses the kernel. `in_use` lists the kernels that have run,
including the backend that `sdpa` selected. All kernels take queries (Q, H, d), keys and values
(P, H, d), and return (Q, H, d).

Shapes: B examples, P packed rows, Q query rows, S columns, H heads, d head width, n chunks of c
rows, w the window.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from models.attention.jagged import Band, Grid

_CHUNK = 32
_noted: dict[Hashable, str] = {}
_told: list[str] = []
_FLEX_BLOCK = 128


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Call `scaled_dot_product_attention` and record the backend that it selects.

    Args:
        query: (B, H, Q, d).
        key: (B, H, S, d).
        value: (B, H, S, d).
        mask: boolean or additive, broadcast to (B, H, Q, S).
        causal: use a causal mask; needs `mask` to be None.
        scale: factor of the scores; None for d^-0.5.
    """
    if not torch.compiler.is_compiling():
        device = query.device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else query.dtype
        kind = (device, dtype, query.shape[-1], value.shape[-1], mask is not None, causal)
        if kind not in _noted:
            heads = [part.detach().to(dtype) for part in (query, key, value)]
            additive = None if mask is None or mask.dtype == torch.bool else mask.to(dtype)
            choose: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
            choice = choose(
                *heads, mask if additive is None else additive, 0.0, causal, scale=scale
            )
            name = SDPBackend(choice).name.lower().removesuffix("_attention")
            note(kind, f"scaled_dot_product_attention ({name} kernel)", device, dtype)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )


def note(kind: Hashable, name: str, device: str, dtype: torch.dtype) -> None:
    """Record that a kernel is used.

    Args:
        kind: key of the use; only its first kernel is recorded.
        name: kernel.
        device: type of device.
        dtype: number format of the inputs.
    """
    if kind not in _noted:
        _noted[kind] = f"{name} on {device} in {str(dtype).removeprefix('torch.')}"


def in_use() -> list[str]:
    """Return the kernels that ran in this process since `forget`, each once."""
    return sorted(set(_noted.values()))


def news() -> list[str]:
    """Return those of `in_use` that this function has not returned before."""
    found = [name for name in in_use() if name not in _told]
    _told.extend(found)
    return found


def forget() -> None:
    """Clear the recorded kernels before another run."""
    _noted.clear()
    _told.clear()


def chunk_of(window: int) -> int:
    """Return the rows of a chunk of `banded`: at least the window, so that two chunks cover it."""
    return max(_CHUNK, window)


def padded(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    """Attend in a padded rectangle.

    If at least half of the rows may be queries and the mask is purely causal, examples are padded
    at the end, and a causal kernel hides the padding without a mask. Otherwise examples are padded
    at the beginning, and a mask covers the query rows only.
    """
    most = band.longest if band.queries is None else band.most
    if band.window is None and not band.num_mutual and 2 * most >= band.longest:
        grid = Grid.beginning_together(band.offsets, len(key), band.longest)
        query = grid.pad(band.spread(query, len(key)))
        out = sdpa(query, grid.pad(key), grid.pad(value), causal=True, scale=scale)
        return band.gather(grid.unpad(out))
    grid = Grid.ending_together(band.offsets, len(key), band.longest)
    together = band.queries is None or band.are_last
    layout = Grid.ending_together if together else Grid.beginning_together
    asking = layout(band.query_offsets(), len(query), most)
    mask = _visible(band, grid, asking, len(key), together)
    out = sdpa(asking.pad(query), grid.pad(key), grid.pad(value), mask, scale=scale)
    return asking.unpad(out)


def _visible(band: Band, grid: Grid, asking: Grid, num_rows: int, together: bool) -> Tensor:
    """Return the mask (1 or B, 1, Q, S), True where a query cell attends to a key cell.

    Positions are counted from the end of an example, so that they agree for all examples.
    """
    device = band.offsets.device
    lengths = band.offsets.diff()[:, None]
    if grid.cell is None:
        lengths = lengths[:1]
    key_place = torch.arange(grid.size, 0, -1, device=device)[None]  # (1, S)
    if together:
        place = torch.arange(asking.size, 0, -1, device=device)[None]
    else:
        ends = torch.repeat_interleave(band.offsets[1:], band.offsets.diff(), output_size=num_rows)
        assert band.queries is not None
        place = asking.place(ends[band.queries] - band.queries)
    distance = key_place[:, None, :] - place[:, :, None]  # (1 or B, Q, S) rows from key to query
    visible = distance >= 0
    if band.window is not None:
        visible = visible & (distance < band.window)
    if grid.cell is not None:
        visible = visible & (key_place <= lengths)[:, None, :]
    if band.num_mutual:
        after = lengths - band.num_mutual
        first, first_key = place > after, (key_place > after) & (key_place <= lengths)
        visible = visible | (first[:, :, None] & first_key[:, None, :])
    return visible[:, None]


def banded(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    """Attend in chunks of the packed rows: chunk i sees itself and the w - 1 rows before it."""
    window, num_rows = band.window, len(key)
    assert window is not None and not band.num_mutual
    size = chunk_of(window)
    num_chunks = -(-num_rows // size)
    missing = num_chunks * size - num_rows
    query = functional.pad(band.spread(query, num_rows), (0, 0, 0, 0, 0, missing))  # (n c, H, d)
    chunks = query.unflatten(0, (num_chunks, size)).transpose(1, 2)  # (n, H, c, d)
    seen = []
    for rows in (key, value):
        rows = functional.pad(rows, (0, 0, 0, 0, window - 1, missing))
        own = rows[window - 1 :].unflatten(0, (num_chunks, size))  # (n, c, H, d)
        before = rows[: num_chunks * size].unflatten(0, (num_chunks, size))[:, : window - 1]
        seen.append(torch.cat([before, own], dim=1).transpose(1, 2))  # (n, H, w - 1 + c, d)
    device = key.device
    rows = torch.arange(num_chunks * size, device=device).view(num_chunks, size, 1)
    keys = torch.arange(1 - window, size, device=device) + rows[:, :1]
    start = functional.pad(band.starts(num_rows), (0, missing), value=num_rows)
    mask = band.sees(start.view(num_chunks, size, 1), rows, keys)  # (n, c, w - 1 + c)
    out = sdpa(chunks, seen[0], seen[1], mask[:, None], scale=scale)
    return band.gather(out.transpose(1, 2).flatten(0, 1)[:num_rows])


@cache
def flash_version() -> str | None:
    """Return the version of the installed `flash-attn`, or None if it cannot be imported."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return str(importlib.import_module("flash_attn").__version__)
    except (ImportError, OSError, AttributeError):
        # Built for another torch, or another package of that name.
        return None


def flash(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    """Attend by `flash_attn_varlen_func`, which aligns queries with the end of the keys."""
    attend: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_varlen_func
    whole = band.queries is None or band.are_last
    asked = query if whole else band.spread(query, len(key))
    offsets = band.offsets.to(torch.int32)
    queries = band.query_offsets().to(torch.int32) if whole else offsets
    most = band.most if band.queries is not None and whole else band.longest
    out = attend(
        asked.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=queries,
        cu_seqlens_k=offsets,
        max_seqlen_q=most,
        max_seqlen_k=band.longest,
        softmax_scale=scale,
        causal=True,
        # Keys before and after the query itself.
        window_size=(-1, -1) if band.window is None else (band.window - 1, 0),
    )
    return out if whole else band.gather(out)


def flex(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    """Attend by FlexAttention: one sequence of all rows, masked to each row's own example."""
    num_rows = len(key)
    heads = [part.transpose(0, 1)[None] for part in (band.spread(query, num_rows), key, value)]
    out = _flex_kernel(query.device.type)(
        *heads, block_mask=flex_blocks(band, num_rows), scale=scale
    )
    return band.gather(out[0].transpose(0, 1))


@cache
def _flex_kernel(device_type: str) -> Callable[..., Any]:
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    # Uncompiled FlexAttention is a reference computation without the kernel, for tests on a CPU.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


def flex_blocks(band: Band, num_rows: int) -> Any:
    """Return FlexAttention's block mask: the blocks with visible pairs, and the rule within them.

    The visible blocks of a block of rows are consecutive, so no matrix of pairs is needed.
    """
    module = importlib.import_module("torch.nn.attention.flex_attention")
    start = band.starts(num_rows)

    def rule(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return band.sees(start[query], query, key)

    num_blocks = -(-num_rows // _FLEX_BLOCK)
    first = _FLEX_BLOCK * torch.arange(num_blocks, device=start.device)
    last = (first + _FLEX_BLOCK - 1).clamp_max(num_rows - 1)
    low = start[first]
    if band.window is not None:
        low = torch.maximum(low, first - band.window + 1)
    # The num_mutual leading rows may attend to rows after the block.
    high = torch.maximum(last, start[last] + band.num_mutual - 1).clamp_max(num_rows - 1)
    low, high = low // _FLEX_BLOCK, high // _FLEX_BLOCK
    blocks = low[:, None] + torch.arange(num_blocks, device=start.device)
    blocks = blocks.clamp_max(num_blocks - 1).to(torch.int32)
    counts = (high - low + 1).to(torch.int32)
    return module.BlockMask.from_kv_blocks(
        counts[None, None],
        blocks[None, None],
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=rule,
        seq_lengths=(num_rows, num_rows),
    )

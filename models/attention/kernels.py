# SPDX-License-Identifier: MIT
"""Kernels of attention over packed rows: each does what a `Band` says and skips what it can.

- `padded`: one call of `scaled_dot_product_attention` on a rectangle; any band, any device.
- `banded`: short chunks of rows, each against itself and the window before it, so that the cost
  grows with rows times window and ragged examples are never padded; windows only, any device.
- `flash`: the `flash-attn` package, ragged and windowed by itself; CUDA, half precision.
- `flex`: FlexAttention, which compiles the band's rule into a kernel; CUDA.

`models/attention/attention.py` chooses. What has run is noted (`in_use`), and what `sdpa` picked by
itself. All take queries (Q, H, d), keys and values (P, H, d) and return (Q, H, d).

Shapes: B examples, P packed rows, Q of them that ask, S columns, H heads, d head width, n chunks of
c rows, w the window.
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
    """Call `scaled_dot_product_attention`, (B, H, Q, d), and note which of its kernels it takes."""
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
    """Remember that a kernel is used; kind: what it is used for, which is noted once."""
    if kind not in _noted:
        _noted[kind] = f"{name} on {device} in {str(dtype).removeprefix('torch.')}"


def in_use() -> list[str]:
    """Return which kernels have attended in this process since `forget`, each once."""
    return sorted(set(_noted.values()))


def news() -> list[str]:
    """Return those of `in_use` that this function has not returned before."""
    found = [name for name in in_use() if name not in _told]
    _told.extend(found)
    return found


def forget() -> None:
    """Forget which kernels were used: another run begins."""
    _noted.clear()
    _told.clear()


def chunk_of(window: int) -> int:
    """Return the rows of a chunk of `banded`: at least the window, so that two chunks hold it."""
    return max(_CHUNK, window)


def padded(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    """Attend in a rectangle, its examples beginning or ending in one column.

    Where they begin together and all rows ask, what pads an example comes after its rows: a causal
    kernel hides it without a mask. Few rows that ask, and windows, take a mask over less.
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
    """Return (1 or B, 1, Q, S), True where a query's cell sees a key's.

    Places are counted from an example's end, where they are the same for all examples.
    """
    device = band.offsets.device
    lengths = band.offsets.diff()[:, None]
    if grid.cell is None:
        lengths = lengths[:1]
    key_place = torch.arange(grid.size, 0, -1, device=device)[None]
    if together:
        place = torch.arange(asking.size, 0, -1, device=device)[None]
    else:
        ends = torch.repeat_interleave(band.offsets[1:], band.offsets.diff(), output_size=num_rows)
        assert band.queries is not None
        place = asking.place(ends[band.queries] - band.queries)
    distance = key_place[:, None, :] - place[:, :, None]
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
    query = functional.pad(band.spread(query, num_rows), (0, 0, 0, 0, 0, missing))
    chunks = query.unflatten(0, (num_chunks, size)).transpose(1, 2)
    seen = []
    for rows in (key, value):
        rows = functional.pad(rows, (0, 0, 0, 0, window - 1, missing))
        own = rows[window - 1 :].unflatten(0, (num_chunks, size))
        before = rows[: num_chunks * size].unflatten(0, (num_chunks, size))[:, : window - 1]
        seen.append(torch.cat([before, own], dim=1).transpose(1, 2))
    device = key.device
    rows = torch.arange(num_chunks * size, device=device).view(num_chunks, size, 1)
    keys = torch.arange(1 - window, size, device=device) + rows[:, :1]
    start = functional.pad(band.starts(num_rows), (0, missing), value=num_rows)
    mask = band.sees(start.view(num_chunks, size, 1), rows, keys)
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
    """Attend by `flash_attn_varlen_func`, which lines queries up with the end of the keys."""
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
        # How far a query sees back and ahead of itself, which is not counted.
        window_size=(-1, -1) if band.window is None else (band.window - 1, 0),
    )
    return out if whole else band.gather(out)


def flex(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    """Attend by FlexAttention: all examples as one sequence whose rows see their own example."""
    num_rows = len(key)
    heads = [part.transpose(0, 1)[None] for part in (band.spread(query, num_rows), key, value)]
    out = _flex_kernel(query.device.type)(
        *heads, block_mask=flex_blocks(band, num_rows), scale=scale
    )
    return band.gather(out[0].transpose(0, 1))


@cache
def _flex_kernel(device_type: str) -> Callable[..., Any]:
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    # Not compiled it is a plain computation, without the kernel: for tests on a CPU.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


def flex_blocks(band: Band, num_rows: int) -> Any:
    """Return FlexAttention's mask: the blocks that hold visible pairs, and the rule within them.

    What a block of rows sees is one run of blocks, so the list takes no matrix of pairs.
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
    # Leading rows may see ahead of the block.
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

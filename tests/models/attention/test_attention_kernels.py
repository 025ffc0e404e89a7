# SPDX-License-Identifier: MIT
"""Kernels over packed rows: each equals a loop over rows in NumPy, forwards and backwards."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import kernels
from models.attention.attention import attention, describe, kernel_for, reference_attention
from models.attention.jagged import Band, offsets_of
from tests.support.derivation import Array, array, close, softmax

DOUBLE = torch.float64
CPU, GPU = torch.device("cpu"), torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Attend = Callable[[Tensor, Tensor, Tensor, Band, float | None], Tensor]


@st.composite
def bands(draw: st.DrawFn, windows: bool = False, flexible: bool = True) -> Band:
    """Draw ragged examples, empty ones among them; windows may be longer than every example."""
    mutual = 0 if windows or not flexible else draw(st.sampled_from([0, 0, 3]))
    lengths = draw(st.lists(st.integers(mutual, 80), min_size=1, max_size=4))
    lengths += draw(st.sampled_from([[], [mutual], [mutual + 1]]))
    offsets = offsets_of(torch.tensor(lengths))
    window = draw(st.integers(1, 100)) if windows or (draw(st.booleans()) and not mutual) else None
    band = Band(offsets, max(lengths), window, mutual)
    kind = draw(st.sampled_from(["all", "last", "some"]))
    if kind == "all" or not sum(lengths):
        return band
    step = draw(st.integers(1, 3))
    last = draw(st.integers(1, 80))
    queries, most = [], 0
    for end, length in zip(offsets[1:].tolist(), lengths, strict=True):
        first = end - min(last, length)
        own = list(range(first, end) if kind == "last" else range(end - length, end, step))
        queries, most = queries + own, max(most, len(own))
    asking = torch.tensor(queries, dtype=torch.int64)
    return band._replace(queries=asking, most=most, are_last=kind == "last")


def heads_of(band: Band, width: int, seed: int, num_heads: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(band.offsets[-1])
    num_queries = num_rows if band.queries is None else len(band.queries)
    sizes = (num_queries, num_rows, num_rows)
    return tuple(
        torch.randn(size, num_heads, width, dtype=DOUBLE, generator=generator) for size in sizes
    )


def by_rows(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Array:
    """Attention one row at a time, from the words of `Band` alone."""
    out, edges = np.zeros(query.shape), band.offsets.tolist()
    rows = range(len(key)) if band.queries is None else band.queries.tolist()
    q, k, v = array(query), array(key), array(value)
    for i, row in enumerate(rows):
        first = max(edge for edge in edges[:-1] if edge <= row)
        end = row + 1
        if row < first + band.num_mutual:
            end = first + band.num_mutual
        if band.window is not None:
            first = max(first, row + 1 - band.window)
        for head in range(query.shape[1]):
            weights = softmax(k[first:end, head] @ q[i, head] * scale)
            out[i, head] = weights @ v[first:end, head]
    return out


def compare(attend: Attend, band: Band, seed: int, width: int = 6) -> None:
    """Compare values with the loop, gradients with the reference."""
    inputs = [part.requires_grad_() for part in heads_of(band, width, seed)]
    out = attend(*inputs, band, 0.7)
    assert close(out, by_rows(*inputs, band, 0.7), 1e-12)
    expected = reference_attention(*inputs, mask=band, scale=0.7)
    weights = torch.randn(out.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def chosen(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None) -> Tensor:
    return attention(query, key, value, mask=band, scale=scale)


@settings(max_examples=200, deadline=None)
@given(band=bands(), seed=st.integers(0, 2**31))
def test_the_chosen_kernel_equals_a_loop_over_rows(band: Band, seed: int) -> None:
    if not len(heads_of(band, 1, 0)[0]):
        return
    compare(chosen, band, seed)


@settings(max_examples=100, deadline=None)
@given(band=bands().filter(lambda band: band.offsets[-1] > 0), seed=st.integers(0, 2**31))
def test_the_padded_kernel_equals_a_loop_over_rows(band: Band, seed: int) -> None:
    compare(kernels.padded, band, seed)


@settings(max_examples=100, deadline=None)
@given(band=bands(windows=True).filter(lambda b: b.offsets[-1] > 0), seed=st.integers(0, 2**31))
def test_the_banded_kernel_equals_a_loop_over_rows(band: Band, seed: int) -> None:
    compare(kernels.banded, band, seed)


@pytest.mark.parametrize("attend", [kernels.padded, kernels.banded])
@pytest.mark.parametrize("lengths", [[5], [1], [3, 0, 2]])
def test_gradients_equal_finite_differences(attend: Attend, lengths: list[int]) -> None:
    band = Band(offsets_of(torch.tensor(lengths)), max(lengths), 3)
    inputs = tuple(part.requires_grad_() for part in heads_of(band, 4, 0))
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, band, None), inputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@settings(max_examples=30, deadline=None)
@given(band=bands(windows=True).filter(lambda b: b.offsets[-1] > 0), seed=st.integers(0, 2**31))
def test_short_formats_are_near_float64_in_value_and_gradient(
    dtype: torch.dtype, tolerance: float, band: Band, seed: int
) -> None:
    low = [part.to(dtype).requires_grad_() for part in heads_of(band, 8, seed)]
    high = [part.detach().double().requires_grad_() for part in low]
    expected = reference_attention(*high, mask=band)
    theirs = torch.autograd.grad(expected.sum(), high)
    for attend in (kernels.padded, kernels.banded):
        out = attend(*low, band, None)
        assert out.dtype == dtype
        ours = torch.autograd.grad(out.sum(), low)
        for a, b in zip((out, *ours), (expected, *theirs), strict=True):
            assert close(a, array(b), tolerance)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_a_window_of_at_least_the_longest_example_changes_nothing(
    lengths: list[int], seed: int
) -> None:
    if not sum(lengths):
        return
    band = Band(offsets_of(torch.tensor(lengths)), max(lengths))
    inputs = heads_of(band, 4, seed)
    expected = kernels.padded(*inputs, band, None)
    for window in (max(lengths), max(lengths) + 1, 500):
        narrow = band._replace(window=window)
        for attend in (kernels.padded, kernels.banded):
            assert torch.allclose(attend(*inputs, narrow, None), expected, rtol=0, atol=1e-12)


def test_no_rows_at_all_give_no_output_and_zero_gradients() -> None:
    band = Band(torch.zeros(3, dtype=torch.int64), 0)
    inputs = [torch.zeros(0, 2, 4).requires_grad_() for _ in range(3)]
    out = attention(*inputs, mask=band)
    assert out.shape == (0, 2, 4)
    assert all(grad.shape == (0, 2, 4) for grad in torch.autograd.grad(out.sum(), inputs))
    # Queries of nobody: keys and values get zeros and not nothing.
    asked = Band(torch.tensor([0, 3]), 3, queries=torch.zeros(0, dtype=torch.int64))
    key = torch.ones(3, 2, 4, requires_grad=True)
    attention(inputs[0], key, key, mask=asked).sum().backward()
    assert key.grad is not None and not key.grad.any()


def test_a_band_leaves_no_room_for_another_causality() -> None:
    band = Band(torch.tensor([0, 2]), 2)
    rows = torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match="leave causal out"):
        attention(rows, rows, rows, mask=band, causal=True)


# What each kernel is given -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=40, deadline=None)
@given(band=bands().filter(lambda band: band.offsets[-1] > 0), seed=st.integers(0, 2**31))
def test_flex_attention_is_given_the_rule_of_the_band(band: Band, seed: int) -> None:
    # Without a GPU FlexAttention computes plainly, from the rule alone, and has no backward.
    query, key, value = (part.detach() for part in heads_of(band, 16, seed))
    with torch.no_grad():
        out = kernels.flex(query, key, value, band, 0.7)
    assert close(out, by_rows(query, key, value, band, 0.7), 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 400), min_size=1, max_size=5),
    window=st.one_of(st.none(), st.integers(1, 300)),
)
def test_flex_attention_visits_every_block_with_a_visible_pair_and_few_others(
    lengths: list[int], window: int | None
) -> None:
    num_rows = sum(lengths)
    mutual = 3 if window is None else 0
    band = Band(offsets_of(torch.tensor(lengths)), max(lengths), window, mutual)
    visited = kernels.flex_blocks(band, num_rows).to_dense()[0, 0].bool()
    missing = -num_rows % 128
    pairs = torch.nn.functional.pad(band.mask(num_rows), (0, missing, 0, missing))
    needed = pairs.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(3).any(1)
    assert visited[needed].all()
    if window is not None:
        assert int(visited.sum(1).max()) <= 2 + window // 128 + 1


class FlashStandIn(ModuleType):
    """A `flash_attn` that does by loops what that package's documentation promises."""

    __version__ = "0.0.stand-in"

    @staticmethod
    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        expected = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
        assert set(given) == expected | {"softmax_scale", "causal", "window_size"}
        assert given["causal"] and q.is_contiguous()
        edges_q, edges_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        assert edges_q.dtype == edges_k.dtype == torch.int32
        assert int(edges_q.diff().max()) <= given["max_seqlen_q"]
        assert int(edges_k.diff().max()) <= given["max_seqlen_k"]
        left, right = given["window_size"]
        parts = []
        for (q0, q1), (k0, k1) in zip(
            itertools.pairwise(edges_q.tolist()), itertools.pairwise(edges_k.tolist()), strict=True
        ):
            # Queries are lined up with the last keys.
            place = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            keys = torch.arange(k1 - k0)
            seen = keys <= place
            if left >= 0:
                seen = seen & (keys >= place - left) & (keys <= place + right)
            heads = [x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
            scale = given["softmax_scale"]
            parts.append(reference_attention(*heads, mask=seen, scale=scale).transpose(0, 1))
        return torch.cat(parts)


@settings(max_examples=60, deadline=None)
@given(
    band=bands(flexible=False).filter(lambda band: band.offsets[-1] > 0),
    seed=st.integers(0, 2**31),
)
def test_flash_attn_is_called_as_it_documents(band: Band, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", FlashStandIn("flash_attn"))
        compare(kernels.flash, band, seed)


# Which kernel is chosen --------------------------------------------------------------------------


def test_kernels_are_chosen_by_device_format_and_band(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = torch.tensor([0, 512])
    full, windowed = Band(offsets, 512), Band(offsets, 512, 32)
    half = torch.bfloat16
    monkeypatch.setattr(kernels, "flash_version", lambda: None)
    assert kernel_for(CPU, torch.float32, 32, full) == "padded"
    assert kernel_for(CPU, torch.float32, 32, windowed) == "banded"
    assert kernel_for(CPU, torch.float32, 32, Band(offsets, 100, 32)) == "padded"
    assert kernel_for(GPU, half, 32, full) == "flex"
    assert kernel_for(GPU, half, 32, windowed) == "banded"
    assert kernel_for(GPU, half, 8, full) == "padded"
    assert kernel_for(GPU, half, 32, Band(offsets, 40)) == "padded"
    monkeypatch.setattr(kernels, "flash_version", lambda: "2.8.0")
    assert kernel_for(GPU, half, 32, full) == kernel_for(GPU, half, 32, windowed) == "flash"
    assert kernel_for(GPU, torch.float32, 32, full) == "flex"
    # flash-attn has no rows that see ahead.
    assert kernel_for(GPU, half, 32, full._replace(num_mutual=3)) == "flex"
    assert kernel_for(CPU, half, 32, full) == "padded"


def test_what_will_run_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "flash_version", lambda: None)
    text = describe(CPU, torch.float32, 32)
    assert "\n" not in text and "flash-attn not installed" in text and "need a GPU" in text
    monkeypatch.setattr(kernels, "flash_version", lambda: "2.8.0")
    assert "long streams by flash-attn" in describe(GPU, torch.float16, 64)
    assert "needs float16 or bfloat16" in describe(GPU, torch.float32, 64)


def test_what_has_attended_is_noted_once_with_the_kernel_that_took_it() -> None:
    kernels.forget()
    rows = torch.randn(6, 2, 4)
    band = Band(torch.tensor([0, 6]), 6)
    packed = "scaled_dot_product_attention on padded rows on cpu in float32"
    flash = "scaled_dot_product_attention (flash kernel) on cpu in float32"
    for _ in range(2):
        attention(rows, rows, rows, mask=band)
    assert kernels.in_use() == [flash, packed]
    assert kernels.news() == [flash, packed]
    with torch.autocast("cpu", torch.bfloat16):
        attention(*torch.randn(3, 1, 2, 5, 4))
    # Values of another width than the keys', which no flash kernel of a CPU takes.
    attention(*torch.randn(2, 1, 2, 5, 4), torch.randn(1, 2, 5, 8))
    assert kernels.news() == [
        "scaled_dot_product_attention (flash kernel) on cpu in bfloat16",
        "scaled_dot_product_attention (math kernel) on cpu in float32",
    ]
    assert not kernels.news()
    kernels.forget()
    assert not kernels.in_use()


# On a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 1, 32, 600])
@pytest.mark.parametrize("name", ["flash", "flex", "banded", "padded"])
def test_gpu_kernels_equal_the_reference(name: str, window: int | None) -> None:
    if name == "flash" and kernels.flash_version() is None:
        pytest.skip("needs the flash-attn package")
    if name == "banded" and window is None:
        pytest.skip("needs a window")
    dtype, tolerance = (torch.bfloat16, 2e-2) if name == "flash" else (torch.float32, 1e-2)
    attend: Attend = getattr(kernels, name)
    band = Band(offsets_of(torch.tensor([512, 0, 1, 77], device=GPU)), 512, window)
    inputs = [part.to(GPU, dtype).requires_grad_() for part in heads_of(band, 32, 0)]
    high = [part.detach().double().requires_grad_() for part in inputs]
    expected = reference_attention(*high, mask=band)
    theirs = torch.autograd.grad(expected.sum(), high)
    out = attend(*inputs, band, None)
    ours = torch.autograd.grad(out.sum(), inputs)
    for a, b in zip((out, *ours), (expected, *theirs), strict=True):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)

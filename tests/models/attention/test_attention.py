# SPDX-License-Identifier: MIT
"""Attention: kernels equal the reference, masks show exactly the published pairs."""

from __future__ import annotations

import pytest
import torch

from models.attention.attention import (
    attention,
    bfts_masks,
    bidirectional_static,
    causal_mask,
    discard_static,
    hide_padding,
    isolate_candidates,
    reference_attention,
    sliding_mask,
)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "additive", "ragged"])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_kernel_equals_reference_in_value_and_gradient(kind: str, value_dim: int) -> None:
    q, k = torch.randn(2, 3, 2, 7, 8, dtype=torch.float64).unbind()
    v = torch.randn(3, 2, 7, value_dim, dtype=torch.float64)
    mask = None
    if kind == "bool":
        mask = sliding_mask(7, 3)
    elif kind == "additive":
        mask = torch.randn(3, 1, 7, 7, dtype=torch.float64)
    elif kind == "ragged":
        valid = torch.arange(7) < torch.tensor([7, 1, 0])[:, None]
        mask = hide_padding(causal_mask(7), valid)
    results = []
    for attend in (attention, reference_attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, mask=mask, causal=kind == "causal", scale=0.3)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, expected in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours, expected, atol=1e-12)


def test_default_scale_is_one_over_the_root_of_the_width() -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 16).unbind()
    expected = torch.softmax(q @ k.mT / 4, -1) @ v
    assert torch.allclose(attention(q, k, v), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=dtype).requires_grad_() for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = attention(q, k, v, mask=mask)
    out.float().sum().backward()
    assert out[0, 0, 2].abs().max() == 0
    for x in (q, k, v):
        assert x.grad is not None and torch.isfinite(x.grad).all()


def test_bfts_shows_the_published_number_of_pairs() -> None:
    masks = bfts_masks(3, 12, 2, (6, 3))
    assert [int(mask.sum()) for mask in masks] == [78, 78, 45, 30]
    assert masks[2].sum(1).tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert masks[3].sum(1).tolist() == [1, 2, 3, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    # The 1-based reading would already discard in the last full layer.
    assert int(discard_static(causal_mask(12), 3).sum()) == 51


def test_window_counts_the_token_itself_and_may_exceed_the_stream() -> None:
    assert torch.equal(sliding_mask(5, 1), torch.eye(5, dtype=torch.bool))
    assert torch.equal(sliding_mask(5, 9), causal_mask(5))
    assert sliding_mask(0, 3).shape == (0, 0)


def test_separator_stays_visible_when_static_tokens_are_discarded() -> None:
    mask = discard_static(causal_mask(6), 2)
    assert mask[5].tolist() == [False, False, True, True, True, True]
    assert mask[1].tolist() == [True, True, False, False, False, False]


def test_candidates_see_the_context_and_themselves_only() -> None:
    mask = isolate_candidates(causal_mask(5), 3)
    assert mask[4].tolist() == [True, True, False, False, True]
    assert mask[2].tolist() == [True, True, True, False, False]


def test_static_tokens_may_see_each_other_both_ways() -> None:
    mask = bidirectional_static(causal_mask(4), 2)
    assert mask[0].tolist() == [True, True, False, False]
    assert mask[2].tolist() == [True, True, True, False]

# SPDX-License-Identifier: MIT
"""What the equations imply, each at its own tolerance, with a witness that the test could fail."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.diagnostics.rank import effective_rank, singular_values, stable_rank
from models.spectral.spectral import canonical_signs, position_bias, soften
from models.spectral.spectrum import decompose
from models.towers.specformer import SpecFormerConfig, SpecFormerLayer

DOUBLE = torch.float64


def layer_of(num_tokens: int, dim: int, **settings: Any) -> SpecFormerLayer:
    return SpecFormerLayer(SpecFormerConfig(**settings), num_tokens, dim).double()


def logits(layer: SpecFormerLayer, tokens: Tensor) -> Tensor:
    """The logits up to a constant a row: the logarithm of the attention map."""
    maps: list[Tensor] = []

    def keep(module: object, args: object, out: Tensor) -> None:
        maps.append(out)

    handle = layer.attention_map.register_forward_hook(keep)
    layer._attend(tokens)
    handle.remove()
    return maps[0].detach().double().log()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scale", ["none", "rsqrt_dim"])
@pytest.mark.parametrize("shape", [(8, 32), (39, 312)])
def test_one_dot_product_of_concatenations_is_the_sum_of_three_terms(
    shape: tuple[int, int], scale: str
) -> None:
    layer = layer_of(*shape, ffn_ratio=0.1, logit_scale=scale)
    tokens = torch.randn(2, *shape, dtype=DOUBLE)
    tokens = torch.nn.functional.layer_norm(tokens, shape[-1:])
    one = layer_of(*shape, ffn_ratio=0.1, logit_scale=scale, score_form="concat")
    one.load_state_dict(layer.state_dict())
    gap = (one._attend(tokens) - layer._attend(tokens)).abs().max()
    # Logits reach hundreds without 1/√D, and rounding with them.
    largest = float(logits(layer, tokens).abs().amax())
    assert gap < 1e-12 * max(1.0, largest)


def test_softened_tokens_and_scores_do_not_see_the_signs_of_vectors() -> None:
    tokens = torch.randn(4, 8, 32, dtype=DOUBLE)
    spectrum = decompose(tokens)
    signs = torch.where(torch.rand(4, 1, 8) < 0.5, -1.0, 1.0).double()
    flipped = spectrum._replace(vectors=spectrum.vectors * signs)
    star, sigma = soften(tokens, 0.5, spectrum)
    other, _ = soften(tokens, 0.5, flipped)
    assert relative(star, other) < 1e-12
    beta = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)
    for kind in ("rank1", "diagonal"):
        bias = position_bias(kind, tokens, sigma, spectrum, beta)
        assert relative(position_bias(kind, tokens, sigma, flipped, beta), bias) < 1e-9
    everything = spectrum._replace(vectors=-spectrum.vectors)
    bias = position_bias("rank1", tokens, sigma, spectrum, beta)
    assert relative(position_bias("rank1", tokens, sigma, everything, beta), bias) < 1e-9
    # The witness: without the rule one flipped vector changes the bias by its own size.
    u, weights = spectrum.vectors, sigma[:, :1] * (0.2 + 0.5 * sigma / sigma[:, :1])
    raw = (u * weights[:, None]).sum(-1)
    raw_flipped = (u * signs * weights[:, None]).sum(-1)
    outer, outer_flipped = (p[:, :, None] * p[:, None] for p in (raw, raw_flipped))
    assert relative(outer_flipped, outer) > 0.5


def test_equal_query_and_key_maps_make_scores_a_power_of_the_gram_matrix() -> None:
    layer = layer_of(6, 16, alpha=0.0, gamma=0.0)
    with torch.no_grad():
        for weight in (layer.query, layer.key):
            assert weight is not None
            weight.copy_(torch.eye(16))
    tokens = torch.randn(3, 6, 16, dtype=DOUBLE)
    values, u = torch.linalg.eigh(tokens @ tokens.mT)
    expected = ((u * values.sqrt()[:, None]) @ u.mT).softmax(-1).log()
    assert (logits(layer, tokens) - expected).abs().max() < 1e-12


def test_zero_singular_values_have_a_finite_gradient_and_by_an_svd_they_have_none() -> None:
    tokens = torch.randn(3, 6, 16, dtype=DOUBLE)
    tokens[:, 1:3] = 0.0
    tokens[1] = 0.0
    ours = tokens.clone().requires_grad_()
    soften(ours, 0.5, decompose(ours))[0].square().sum().backward()
    assert ours.grad is not None and torch.isfinite(ours.grad).all()
    theirs = tokens.clone().requires_grad_()
    u, s, vt = torch.linalg.svd(theirs, full_matrices=False)
    (u * s.sqrt()[:, None] @ vt).square().sum().backward()
    assert theirs.grad is not None and not torch.isfinite(theirs.grad).all()


def test_a_constant_feature_and_twin_tokens_leave_every_gradient_finite_in_half_precision() -> None:
    tokens = torch.randn(4, 6, 16)
    tokens[..., 3] = 2.0
    tokens[:, 4] = tokens[:, 5]
    for dtype in (torch.bfloat16, torch.float16):
        leaf = tokens.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            star, sigma = soften(leaf, 0.5, decompose(leaf))
        (star.square().sum() + sigma.sum()).backward()
        assert star.dtype == torch.float32
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


def wave(function: Any, factor: float) -> Tensor:
    return torch.tensor([function(factor * k) for k in range(1, 17)], dtype=DOUBLE).view(4, 4)


def test_vector_a_spectrum_scores_and_effective_ranks() -> None:
    tokens = torch.tensor([[[1.0, 2, 0, -1], [0, 1, 3, 1], [2, 0, 1, 1]]], dtype=DOUBLE)
    vectors = decompose(tokens).vectors
    u = (vectors * canonical_signs(vectors)[:, None])[0]
    expected = torch.tensor(
        [
            [0.1795174283, 0.9666064122, -0.1828812098],
            [0.8569062324, -0.244955502, -0.4535510015],
            [0.4832030648, 0.075291739, 0.8722648406],
        ],
        dtype=DOUBLE,
    )
    assert (u - expected).abs().max() < 1e-8
    star = soften(tokens, 0.5, decompose(tokens))[0][0]
    scores = (star @ wave(math.sin, 1.0)) @ (star @ wave(math.cos, 1.0)).mT
    expected = torch.tensor(
        [
            [-0.0465542004, 2.3864476734, -2.5595983119],
            [-1.4896111404, -0.2404787442, 3.0342697354],
            [1.7381767203, -4.1672636835, 1.3912131708],
        ],
        dtype=DOUBLE,
    )
    assert (scores - expected).abs().max() < 1e-8
    spatial = (tokens[0] @ wave(math.sin, 2.0)) @ (tokens[0] @ wave(math.cos, 2.0)).mT
    expected = torch.tensor(
        [
            [1.6881358683, -11.4511819664, 6.2215240979],
            [17.5911548505, -3.6591337869, -7.9698173615],
            [-12.0576890327, 8.9903088543, 1.3829519457],
        ],
        dtype=DOUBLE,
    )
    assert (spatial - expected).abs().max() < 1e-8
    sigma = singular_values(tokens)
    assert abs(float(effective_rank(sigma)) - 2.8915560099) < 1e-8
    assert abs(float(effective_rank(sigma)) / 3 - 0.9638520033) < 1e-8
    assert abs(float(stable_rank(sigma)) - 1.7081239303) < 1e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_within_a_hundredth_of_float64_ones(dtype: torch.dtype) -> None:
    layer = SpecFormerLayer(SpecFormerConfig(logit_scale="rsqrt_dim"), 12, 32)
    tokens = torch.randn(16, 12, 32)
    tokens = torch.nn.functional.layer_norm(tokens, (32,))
    with torch.autocast("cpu", dtype=dtype):
        half = logits(layer, tokens)
    exact = logits(layer.double(), tokens.double())
    assert relative(half, exact) < 1e-2


def test_scores_of_half_a_batch_are_those_of_the_whole() -> None:
    # Two ranks with half a batch each score as one with all of it, collapsed examples or not.
    tower = SpecFormerConfig(num_layers=2).build(6, 16)
    tokens = torch.randn(32, 6, 16)
    tokens[5, 1:] = tokens[5, :1] + 1e-4 * torch.randn(5, 16)
    parts = torch.cat([tower(half) for half in tokens.chunk(2)])
    assert (tower(tokens) - parts).abs().max() < 1e-4

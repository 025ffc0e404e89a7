# SPDX-License-Identifier: MIT
"""A SpecFormer layer against equations 16-29 written out with an SVD, for 200 random layers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from models.towers.specformer import SpecFormerConfig, SpecFormerLayer

DOUBLE = torch.float64
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@st.composite
def layers(draw: st.DrawFn) -> tuple[SpecFormerLayer, Tensor]:
    """A float64 layer with random settings and weights, and (2, T, D) tokens for it."""
    num_tokens, dim = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    chosen: dict[str, Any] = {
        "alpha": draw(st.sampled_from([0.0, 1e-3, 0.1])),
        "gamma": draw(st.sampled_from([0.0, 0.8])),
        "logit_scale": draw(st.sampled_from(["none", "rsqrt_dim"])),
        "softening": draw(st.sampled_from(["power", "relative", "none"])),
        "value": draw(st.sampled_from(["tokens", "projected", "softened"])),
        "position_bias": draw(st.sampled_from(["rank1", "diagonal", "identity", "none"])),
        "softened_scores": True,
        "ffn_ratio": draw(st.sampled_from([1.0, 2.0])),
        "floor": 1e-16,
    }
    if chosen["position_bias"] in ("rank1", "none"):
        chosen["score_form"] = draw(st.sampled_from(["terms", "concat"]))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer = SpecFormerLayer(SpecFormerConfig(**chosen), num_tokens, dim).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    tokens = torch.randn(2, num_tokens, dim, dtype=DOUBLE)
    return layer, tokens


def reference(layer: SpecFormerLayer, tokens: Tensor) -> Tensor:
    """The layer's equations, one after the other."""
    config = layer.config
    u, s, vt = torch.linalg.svd(tokens, full_matrices=False)
    s1 = s[:, :1]
    star = tokens
    if layer.a is not None:  # 16-18
        tau = torch.sigmoid(layer.a)
        powered = s**tau if config.softening == "power" else s1 * (s / s1) ** tau
        star = u * powered[:, None] @ vt
    scale = tokens.shape[-1] ** -0.5 if config.logit_scale == "rsqrt_dim" else 1.0
    assert layer.query is not None and layer.key is not None
    logits = scale * (star @ layer.query) @ (star @ layer.key).mT  # 19-21
    if config.has_position:  # 22-26
        bias = u @ u.mT
        if layer.beta is not None:
            f = layer.beta[0] + layer.beta[1] * s / s1 + layer.beta[2] * (s / s1) ** 2
            signed = u * u.sum(1, keepdim=True).sign()
            p = (signed * (s1 * f)[:, None]).sum(-1)
            bias = p[:, :, None] * p[:, None]
            if config.position_bias == "diagonal":
                bias = u * (s1 * f)[:, None] ** 2 @ u.mT
        logits = logits + config.alpha * bias
    if layer.spatial_query is not None and layer.spatial_key is not None:  # 26-27
        spatial = (tokens @ layer.spatial_query) @ (tokens @ layer.spatial_key).mT
        logits = logits + config.gamma * scale * spatial
    value = star if config.value == "softened" else tokens
    value = value if layer.value is None else value @ layer.value
    z = torch.softmax(logits, -1) @ value + tokens
    first, second = layer.attention_norm, layer.ffn_norm
    z = functional.layer_norm(z, z.shape[-1:], first.weight, first.bias, 1e-5)
    up, down = layer.ffn.up, layer.ffn.down
    assert up.bias is not None and down.bias is not None
    hidden = functional.gelu(torch.einsum("btd,tdm->btm", z, up.weight) + up.bias)
    out = z + torch.einsum("btm,tmd->btd", hidden, down.weight) + down.bias  # 28-29
    return functional.layer_norm(out, out.shape[-1:], second.weight, second.bias, 1e-5)


def well_posed(tokens: Tensor) -> bool:
    """Whether vectors and their signs are defined well enough to be compared at 1e-8."""
    u, s, _ = torch.linalg.svd(tokens, full_matrices=False)
    ratio = s / s[:, :1]
    apart = (ratio[:, :-1] - ratio[:, 1:] > 1e-3).all()
    return bool(apart and (ratio > 1e-3).all() and (u.sum(1).abs() > 1e-3).all())


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(drawn=layers())
def test_a_layer_follows_its_equations(drawn: tuple[SpecFormerLayer, Tensor]) -> None:
    layer, tokens = drawn
    assume(well_posed(tokens))
    # With one feature a LayerNorm's input is constant and its output is its bias.
    assert (layer(tokens) - reference(layer, tokens)).abs().max() < 1e-8


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(drawn=layers(), probe=st.integers(0, 2**31))
def test_a_layers_gradient_is_that_of_its_equations(
    drawn: tuple[SpecFormerLayer, Tensor], probe: int
) -> None:
    layer, tokens = drawn
    assume(well_posed(tokens))
    # Rank-one vectors carry no gradient by design; every other term's must be whole.
    assume(not (layer.config.has_position and layer.config.position_bias == "rank1"))
    weights = torch.randn(
        tokens.shape, generator=torch.Generator().manual_seed(probe), dtype=DOUBLE
    )
    leaf = tokens.requires_grad_()
    inputs = [leaf, *layer.parameters()]
    ours = torch.autograd.grad((layer(leaf) * weights).sum(), inputs, allow_unused=True)
    # Autograd through an SVD is right where singular values are well apart.
    theirs = torch.autograd.grad((reference(layer, leaf) * weights).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert a is not None
        assert (a - b).abs().max() <= 1e-6 * (1.0 + b.abs().max())

# SPDX-License-Identifier: MIT
"""Layers: per-token products equal a loop over tokens, the gated unit its published special
cases."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from models.layers import MLP, PerTokenFFN, PerTokenGLU, PerTokenLinear, SwiGLU, make_norm

DOUBLE = torch.float64


@pytest.mark.parametrize("bias", [True, False])
def test_per_token_linear_equals_one_linear_a_token(bias: bool) -> None:
    layer = PerTokenLinear(4, 3, 5, bias).double()
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(4, 6, 3, dtype=DOUBLE)
    for t in range(4):
        expected = x[t] @ layer.weight[t]
        if layer.bias is not None:
            expected = expected + layer.bias[t]
        assert torch.allclose(layer(x)[t], expected)


def test_per_token_ffn_maps_each_token_by_its_own_weights() -> None:
    ffn = PerTokenFFN(3, 4, 8).double()
    x = torch.randn(5, 3, 4, dtype=DOUBLE)
    out = ffn(x)
    hidden = functional.gelu(x[:, 1] @ ffn.up.weight[1] + ffn.up.bias[1])  # pyright: ignore
    assert torch.allclose(out[:, 1], hidden @ ffn.down.weight[1])
    moved = x.clone()
    moved[:, 0] += 1
    assert torch.allclose(ffn(moved)[:, 1:], out[:, 1:], rtol=0, atol=1e-12)


def test_gated_unit_with_a_constant_gate_is_a_gelu_feed_forward() -> None:
    ffn = PerTokenFFN(3, 4, 8).double()
    glu = PerTokenGLU(3, 4, 8, bias=True).double()
    with torch.no_grad():
        glu.residual.weight.zero_()
        glu.lift.weight[..., :8] = ffn.up.weight
        glu.lift.weight[..., 8:] = 0
        glu.lift.bias[..., 8:] = 1  # pyright: ignore[reportOptionalSubscript]
        glu.compress.weight.copy_(ffn.down.weight)
    x = torch.randn(5, 3, 4, dtype=DOUBLE)
    # The gated unit's product is twice as wide: another kernel, other rounding.
    assert torch.allclose(glu(x.transpose(0, 1)).transpose(0, 1), ffn(x), rtol=0, atol=1e-12)


def test_released_gated_unit_without_its_extra_branch_is_the_paper_unit() -> None:
    paper = PerTokenGLU(3, 4, 8).double()
    code = PerTokenGLU(3, 4, 8, bias=True, extra_gate=True).double()
    x = torch.randn(3, 5, 4, dtype=DOUBLE)
    with torch.no_grad():
        code.lift.weight[..., :16] = paper.lift.weight
        code.compress.weight.copy_(paper.compress.weight)
        code.residual.weight.copy_(paper.residual.weight)
        assert (code(x) - paper(x)).abs().max() > 0.1
        code.lift.weight[..., 16:] = 0
    assert torch.allclose(code(x), paper(x), rtol=0, atol=1e-14)


def test_fused_maps_start_with_the_variance_of_separate_ones() -> None:
    glu = PerTokenGLU(2, 100, 300, extra_gate=True)
    assert abs(float(glu.lift.weight.detach().std()) - (2 / 400) ** 0.5) < 1e-3
    assert abs(float(SwiGLU(100, 300).lift.weight.detach().std()) - (2 / 400) ** 0.5) < 1e-3


def test_swiglu_follows_its_equation() -> None:
    layer = SwiGLU(4, 6).double()
    x = torch.randn(7, 4, dtype=DOUBLE)
    w1, w2 = layer.lift.weight.T.split(6, dim=1)
    expected = (functional.silu(x @ w1) * (x @ w2)) @ layer.compress.weight.T
    assert torch.allclose(layer(x), expected)


def test_mlp_reports_its_output_width_and_is_the_identity_without_units() -> None:
    x = torch.randn(2, 5)
    mlp = MLP(5, (7, 3))
    assert mlp.output_dim == 3 and mlp(x).shape == (2, 3) and bool((mlp(x) >= 0).all())
    assert torch.equal(MLP(5, ())(x), x) and MLP(5, ()).output_dim == 5


def test_dropout_acts_in_training_only() -> None:
    mlp = MLP(5, (64,), dropout=0.5)
    x = torch.randn(3, 5)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))


def test_norms_are_the_named_ones() -> None:
    x = torch.randn(2, 3, 8)
    assert torch.allclose(make_norm("layer", 8, 1e-5)(x), functional.layer_norm(x, (8,)))
    rms = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(make_norm("rms", 8, 1e-6)(x), rms, atol=1e-6)
    assert torch.equal(make_norm("none", 8, 1e-6)(x), x)

# SPDX-License-Identifier: MIT
"""RankMixer: equal to a derivation a token at a time, its published sizes, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.baselines.tokens.rankmixer import RankMixer, RankMixerConfig, RankMixerLayer, mix_tokens
from models.layers import PerTokenFFN, PerTokenGLU
from tests.support.derivation import (
    Array,
    array,
    check_gradients,
    close,
    gelu,
    layer_norm,
    randomize,
    relu,
)

DOUBLE = torch.float64


def mixed(x: Array) -> Array:
    """Token h of the output: the h-th head of every token, in the order of the tokens."""
    num_tokens, dim = x.shape
    width = dim // num_tokens
    return np.stack(
        [
            np.concatenate([token[head * width : (head + 1) * width] for token in x])
            for head in range(num_tokens)
        ]
    )


def fed(x: Array, ffn: torch.nn.Module, t: int) -> Array:
    if isinstance(ffn, PerTokenGLU):
        lift, bias = array(ffn.lift.weight)[t], array(ffn.lift.bias)[t]
        lifted = x @ lift + bias
        hidden = gelu(lifted[: ffn.hidden]) * lifted[ffn.hidden :]
        down = hidden @ array(ffn.compress.weight)[t] + array(ffn.compress.bias)[t]
        return down + x @ array(ffn.residual.weight)[t] + array(ffn.residual.bias)[t]
    assert isinstance(ffn, PerTokenFFN)
    hidden = x @ array(ffn.up.weight)[t] + array(ffn.up.bias)[t]
    hidden = relu(hidden) if ffn.activation == "relu" else gelu(hidden)
    return hidden @ array(ffn.down.weight)[t] + array(ffn.down.bias)[t]


def derived(tokens: Array, tower: RankMixer) -> Array:
    out = []
    for x in tokens:
        for layer in tower.layers:
            assert isinstance(layer, RankMixerLayer)
            s = np.stack([layer_norm(row, layer.mixing_norm) for row in mixed(x) + x])
            rows = [fed(row, layer.ffn, t) + row for t, row in enumerate(s)]
            x = np.stack([layer_norm(row, layer.ffn_norm) for row in rows])
        out.append(x.mean(0) if tower.pooling == "mean" else x.reshape(-1))
    return np.stack(out)


@st.composite
def cases(draw: st.DrawFn) -> tuple[RankMixerConfig, torch.Tensor, int]:
    tokens = draw(st.integers(1, 4))
    config = RankMixerConfig(
        num_layers=draw(st.integers(1, 3)),
        expansion=draw(st.sampled_from([1.0, 2.5])),
        ffn=draw(st.sampled_from(["gelu", "relu", "glu"])),
        pooling=draw(st.sampled_from(["mean", "flatten"])),
    )
    seed = draw(st.integers(0, 2**31))
    size = (draw(st.integers(1, 3)), tokens, tokens * draw(st.integers(2, 3)))
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** draw(st.integers(-2, 2))
    return config, torch.randn(size, dtype=DOUBLE, generator=generator) * scale, seed


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_tower_equals_the_derivation(case: tuple[RankMixerConfig, torch.Tensor, int]) -> None:
    config, tokens, seed = case
    tower = config.build(*tokens.shape[1:]).double()
    randomize(tower, seed)
    out = tower(tokens)
    assert out.shape == (len(tokens), tower.output_dim)
    assert close(out, derived(array(tokens), tower))


@pytest.mark.parametrize("ffn", ["gelu", "glu"])
def test_gradients_of_inputs_and_weights_equal_finite_differences(ffn: Any) -> None:
    tower = RankMixerConfig(num_layers=2, expansion=1, ffn=ffn).build(2, 4).double()
    randomize(tower, 1)
    torch.manual_seed(0)
    check_gradients(tower, lambda x: (x,), torch.randn(2, 2, 4, dtype=DOUBLE))


def test_mixing_is_the_published_permutation_and_its_own_inverse() -> None:
    order = [0, 1, 6, 7, 12, 13, 2, 3, 8, 9, 14, 15, 4, 5, 10, 11, 16, 17]
    tokens = torch.arange(18.0).view(1, 3, 6)
    assert mix_tokens(tokens).flatten().tolist() == order
    assert torch.equal(mix_tokens(mix_tokens(tokens)), tokens)


@pytest.mark.parametrize(
    ("token_dim", "num_tokens", "expansion", "published"),
    [(768, 16, 2.8, 107e6), (1536, 32, 3.6, 1.1e9)],
)
def test_the_published_sizes_hold_two_k_l_t_d_squared_weights(
    token_dim: int, num_tokens: int, expansion: float, published: float
) -> None:
    config = RankMixerConfig(num_layers=2, expansion=expansion)
    with torch.device("meta"):
        tower = config.build(num_tokens, token_dim)
    hidden = round(expansion * token_dim)
    matrices = 2 * 2 * num_tokens * token_dim * hidden
    biases = 2 * num_tokens * (hidden + token_dim)
    total = sum(parameter.numel() for parameter in tower.parameters())
    assert total == matrices + biases + 2 * 2 * 2 * token_dim
    assert total == pytest.approx(published, rel=0.02)


def test_one_token_reaches_all_tokens_in_one_layer() -> None:
    torch.manual_seed(0)
    tower = RankMixerConfig(num_layers=1, pooling="flatten").build(4, 8).double()
    jacobian = torch.autograd.functional.jacobian(tower, torch.randn(1, 4, 8, dtype=DOUBLE))
    assert isinstance(jacobian, torch.Tensor)
    touched = jacobian.view(4, 8, 4, 8).abs().amax((1, 3)) > 1e-12
    assert bool(touched.all())


@pytest.mark.parametrize(("tokens", "dim"), [(15, 26), (16, 24)])
def test_tokens_that_do_not_divide_the_width_are_refused_with_what_would(
    tokens: int, dim: int
) -> None:
    with pytest.raises(ValueError, match="must divide their width") as error:
        RankMixerConfig().build(tokens, dim)
    message = str(error.value)
    assert f"got {tokens} tokens of width {dim}" in message
    assert f"multiple of {tokens}" in message and "model.tokenizer.num_tokens" in message


@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 3, 9), (2, 18)])
def test_tokens_of_another_schema_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"built for tokens of shape \(B, 3, 6\), got") as error:
        RankMixerConfig().build(3, 6)(torch.randn(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"expansion": 0.0}, "expansion positive"),
        ({"ffn": "swish"}, "ffn must be one of gelu, relu, glu"),
    ],
)
def test_settings_without_meaning_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankMixerConfig(**values)

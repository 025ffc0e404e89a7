# SPDX-License-Identifier: MIT
"""SpecFormer: the published numbers, the equivalences between its forms, and its failure modes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.spectral import spectral
from models.towers.specformer import SpecFormer, SpecFormerConfig, SpecFormerLayer

DOUBLE = torch.float64


def layer_of(num_tokens: int = 6, dim: int = 16, **settings: Any) -> SpecFormerLayer:
    layer = SpecFormerLayer(SpecFormerConfig(**settings), num_tokens, dim).double()
    if layer.beta is not None:
        with torch.no_grad():
            layer.beta.copy_(torch.tensor([0.2, 0.5, 0.3]))
    return layer


def like(layer: SpecFormerLayer, **settings: Any) -> SpecFormerLayer:
    """The same weights under other settings."""
    config = dataclasses.replace(layer.config, **settings)
    other = SpecFormerLayer(config, layer.ffn.up.weight.shape[0], layer.ffn.up.weight.shape[1])
    other.double().load_state_dict(layer.state_dict(), strict=False)
    return other


def waves(function: Any, offset: float, factor: float = 1.0) -> Tensor:
    return torch.tensor(
        [[function(factor * (1 + i * 4 + j) + offset) for j in range(4)] for i in range(4)],
        dtype=DOUBLE,
    )


def vector_a() -> tuple[SpecFormerLayer, Tensor]:
    layer = layer_of(3, 4)
    with torch.no_grad():
        assert layer.query is not None and layer.key is not None
        assert layer.spatial_query is not None and layer.spatial_key is not None
        layer.query.copy_(waves(math.sin, 0))
        layer.key.copy_(waves(math.cos, 0))
        layer.spatial_query.copy_(waves(math.sin, 0, 2.0))
        layer.spatial_key.copy_(waves(math.cos, 0, 2.0))
    return layer, torch.tensor([[[1.0, 2, 0, -1], [0, 1, 3, 1], [2, 0, 1, 1]]], dtype=DOUBLE)


def test_vector_a_attention_output_and_map() -> None:
    layer, tokens = vector_a()
    maps: list[Any] = []
    layer.attention_map.register_forward_hook(lambda module, args, out: maps.append(out))
    out = layer._attend(tokens)
    expected = torch.tensor(
        [
            [1.7532017949, 0.493367511, 0.7535069937, 0.5067087886],
            [0.9999999774, 1.9999996128, 5.538e-7, -0.9999994687],
            [0.7457980161, 0.6271178529, 2.2541795027, 0.9999775187],
        ],
        dtype=DOUBLE,
    )
    assert torch.allclose(out[0], expected, rtol=0, atol=1e-9)
    weights = torch.tensor(
        [
            [0.2466456057, 0.0000762997, 0.7532780946],
            [0.9999997344, 1.441e-7, 1.215e-7],
            [0.0000112406, 0.6270953717, 0.3728933877],
        ],
        dtype=DOUBLE,
    )
    assert torch.allclose(maps[0][0], weights, rtol=0, atol=1e-9)
    normed = torch.tensor([1.0385408643, 0.8425020419, -0.4701815729, -1.4108613333], dtype=DOUBLE)
    assert torch.allclose(layer.attention_norm(out + tokens)[0, 0], normed, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logit_scale": "rsqrt_dim"},
        {"position_bias": "none"},
        {"gamma": 0.0},
        {"softened_scores": False},
        {"value": "projected"},
        {"value": "softened"},
        {"softening": "relative"},
    ],
)
def test_three_terms_equal_one_attention_call(settings: dict[str, Any]) -> None:
    layer = layer_of(**settings)
    tokens = torch.randn(4, 6, 16, dtype=DOUBLE)
    concat = like(layer, score_form="concat")
    a, b = layer(tokens), concat(tokens)
    assert torch.allclose(a, b, rtol=0, atol=1e-11)
    for module in (layer, concat):
        module(tokens).square().mul(torch.arange(16)).sum().backward()
    theirs = dict(concat.named_parameters())
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-8), name  # pyright: ignore[reportArgumentType]


def test_without_softening_and_biases_it_is_standard_attention() -> None:
    layer = layer_of(alpha=0.0, gamma=0.0, softening="none", logit_scale="rsqrt_dim")
    tokens = torch.randn(3, 6, 16, dtype=DOUBLE)
    assert layer.query is not None and layer.key is not None
    logits = (tokens @ layer.query) @ (tokens @ layer.key).mT / 4
    assert torch.allclose(layer._attend(tokens), logits.softmax(-1) @ tokens)
    near_one = like(layer, softening="power")
    assert near_one.a is not None
    with torch.no_grad():
        near_one.a.fill_(40.0)
    assert torch.allclose(near_one._attend(tokens), layer._attend(tokens), atol=1e-12)


def test_scores_follow_equation_21() -> None:
    layer = layer_of(alpha=0.0, gamma=0.0, logit_scale="rsqrt_dim")
    tokens = torch.randn(2, 6, 16, dtype=DOUBLE)
    u, s, vt = torch.linalg.svd(tokens, full_matrices=False)
    assert layer.query is not None and layer.key is not None
    core = s.sqrt()[:, :, None] * (vt @ layer.query @ layer.key.T @ vt.mT) * s.sqrt()[:, None, :]
    expected = (u @ core @ u.mT / 4).softmax(-1) @ tokens
    assert torch.allclose(layer._attend(tokens), expected, atol=1e-11)


def test_identity_position_weights_equal_no_position_bias_up_to_alpha() -> None:
    layer = layer_of()
    tokens = torch.randn(4, 6, 16, dtype=DOUBLE)
    gap = like(layer, position_bias="identity")(tokens) - like(layer, alpha=0.0)(tokens)
    assert gap.abs().max() < 1e-3
    assert (layer(tokens) - like(layer, alpha=0.0)(tokens)).abs().max() > 1e-3


def permuted(layer: SpecFormerLayer, order: Tensor) -> SpecFormerLayer:
    other = like(layer)
    with torch.no_grad():
        for name in ("up", "down"):
            ours, theirs = getattr(layer.ffn, name), getattr(other.ffn, name)
            theirs.weight.copy_(ours.weight[order])
            theirs.bias.copy_(ours.bias[order])
    return other


def test_permuting_tokens_and_their_weights_permutes_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of(alpha=0.1)
    tokens = torch.randn(10, 6, 16, dtype=DOUBLE)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    other = permuted(layer, order)
    assert torch.allclose(other(tokens[:, order]), layer(tokens)[:, order], rtol=0, atol=1e-9)
    # The solver's raw signs must fail, or the test shows nothing.
    monkeypatch.setattr(spectral, "canonical_signs", lambda vectors: torch.ones(6, dtype=DOUBLE))
    assert (other(tokens[:, order]) - layer(tokens)[:, order]).abs().max() > 1e-3


def test_the_factorisation_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(alpha=0.1)
    tokens = torch.randn(8, 6, 16, dtype=DOUBLE)
    expected = layer(tokens)

    def by_svd(tokens: Tensor, *settings: str) -> spectral.Spectrum:
        u, s, _ = torch.linalg.svd(tokens.detach(), full_matrices=False)
        return spectral.Spectrum(s.square(), u, False)

    monkeypatch.setattr("models.towers.specformer.decompose", by_svd)
    assert torch.allclose(layer(tokens), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("position_bias", ["rank1", "diagonal"])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_layer_gradient_equals_finite_differences(
    position_bias: str, shape: tuple[int, int]
) -> None:
    layer = layer_of(
        *shape,
        position_bias=position_bias,
        alpha=0.05,
        ffn_ratio=1,
        through_vectors=position_bias == "rank1",
    )
    tokens = torch.randn(1, *shape, dtype=DOUBLE).requires_grad_()
    names = ["a", "beta", "query", "spatial_key"]
    leaves = [getattr(layer, name).detach().clone().requires_grad_() for name in names]

    def run(tokens: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(names, values, strict=True))
        out = torch.func.functional_call(layer, state, (tokens,))
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (tokens, *leaves), eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["generic", "duplicates", "constant"])
def test_half_precision_is_finite_and_near_full_precision(dtype: torch.dtype, kind: str) -> None:
    tower = SpecFormerConfig(num_layers=2, logit_scale="rsqrt_dim").build(6, 16)
    tokens = torch.randn(8, 6, 16)
    if kind == "duplicates":
        tokens[:, 1] = tokens[:, 0]
    elif kind == "constant":
        tokens[:] = 1.0
    exact = tower(tokens)
    tokens.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = tower(tokens)
    out.float().sum().backward()
    assert (out.float() - exact).abs().max() < 0.05
    for parameter in (tokens, *tower.parameters()):
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


def test_an_example_does_not_see_its_batch_mates() -> None:
    tower = SpecFormerConfig(num_layers=2).build(6, 16)
    tokens = torch.randn(7, 6, 16)
    alone = torch.cat([tower(one[None]) for one in tokens])
    assert torch.allclose(tower(tokens), alone, atol=1e-5)


def test_warmup_uses_the_unsoftened_scores_alone_and_leaves_zero_gradients() -> None:
    config = SpecFormerConfig(num_layers=1)
    tower = config.build(6, 16).double()
    tokens = torch.randn(3, 6, 16, dtype=DOUBLE)
    full = tower(tokens)
    tower.set_warmup(True)
    layer = tower.layers[0]
    assert isinstance(layer, SpecFormerLayer)
    assert layer.spatial_query is not None and layer.spatial_key is not None
    logits = 0.8 * (tokens @ layer.spatial_query) @ (tokens @ layer.spatial_key).mT
    assert torch.allclose(layer._warmup(tokens), logits.softmax(-1) @ tokens)
    assert (tower(tokens) - full).abs().max() > 1e-3
    tower(tokens).sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        if name.split(".")[-1] in ("query", "key", "a", "beta"):
            assert parameter.grad.abs().max() == 0
    tower.set_warmup(False)
    assert torch.equal(tower(tokens), full)


def test_warmup_without_its_term_is_an_error() -> None:
    with pytest.raises(ValueError, match="gamma is 0"):
        SpecFormerConfig(gamma=0.0).build(6, 16).set_warmup(True)


@pytest.mark.parametrize(
    "settings",
    [
        {"softening": "none"},
        {"value": "projected"},
        {"value": "softened"},
        {"alpha": 0.0},
        {"position_bias": "identity"},
        {"position_bias": "diagonal"},
        {"gamma": 0.0},
        {"softened_scores": False},
        {"softening": "relative"},
    ],
)
def test_every_ablation_trains_every_parameter_it_has(settings: dict[str, Any]) -> None:
    tower = SpecFormerConfig(num_layers=2, **settings).build(6, 16)
    assert isinstance(tower, SpecFormer) and tower.output_dim == 16
    out = tower(torch.randn(4, 6, 16))
    assert out.shape == (4, 16)
    (out * torch.randn(16)).sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"position_bias": "diag"}, "position_bias must be one of"),
        ({"logit_scale": "rsqrtdim"}, "logit_scale must be one of none, rsqrt_dim"),
        ({"through_vectors": True, "position_bias": "diagonal"}, "through_vectors"),
        ({"score_form": "concat", "position_bias": "diagonal"}, "score_form"),
        ({"softened_scores": False, "alpha": 0.0, "gamma": 0.0}, "no attention logits"),
        ({"floor": 0.0}, "floor"),
        ({"precision": "half"}, "precision must be one of measured, double"),
        (
            {"precision": "double", "softening": "none", "alpha": 0.0},
            "take effect only with softening",
        ),
    ],
)
def test_settings_without_effect_or_meaning_are_errors(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SpecFormerConfig(**settings)


def test_parameter_count_is_the_sum_of_its_parts() -> None:
    tower = SpecFormerConfig(num_layers=3, ffn_ratio=4).build(6, 16)
    layer = 4 * 16**2 + 6 * (8 * 16**2 + 5 * 16) + 4 * 16 + 4
    assert sum(p.numel() for p in tower.parameters()) == 3 * layer


def test_learned_scalars_start_at_the_published_values() -> None:
    layer = SpecFormerLayer(SpecFormerConfig(), 6, 16)
    assert layer.learned() == {"tau": 0.5, "beta0": 0.0, "beta1": 1.0, "beta2": 0.0}

# SPDX-License-Identifier: MIT
"""The operator against a derivation of its own on random input: 200 examples of every kind.

The reference is an SVD in float64, written here from equations 16-18 and 22-25, and its gradient is
that of central differences: neither shares a line with models/.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.spectral.spectral import position_bias, position_vector, soften
from models.spectral.spectrum import decompose

DOUBLE = torch.float64
PROFILE = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@st.composite
def tokens_of(draw: st.DrawFn, max_side: int = 9) -> Tensor:
    """(2, T, D) float64 tokens: any shape, scale and decay; equal values, tokens and features."""
    num_tokens, dim = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n = min(num_tokens, dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    u = torch.linalg.qr(normal(2, num_tokens, n))[0]
    v = torch.linalg.qr(normal(2, dim, n))[0]
    kind = draw(st.sampled_from(["generic", "collapsed", "near-equal", "equal", "duplicates"]))
    if kind == "generic":
        sigma = 0.5 + torch.rand(n, generator=generator, dtype=DOUBLE)
    elif kind == "collapsed":
        sigma = 10.0 ** -(2.5 * torch.arange(n, dtype=DOUBLE) / max(n - 1, 1))
    elif kind == "near-equal":
        sigma = 1.0 + 10.0 ** draw(st.floats(-12, -3)) * torch.arange(n, dtype=DOUBLE)
    else:
        sigma = torch.ones(n, dtype=DOUBLE)
    tokens = (u * sigma) @ v.mT * 10.0 ** draw(st.floats(-2, 2))
    if kind == "duplicates":
        tokens = normal(2, num_tokens, dim)
        tokens[:, -1] = tokens[:, 0]
        tokens[..., -1] = 1.0
    return tokens


def by_svd(tokens: Tensor, tau: float) -> Tensor:
    u, s, vt = torch.linalg.svd(tokens, full_matrices=False)
    # Directions that are not there (σ = 0) contribute σ^τ = 0.
    powered = torch.where(s > 1e-9 * s[..., :1], s.pow(tau), 0.0)
    return (u * powered[..., None, :]) @ vt


@PROFILE
@given(tokens=tokens_of(), tau=st.floats(0.05, 1.0))
def test_softening_equals_the_singular_value_decomposition(tokens: Tensor, tau: float) -> None:
    ours = soften(tokens, tau, decompose(tokens), 1e-16)[0]
    expected = by_svd(tokens, tau)
    # A direction of relative size 1e-16 that rounding made survives as its power (1e-16)^(tau/2).
    s = torch.linalg.svdvals(tokens)
    rank_deficient = bool((s[..., -1] < 1e-9 * s[..., 0]).any())
    tolerance = 1e-8**tau * 3.0 if rank_deficient else 1e-9
    assert (ours - expected).norm() <= tolerance * expected.norm()


@PROFILE
@given(tokens=tokens_of(), tau=st.floats(0.05, 1.0))
def test_float32_tokens_agree_with_the_float64_derivation(tokens: Tensor, tau: float) -> None:
    narrow = tokens.float()
    s = torch.linalg.svdvals(narrow.double())
    assume(bool((s[..., -1] > 1e-3 * s[..., 0]).all()))
    ours = soften(narrow, tau, decompose(narrow))[0]
    expected = by_svd(narrow.double(), tau)
    assert (ours - expected).norm() <= 2e-5 * expected.norm()


@PROFILE
@given(tokens=tokens_of(), values=st.lists(st.floats(-1, 1), min_size=3, max_size=3))
def test_position_biases_equal_the_singular_value_decomposition(
    tokens: Tensor, values: list[float]
) -> None:
    s = torch.linalg.svdvals(tokens)
    ratio = s / s[..., :1]
    # Vectors are defined, and their signs decided, only where values are apart and sums are not 0.
    apart = bool((ratio[..., :-1] - ratio[..., 1:] > 1e-3).all() and (ratio > 1e-3).all())
    beta = torch.tensor(values, dtype=DOUBLE)
    spectrum = decompose(tokens)
    sigma = soften(tokens, 0.5, spectrum)[1]
    u, s, _ = torch.linalg.svd(tokens, full_matrices=False)
    f = beta[0] + beta[1] * ratio + beta[2] * ratio**2
    scale = float(s.square().amax())
    if bool((ratio > 1e-3).all()):
        diagonal = position_bias("diagonal", tokens, sigma, spectrum, beta)
        expected = (u * (s[..., :1] * f).square()[..., None, :]) @ u.mT
        assert (diagonal - expected).abs().max() <= 1e-9 * scale
    assume(apart and bool((u.sum(-2).abs() > 1e-3).all()))
    weights = s[..., :1] * f * u.sum(-2).sign()
    expected = (u @ weights[..., None])[..., 0]
    ours = position_vector(tokens, sigma, spectrum, beta)
    assert (ours - expected).abs().max() <= 1e-8 * scale**0.5


@PROFILE
@given(tokens=tokens_of(max_side=5), tau=st.floats(0.1, 0.95), seed=st.integers(0, 2**31))
def test_gradients_equal_central_differences(tokens: Tensor, tau: float, seed: int) -> None:
    s = torch.linalg.svdvals(tokens)
    assume(bool((s[..., -1] > 3e-3 * s[..., 0]).all()))
    generator = torch.Generator().manual_seed(seed)
    weights, direction = torch.randn(2, *tokens.shape, generator=generator, dtype=DOUBLE)
    direction = direction / direction.norm() * s.amin()
    leaf = tokens.clone().requires_grad_()
    exponent = torch.tensor(tau, dtype=DOUBLE, requires_grad=True)
    out = soften(leaf, exponent, decompose(leaf), 1e-16)[0]
    grad, slope = torch.autograd.grad((out * weights).sum(), (leaf, exponent))

    def loss(step: float, tau: float) -> float:
        return float((by_svd(tokens + step * direction, tau) * weights).sum())

    # Fourth order in the step: the error is that of rounding.
    h = 1e-3
    numeric = (8 * (loss(h, tau) - loss(-h, tau)) - loss(2 * h, tau) + loss(-2 * h, tau)) / (12 * h)
    size = float(grad.norm() * direction.norm())
    assert abs(float((grad * direction).sum()) - numeric) <= 1e-6 * size + 1e-10
    numeric = (8 * (loss(0, tau + h) - loss(0, tau - h)) - loss(0, tau + 2 * h)) / (12 * h)
    numeric += loss(0, tau - 2 * h) / (12 * h)
    bound = float(out.detach().norm() * weights.norm()) * (1 + float(s.log().abs().amax())) ** 5
    assert abs(float(slope) - numeric) <= 1e-9 * bound

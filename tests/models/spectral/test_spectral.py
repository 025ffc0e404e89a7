# SPDX-License-Identifier: MIT
"""Spectral operator: equals the decomposition it replaces, with an exact and finite gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.spectral import spectral
from models.spectral.spectral import position_bias, position_vector, soften
from models.spectral.spectrum import decompose

DOUBLE = torch.float64
BETA = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)


def softened(tokens: Tensor, tau: float | Tensor, floor: float = 1e-16) -> Tensor:
    return soften(tokens, tau, decompose(tokens), floor)[0]


def by_svd(tokens: Tensor, tau: float) -> Tensor:
    u, s, vt = torch.linalg.svd(tokens, full_matrices=False)
    return u * s.pow(tau)[..., None, :] @ vt


def with_singular_values(sigma: list[float], width: int = 7) -> Tensor:
    n = len(sigma)
    u = torch.linalg.qr(torch.randn(n, n, dtype=DOUBLE))[0]
    v = torch.linalg.qr(torch.randn(width, n, dtype=DOUBLE))[0]
    return (u * torch.tensor(sigma, dtype=DOUBLE) @ v.T)[None]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("shape", [(8, 32), (15, 26), (22, 176), (39, 312), (20, 6)])
@pytest.mark.parametrize("tau", [0.2, 0.5, 0.9])
def test_gram_power_equals_the_singular_value_decomposition(
    shape: tuple[int, int], tau: float
) -> None:
    tokens = torch.randn(2, *shape, dtype=DOUBLE)
    assert relative(softened(tokens, tau), by_svd(tokens, tau)) < 1e-12
    sigma = soften(tokens, tau, decompose(tokens))[1]
    assert relative(sigma, torch.linalg.svdvals(tokens)) < 1e-12


def test_exponent_one_is_the_identity_and_zero_the_polar_factor() -> None:
    tokens = torch.randn(3, 8, 32, dtype=DOUBLE)
    assert relative(softened(tokens, 1.0), tokens) < 1e-12
    polar = softened(tokens, 0.0)
    assert relative(polar @ polar.mT, torch.eye(8, dtype=DOUBLE).expand(3, 8, 8)) < 1e-12


def test_softened_gram_is_a_power_of_the_gram() -> None:
    tokens = torch.randn(3, 6, 16, dtype=DOUBLE)
    star = softened(tokens, 0.3)
    values, u = torch.linalg.eigh(tokens @ tokens.mT)
    assert relative(star @ star.mT, (u * values.pow(0.3)[:, None, :]) @ u.mT) < 1e-12


def test_softening_scales_with_the_power_of_the_token_scale() -> None:
    tokens = torch.randn(3, 6, 16, dtype=DOUBLE)
    assert relative(softened(2.5 * tokens, 0.4), 2.5**0.4 * softened(tokens, 0.4)) < 1e-12


def test_vector_a_of_the_published_formulas() -> None:
    tokens = torch.tensor([[[1.0, 2, 0, -1], [0, 1, 3, 1], [2, 0, 1, 1]]], dtype=DOUBLE)
    spectrum = decompose(tokens)
    star, sigma = soften(tokens, 0.5, spectrum)
    expected = torch.tensor(
        [
            [0.5967370607, 1.2723574875, -0.0598430919, -0.677503874],
            [-0.1738789344, 0.5454723823, 1.6297221805, 0.5017414925],
            [1.3246667908, -0.1263811502, 0.4314365399, 0.6157773349],
        ],
        dtype=DOUBLE,
    )
    assert torch.allclose(star[0], expected, rtol=0, atol=1e-9)
    singular = torch.tensor([3.6694775032, 2.4133948748, 1.926255443], dtype=DOUBLE)
    assert torch.allclose(sigma[0], singular, rtol=0, atol=1e-9)
    vector = position_vector(tokens, sigma, spectrum, BETA)[0]
    expected = torch.tensor([2.6289754134, 1.6451240765, 3.699921739], dtype=DOUBLE)
    assert torch.allclose(vector, expected, rtol=0, atol=1e-9)


SPECTRA = {
    "generic": [3.0, 2.0, 1.2, 0.7],
    "gap 1e-3": [2.001, 2.0, 1.2, 0.7],
    "gap 1e-6": [2.000001, 2.0, 1.2, 0.7],
    "gap 1e-9": [2.000000001, 2.0, 1.2, 0.7],
    "gap 0": [2.0, 2.0, 1.2, 0.7],
    "all equal": [1.5, 1.5, 1.5, 1.5],
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("wide", [True, False])
def test_softening_gradient_equals_finite_differences(name: str, wide: bool) -> None:
    tokens = with_singular_values(SPECTRA[name])
    tokens = (tokens if wide else tokens.mT).clone().requires_grad_()
    tau = torch.tensor(0.37, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(softened, (tokens, tau), eps=1e-6, atol=1e-6, rtol=1e-6)


def test_gradient_is_that_of_the_floored_function_for_a_collapsed_example() -> None:
    tokens = with_singular_values([3.0, 2.0, 0.05, 0.02]).requires_grad_()
    tau = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)

    def floored(tokens: Tensor, tau: Tensor) -> Tensor:
        return softened(tokens, tau, floor=1e-3)

    assert torch.autograd.gradcheck(floored, (tokens, tau), eps=1e-6, atol=1e-6, rtol=1e-6)


def test_autograd_through_eigenvectors_is_wrong_where_ours_is_exact() -> None:
    weights = torch.randn(1, 4, 7, dtype=DOUBLE)
    ours = with_singular_values([2.0, 2.0, 2.0, 2.0]).requires_grad_()
    (softened(ours, 0.5) * weights).sum().backward()
    naive = ours.detach().clone().requires_grad_()
    u, s, vt = torch.linalg.svd(naive, full_matrices=False)
    (u * s.sqrt()[..., None, :] @ vt * weights).sum().backward()
    assert ours.grad is not None and naive.grad is not None
    assert torch.isfinite(ours.grad).all()
    gap = (naive.grad - ours.grad).abs().max()
    assert not torch.isfinite(gap) or gap > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("kind", ["duplicates", "one token", "zero token", "all zero", "rank one"])
def test_gradients_are_finite_for_rank_deficient_tokens(kind: str, dtype: torch.dtype) -> None:
    tokens = torch.randn(2, 6, 9, dtype=dtype)
    if kind == "duplicates":
        tokens[:, 1] = tokens[:, 0]
    elif kind == "one token":
        tokens = tokens[:, :1].clone()
    elif kind == "zero token":
        tokens[:, 2] = 0
    elif kind == "all zero":
        tokens.zero_()
    else:
        tokens[:] = tokens[:, :1]
    for bias in ("rank1", "diagonal"):
        tokens = tokens.detach().requires_grad_()
        tau = torch.tensor(0.5, requires_grad=True)
        beta = torch.tensor([0.1, 1.0, 0.1], requires_grad=True)
        spectrum = decompose(tokens)
        star, sigma = soften(tokens, tau, spectrum)
        out = position_bias(bias, tokens, sigma, spectrum, beta)
        (star.sum() + out.sum()).backward()
        for value in (star, out, tokens.grad, tau.grad, beta.grad):
            assert value is not None and torch.isfinite(value).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_operator(dtype: torch.dtype) -> None:
    tokens = torch.randn(4, 8, 16)
    with torch.autocast("cpu", dtype=dtype):
        inside = tokens.clone().requires_grad_()
        spectrum = decompose(inside)
        star, sigma = soften(inside, 0.5, spectrum)
        p = position_vector(inside, sigma, spectrum, BETA)
        (star.sum() + p.sum()).backward()
    outside = tokens.clone().requires_grad_()
    spectrum = decompose(outside)
    star2, sigma2 = soften(outside, 0.5, spectrum)
    (star2.sum() + position_vector(outside, sigma2, spectrum, BETA).sum()).backward()
    assert torch.equal(star, star2) and inside.grad is not None and outside.grad is not None
    assert torch.equal(inside.grad, outside.grad)
    half = tokens.to(dtype).requires_grad_()
    star, _ = soften(half, 0.5, decompose(half))
    star.sum().backward()
    assert star.dtype == torch.float32 and half.grad is not None and half.grad.dtype == dtype


def test_float32_tokens_keep_every_component_of_a_collapsed_spectrum() -> None:
    tokens = with_singular_values([100.0, 10.0, 1.0, 0.01], 16).float()
    u, s, vt = torch.linalg.svd(tokens.double(), full_matrices=False)
    star = softened(tokens, 0.5)
    component = (u.mT @ star.double() @ vt.mT)[0].diagonal() / s[0].sqrt()
    assert (component - 1).abs().max() < 5e-3
    assert relative(star.double(), by_svd(tokens.double(), 0.5)) < 1e-5
    # A float32 Gram matrix has lost the smallest component altogether.
    values, q = torch.linalg.eigh(tokens @ tokens.mT)
    naive = q @ (values.abs()[..., None] ** -0.25 * (q.mT @ tokens))
    component = (u.mT @ naive.double() @ vt.mT)[0].diagonal() / s[0].sqrt()
    assert (component - 1).abs().max() > 0.02


def test_float32_gradients_agree_with_float64_ones() -> None:
    tokens = torch.randn(4, 8, 32, dtype=DOUBLE)
    weights = torch.randn(4, 8, 32, dtype=DOUBLE)
    grads = []
    for dtype in (DOUBLE, torch.float32):
        x = tokens.to(dtype).detach().clone().requires_grad_()
        (softened(x, 0.5) * weights.to(dtype)).sum().backward()
        assert x.grad is not None
        grads.append(x.grad.double())
    assert relative(grads[1], grads[0]) < 1e-5


def test_non_finite_tokens_spoil_only_their_own_example() -> None:
    tokens = torch.randn(3, 4, 8)
    clean = softened(tokens, 0.5)
    tokens[1, 2, 3] = math.inf
    spoilt = softened(tokens, 0.5)
    assert not torch.isfinite(spoilt[1]).all()
    assert torch.allclose(spoilt[[0, 2]], clean[[0, 2]], rtol=1e-5, atol=1e-6)


def test_an_example_does_not_see_its_batch_mates() -> None:
    tokens = torch.randn(5, 6, 10)
    together = softened(tokens, 0.5)
    alone = torch.cat([softened(one[None], 0.5) for one in tokens])
    assert relative(together, alone) < 1e-6


def test_rank1_position_bias_has_rank_one_and_follows_the_equation() -> None:
    tokens = torch.randn(2, 9, 30, dtype=DOUBLE)
    spectrum = decompose(tokens)
    sigma = soften(tokens, 0.5, spectrum)[1]
    bias = position_bias("rank1", tokens, sigma, spectrum, BETA)
    u = spectrum.vectors * spectral.canonical_signs(spectrum.vectors)[:, None, :]
    f = sum(b * (sigma / sigma[:, :1]) ** k for k, b in enumerate(BETA))
    assert isinstance(f, Tensor)
    inner = sigma[:, :1, None] ** 2 * f[:, :, None] * f[:, None, :]
    assert relative(bias, u @ inner @ u.mT) < 1e-12
    assert torch.linalg.matrix_rank(bias).tolist() == [1, 1]


def test_canonical_position_bias_depends_on_neither_solver_nor_token_order() -> None:
    tokens = torch.randn(20, 8, 32, dtype=DOUBLE)
    spectrum = decompose(tokens)
    sigma = soften(tokens, 0.5, spectrum)[1]
    bias = position_bias("rank1", tokens, sigma, spectrum, BETA)
    other = spectrum._replace(vectors=torch.linalg.svd(tokens, full_matrices=False)[0])
    assert relative(position_bias("rank1", tokens, sigma, other, BETA), bias) < 1e-9
    assert relative(softened(tokens, 0.5), soften(tokens, 0.5, other)[0]) < 1e-12
    order = torch.randperm(8)
    moved = tokens[:, order]
    spectrum = decompose(moved)
    sigma = soften(moved, 0.5, spectrum)[1]
    permuted = position_bias("rank1", moved, sigma, spectrum, BETA)
    assert relative(permuted, bias[:, order][:, :, order]) < 1e-9


def test_a_flipped_sign_would_change_the_rank1_bias_but_never_the_diagonal_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = torch.randn(4, 8, 32, dtype=DOUBLE)
    beta = torch.ones(3, dtype=DOUBLE)
    spectrum = decompose(tokens)
    sigma = soften(tokens, 0.5, spectrum)[1]
    flipped = spectrum._replace(vectors=spectrum.vectors * torch.tensor([1.0, -1] * 4))
    diagonal = position_bias("diagonal", tokens, sigma, spectrum, beta)
    other = position_bias("diagonal", tokens, sigma, flipped, beta)
    assert relative(other, diagonal) < 1e-12
    monkeypatch.setattr(spectral, "canonical_signs", lambda vectors: torch.ones(8, dtype=DOUBLE))
    raw = position_bias("rank1", tokens, sigma, spectrum, beta)
    assert relative(position_bias("rank1", tokens, sigma, flipped, beta), raw) > 0.5


def test_a_vanishing_sum_is_decided_by_the_largest_entry() -> None:
    vectors = torch.tensor([[0.5, 0.1], [-0.8, 0.2], [0.3, -0.9]], dtype=DOUBLE)[None]
    assert spectral.canonical_signs(vectors).tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_diagonal_bias_follows_its_formula_and_its_gradient_is_exact(
    shape: tuple[int, int],
) -> None:
    tokens = torch.randn(2, *shape, dtype=DOUBLE).requires_grad_()

    def bias(tokens: Tensor, beta: Tensor) -> Tensor:
        spectrum = decompose(tokens)
        return position_bias("diagonal", tokens, soften(tokens, 0.5, spectrum)[1], spectrum, beta)

    u, s, _ = torch.linalg.svd(tokens.detach(), full_matrices=False)
    f = 0.2 + 0.5 * s / s[:, :1] + 0.3 * (s / s[:, :1]) ** 2
    expected = (u * (s[:, :1] * f)[:, None, :] ** 2) @ u.mT
    assert relative(bias(tokens, BETA).detach(), expected) < 1e-12
    beta = BETA.clone().requires_grad_()
    assert torch.autograd.gradcheck(bias, (tokens, beta), eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_position_vector_gradients_are_exact_with_and_without_the_vectors(
    shape: tuple[int, int],
) -> None:
    tokens = torch.randn(2, *shape, dtype=DOUBLE).requires_grad_()
    beta = BETA.clone().requires_grad_()

    def full(tokens: Tensor, beta: Tensor) -> Tensor:
        spectrum = decompose(tokens)
        sigma = soften(tokens, 0.5, spectrum)[1]
        return position_vector(tokens, sigma, spectrum, beta, through_vectors=True)

    assert torch.autograd.gradcheck(full, (tokens, beta), eps=1e-6, atol=1e-5, rtol=1e-5)
    fixed = decompose(tokens)
    u = position_frame(tokens.detach())

    def through_values(tokens: Tensor, beta: Tensor) -> Tensor:
        s = torch.linalg.svdvals(tokens)
        f = beta[0] + beta[1] * s / s[:, :1] + beta[2] * (s / s[:, :1]) ** 2
        return (u @ (s[:, :1] * f)[..., None])[..., 0]

    sigma = soften(tokens, 0.5, fixed)[1]
    weights = torch.randn(2, shape[0], dtype=DOUBLE)
    ours = (position_vector(tokens, sigma, fixed, beta) * weights).sum()
    theirs = (through_values(tokens, beta) * weights).sum()
    assert torch.allclose(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, (tokens, beta)),
        torch.autograd.grad(theirs, (tokens, beta)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-10)


def position_frame(tokens: Tensor) -> Tensor:
    u = torch.linalg.svd(tokens, full_matrices=False)[0]
    return u * spectral.canonical_signs(u)[:, None, :]


def test_all_zero_beta_is_a_stationary_point_so_it_must_not_be_the_start() -> None:
    tokens = torch.randn(2, 5, 8, dtype=DOUBLE)
    spectrum = decompose(tokens)
    sigma = soften(tokens, 0.5, spectrum)[1]
    for kind in ("rank1", "diagonal"):
        beta = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
        bias = position_bias(kind, tokens, sigma, spectrum, beta)
        (bias * torch.randn(2, 5, 5, dtype=DOUBLE)).sum().backward()
        assert beta.grad is not None and beta.grad.abs().max() == 0


def test_identity_bias_is_the_identity_for_wide_tokens_and_a_projection_for_tall_ones() -> None:
    for shape in ((4, 9), (9, 4)):
        tokens = torch.randn(2, *shape, dtype=DOUBLE)
        spectrum = decompose(tokens)
        bias = position_bias("identity", tokens, torch.ones(2, 4), spectrum, BETA)
        u = torch.linalg.svd(tokens, full_matrices=False)[0]
        assert relative(bias, u @ u.mT) < 1e-12

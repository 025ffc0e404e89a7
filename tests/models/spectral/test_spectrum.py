# SPDX-License-Identifier: MIT
"""Decompositions: right in every precision, float32 only where measured, and the same by Jacobi."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.spectral import spectrum as module
from models.spectral.jacobi import eigh_jacobi
from models.spectral.matrix_power import MIN_RATIO
from models.spectral.spectral import soften
from models.spectral.spectrum import Spectrum, decompose

DOUBLE = torch.float64


def with_condition(condition: float, batch: int = 8, num_tokens: int = 6, dim: int = 16) -> Tensor:
    """Float32 tokens whose singular values fall geometrically from 1 to 1/condition."""
    u = torch.linalg.qr(torch.randn(batch, num_tokens, num_tokens, dtype=DOUBLE))[0]
    v = torch.linalg.qr(torch.randn(batch, dim, num_tokens, dtype=DOUBLE))[0]
    sigma = condition ** -torch.linspace(0, 1, num_tokens, dtype=DOUBLE)
    return (u * sigma @ v.mT).float()


def rebuilt(spectrum: Spectrum) -> Tensor:
    return spectrum.vectors * spectrum.values[:, None, :] @ spectrum.vectors.mT


@pytest.mark.parametrize("solver", ["lapack", "jacobi"])
@pytest.mark.parametrize("shape", [(6, 16), (16, 6), (7, 9), (1, 5), (2, 2)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_values_and_vectors_rebuild_the_smaller_gram_matrix(
    solver: module.Eigensolver, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tokens = torch.randn(5, *shape, dtype=dtype)
    spectrum = decompose(tokens, "measured", solver)
    rows = tokens.mT if shape[0] > shape[1] else tokens
    assert spectrum.transposed == (shape[0] > shape[1])
    eps = float(torch.finfo(spectrum.values.dtype).eps)
    gram = (rows.double() @ rows.double().mT).to(spectrum.values.dtype)
    largest = spectrum.values.amax()
    assert (rebuilt(spectrum) - gram).abs().max() < 50 * eps * largest
    identity = torch.eye(min(shape), dtype=spectrum.values.dtype)
    assert (spectrum.vectors.mT @ spectrum.vectors - identity).abs().max() < 50 * eps
    assert (spectrum.values.diff(dim=-1) <= 0).all()


def test_float32_is_kept_where_the_measured_condition_allows_it() -> None:
    assert decompose(with_condition(25.0)).values.dtype == torch.float32
    assert decompose(with_condition(40.0)).values.dtype == DOUBLE
    assert decompose(with_condition(25.0), "double").values.dtype == DOUBLE
    assert decompose(with_condition(25.0).double()).values.dtype == DOUBLE


@pytest.mark.parametrize("condition", [2.0, 10.0, 30.0])
def test_what_is_kept_in_float32_is_right(condition: float) -> None:
    tokens = with_condition(condition, batch=64)
    narrow, wide = decompose(tokens), decompose(tokens, "double")
    assert narrow.values.dtype == torch.float32
    assert ((narrow.values / wide.values) - 1).abs().max() < 1e-6 / MIN_RATIO
    for tau in (0.1, 0.5, 0.9):
        ours, exact = soften(tokens, tau, narrow)[0], soften(tokens.double(), tau, wide)[0]
        assert (ours - exact).norm() < 1e-5 * exact.norm()


def test_gradients_in_float32_are_right_up_to_the_measured_condition() -> None:
    weights = torch.randn(64, 6, 16)
    grads = []
    for precision in ("measured", "double"):
        torch.manual_seed(1)
        tokens = with_condition(30.0, batch=64).requires_grad_()
        tau = torch.tensor(0.4, requires_grad=True)
        spectrum = decompose(tokens, precision)
        (soften(tokens, tau, spectrum)[0] * weights).sum().backward()
        assert tokens.grad is not None and tau.grad is not None
        grads.append((tokens.grad, tau.grad))
    (narrow, narrow_tau), (wide, wide_tau) = grads
    assert (narrow - wide).norm() < 2e-4 * wide.norm()
    assert abs(narrow_tau - wide_tau) < 1e-4 * abs(wide_tau)


def test_the_same_narrow_gram_beyond_the_bound_would_be_wrong() -> None:
    # The reason for measuring: forced into float32, a collapsed example loses a direction.
    tokens = with_condition(1e4)
    gram = tokens @ tokens.mT
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(gram))
    forced = Spectrum(values.clamp_min(0.0), vectors, False)
    exact = soften(tokens.double(), 0.5, decompose(tokens, "double"))[0]
    assert (soften(tokens, 0.5, forced)[0] - exact).norm() > 1e-3 * exact.norm()
    measured = soften(tokens, 0.5, decompose(tokens))[0]
    assert (measured - exact).norm() < 1e-5 * exact.norm()


def test_a_few_collapsed_examples_are_redone_and_the_others_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = with_condition(10.0, batch=40)
    tokens[[3, 17]] = with_condition(1e4, batch=2)
    redone: list[int] = []
    double = module._double_gram
    monkeypatch.setattr(
        module, "_double_gram", lambda rows: (redone.append(len(rows)), double(rows))[1]
    )
    mixed = decompose(tokens)
    assert redone == [2]
    exact = decompose(tokens, "double")
    assert mixed.values.dtype == DOUBLE
    # Singular values of 1e-4 σ1 are there only in what was redone.
    assert torch.allclose(mixed.values[[3, 17]], exact.values[[3, 17]], rtol=1e-9, atol=0)
    assert torch.allclose(mixed.values, exact.values, rtol=1e-2, atol=0)


def test_a_batch_that_is_mostly_collapsed_is_decomposed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.dtype] = []
    solve = module._SOLVERS["lapack"]
    monkeypatch.setitem(
        module._SOLVERS, "lapack", lambda gram: (calls.append(gram.dtype), solve(gram))[1]
    )
    decompose(with_condition(1e5))
    assert calls == [DOUBLE]


def test_large_finite_tokens_are_not_mistaken_for_non_finite_ones() -> None:
    tokens = torch.randn(8, 4, 7)
    tokens[2] *= 1e20
    exact = torch.linalg.svdvals(tokens[2].double())
    assert torch.allclose(decompose(tokens).values[2].sqrt().double(), exact, rtol=1e-5)
    tokens[2, 0, 0] = torch.nan
    spectrum = decompose(tokens)
    assert spectrum.values[2].tolist() == [1.0] * 4
    assert spectrum.values.dtype == torch.float32


@pytest.mark.parametrize("kind", ["zero", "one matrix repeated", "empty batch", "identity"])
def test_degenerate_matrices_converge_by_jacobi(kind: str) -> None:
    matrices = torch.zeros(3, 5, 5, dtype=DOUBLE)
    if kind == "one matrix repeated":
        matrices += 1.0
    elif kind == "empty batch":
        matrices = matrices[:0]
    elif kind == "identity":
        matrices += torch.eye(5, dtype=DOUBLE)
    values, vectors = eigh_jacobi(matrices)
    assert torch.allclose(values, torch.linalg.eigvalsh(matrices), atol=1e-14)
    assert torch.allclose(vectors * values[:, None] @ vectors.mT, matrices, atol=1e-14)
    assert torch.allclose(vectors.mT @ vectors, torch.eye(5, dtype=DOUBLE).expand_as(matrices))


def test_jacobi_raises_rather_than_return_what_has_not_converged() -> None:
    with pytest.raises(RuntimeError, match="no convergence within 16 sweeps"):
        eigh_jacobi(torch.full((1, 4, 4), torch.nan))


def test_the_chunks_of_a_cpu_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randn(37, 5, 11)
    whole = module._double_gram(tokens)
    monkeypatch.setattr(module, "_CACHED_TOKENS", 5 * 11 * 4)
    assert torch.allclose(module._double_gram(tokens), whole, rtol=1e-14, atol=1e-14)


def test_the_operator_can_be_exported() -> None:
    class Softened(torch.nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return soften(tokens, 0.5, decompose(tokens))[0]

    tokens = torch.randn(4, 5, 9)
    with torch.no_grad():
        program = torch.export.export(Softened(), (tokens,))
        assert torch.allclose(program.module()(tokens), Softened()(tokens), atol=1e-6)

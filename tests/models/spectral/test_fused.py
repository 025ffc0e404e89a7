# SPDX-License-Identifier: MIT
"""The compiled form of the spectral operator is its reference form, value by value."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.spectral import fused
from models.spectral.spectral import position_bias, position_vector, soften
from models.spectral.spectrum import Spectrum, decompose
from tests.support.compiled import with_compiled

SHAPES = [
    *((16, 16, 304), (5, 39, 312), (33, 24, 64), (1, 15, 26), (7, 1, 9), (7, 9, 1), (3, 2, 2)),
    *((17, 20, 6), (2, 64, 8), (19, 7, 7), (40, 33, 31), (1, 1, 1)),
]


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    yield from with_compiled()


def with_spectrum(sigma: list[float], batch: int = 5, width: int = 11) -> Tensor:
    u = torch.linalg.qr(torch.randn(batch, len(sigma), len(sigma), dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(batch, width, len(sigma), dtype=torch.float64))[0]
    return (u * torch.tensor(sigma, dtype=torch.float64) @ v.mT).float()


def operator(tokens: Tensor, tau: float, floor: float = 1e-8) -> dict[str, Tensor]:
    """Return every value and gradient of the operator, as tensors."""
    torch.manual_seed(3)
    leaf = tokens.detach().clone().requires_grad_()
    exponent = torch.tensor(tau, requires_grad=True)
    spectrum = decompose(leaf)
    softened, sigma = soften(leaf, exponent, spectrum, floor)
    weights = torch.randn(softened.shape, dtype=softened.dtype)
    (softened * weights).sum().add((sigma * torch.randn(sigma.shape)).sum()).backward()
    assert leaf.grad is not None and exponent.grad is not None
    found = {"softened": softened, "sigma": sigma, "tokens": leaf.grad, "tau": exponent.grad}
    return {name: value.detach() for name, value in found.items()}


def exact(tokens: Tensor, tau: float, floor: float = 1e-8) -> dict[str, Tensor]:
    """Return what the reference form makes of the tokens in float64."""
    with fused.reference():
        return operator(tokens.double(), tau, floor)


def off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((ours[name].double() - theirs[name]).norm() / theirs[name].norm())
        for name in ours
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tau", [0.5, 0.13, 1.0])
def test_values_and_gradients_are_those_of_the_reference(
    shape: tuple[int, ...], tau: float
) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(shape)
    ours, theirs = operator(tokens, tau), exact(tokens, tau)
    with fused.reference():
        before = off(operator(tokens, tau), theirs)
    for name, error in off(ours, theirs).items():
        assert error < max(2e-5, 4 * before[name]), (name, before[name])


@pytest.mark.parametrize(
    "sigma",
    [
        *([2.0, 2.0, 1.2, 0.7], [1.5] * 6, [2.0000001, 2.0, 2.0, 0.7], [3.0, 1e-2, 1e-2, 1e-2]),
        *([100.0, 10.0, 1.0, 0.01], [1.0, 1e-5, 1e-5, 0.0], [1.0, 0.0, 0.0, 0.0], [1e-4] * 3),
    ],
    ids=str,
)
def test_repeated_collapsed_and_tiny_spectra_are_as_exact_as_the_reference(
    sigma: list[float],
) -> None:
    torch.manual_seed(1)
    tokens = with_spectrum(sigma)
    for floor in (1e-8, 1e-3):
        theirs = exact(tokens, 0.5, floor)
        ours = off(operator(tokens, 0.5, floor), theirs)
        with fused.reference():
            before = off(operator(tokens, 0.5, floor), theirs)
        for name, error in ours.items():
            assert error < max(3e-5, 4 * before[name]), (name, floor, before[name])


def test_an_example_that_float32_cannot_tell_is_decomposed_in_float64_and_only_that_one() -> None:
    torch.manual_seed(2)
    tokens = with_spectrum([3.0, 2.0, 1.0, 0.5], batch=37)
    assert decompose(tokens).values.dtype == torch.float32
    tokens[[3, 17]] = with_spectrum([3.0, 2.0, 1.0, 1e-4], batch=2)
    mixed = decompose(tokens)
    theirs = decompose(tokens.double(), "double")
    assert mixed.values.dtype == torch.float64
    assert torch.allclose(mixed.values[[3, 17]], theirs.values[[3, 17]], rtol=1e-6, atol=0)
    assert torch.allclose(mixed.values, theirs.values, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(9, 6, 16), (9, 16, 6), (21, 39, 312), (4, 1, 5)], ids=str)
@pytest.mark.parametrize("precision", ["measured", "double"])
def test_eigenvectors_rebuild_the_gram_matrix_in_order(shape: Any, precision: Any) -> None:
    torch.manual_seed(4)
    tokens = torch.randn(shape)
    spectrum = decompose(tokens, precision)
    rows = (tokens.mT if spectrum.transposed else tokens).double()
    gram, vectors = rows @ rows.mT, spectrum.vectors.double()
    eps = float(torch.finfo(spectrum.values.dtype).eps)
    rebuilt = vectors * spectrum.values.double()[:, None] @ vectors.mT
    assert (rebuilt - gram).abs().max() < 60 * eps * spectrum.values.max()
    assert (vectors.mT @ vectors - torch.eye(len(gram[0]))).abs().max() < 60 * eps
    assert (spectrum.values.diff(dim=-1) <= 0).all()
    assert precision == "measured" or spectrum.values.dtype == torch.float64


def test_gradients_pass_a_check_by_finite_differences() -> None:
    torch.manual_seed(5)
    tokens = with_spectrum([2.0, 2.0, 1.0, 0.5], batch=3, width=6).requires_grad_()
    tau = torch.tensor(0.4, requires_grad=True)

    def softened(tokens: Tensor, tau: Tensor) -> Tensor:
        return soften(tokens, tau, decompose(tokens))[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradcheck would rather have float64, which has no kernel
        assert torch.autograd.gradcheck(
            softened, (tokens, tau), eps=1e-2, atol=3e-3, rtol=3e-3, nondet_tol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_precision_tokens_give_what_float32_gives(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    half = torch.randn(4, 8, 16).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        star, _ = soften(half, 0.5, decompose(half))
        star.sum().backward()
    full = half.detach().float().requires_grad_()
    expected, _ = soften(full, 0.5, decompose(full))
    expected.sum().backward()
    assert star.dtype == torch.float32 and torch.equal(star, expected)
    assert half.grad is not None and full.grad is not None
    assert half.grad.dtype == dtype and torch.equal(half.grad, full.grad.to(dtype))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e25])
def test_non_finite_tokens_spoil_only_their_own_example(value: float) -> None:
    torch.manual_seed(7)
    tokens = torch.randn(19, 4, 9)
    clean = operator(tokens, 0.5)
    tokens[1, 2, 3] = value
    spoilt = operator(tokens, 0.5)
    rest = [i for i in range(19) if i != 1]
    for name in ("softened", "tokens"):
        assert torch.allclose(spoilt[name][rest], clean[name][rest].to(spoilt[name]), rtol=1e-4)
    assert torch.isfinite(spoilt["softened"][1]).all() == (value == 1e25)


@pytest.mark.parametrize("kind", ["rank1", "diagonal", "identity"])
def test_position_biases_are_those_of_the_reference(kind: Any) -> None:
    torch.manual_seed(8)
    tokens, beta = torch.randn(6, 8, 32), torch.tensor([0.2, 0.5, 0.3])

    def bias(spectrum: Spectrum) -> Tensor:
        return position_bias(kind, tokens, soften(tokens, 0.5, spectrum)[1], spectrum, beta)

    ours = bias(decompose(tokens))
    with fused.reference():
        theirs = bias(decompose(tokens))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_what_has_no_kernel_takes_the_reference_and_lapack_can_be_asked_for() -> None:
    tokens = torch.randn(3, 4, 6)
    assert fused.applies(tokens) and not fused.applies(tokens.double())
    assert not fused.applies(tokens.to("meta"))
    with fused.reference():
        assert not fused.applies(tokens)
    spectrum = decompose(tokens, solver="lapack")
    assert torch.allclose(spectrum.values, decompose(tokens).values, rtol=1e-4)
    vector = position_vector(tokens, spectrum.values.sqrt(), spectrum, torch.ones(3))
    assert vector.shape == (3, 4)


def test_an_empty_batch_stays_empty() -> None:
    tokens = torch.randn(0, 4, 6, requires_grad=True)
    softened, sigma = soften(tokens, 0.5, decompose(tokens))
    softened.sum().backward()
    assert softened.shape == (0, 4, 6) and sigma.shape == (0, 4)


def test_a_library_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fused.library()
    assert library is not None and fused.check(library) == ""
    right = fused.soften
    monkeypatch.setattr(fused, "soften", lambda *words: (2 * right(*words)[0], right(*words)[1]))
    assert "does not compute what LAPACK does" in fused.check(library)


def test_a_traced_graph_has_no_call_into_the_library() -> None:
    class Softened(torch.nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return soften(tokens, 0.5, decompose(tokens))[0]

    tokens = torch.randn(4, 5, 9)
    with torch.no_grad():
        program = torch.export.export(Softened(), (tokens,))
        assert torch.allclose(program.module()(tokens), Softened()(tokens), atol=1e-5)

# SPDX-License-Identifier: MIT
# pyright: reportIncompatibleMethodOverride=false
"""Spectra of token matrices: softening, position bias and their exact gradients.

SpecFormer (equations 16-18 and 22-25) is written with one singular value decomposition an example,
`H = U Σ Vᵀ`. No decomposition of H is needed: softening is a power of a Gram matrix,
`H* = U Σ^τ Vᵀ = (H Hᵀ)^((τ-1)/2) H`, and one symmetric eigendecomposition of the smaller of `H Hᵀ`
and `Hᵀ H` serves softening and position bias together. Its gradient is written down instead of left
to autograd: differentiating eigenvectors divides by the gaps between eigenvalues and gives NaN for
repeated ones, while the gradient of a matrix *function* needs only its divided differences
(Daleckii-Krein), which are finite for repeated, nearly equal and zero singular values.

A Gram matrix squares the condition number, so it and everything of its size run in float64,
whatever the tokens' dtype and whether or not autocast is on; the products of the result with the
tokens run in the tokens' own dtype, at least float32. Eigenvalues are floored at `floor * λ1`,
because σ^τ has infinite slope at 0; the gradient is that of the floored function.

Shapes: B examples, T tokens, D token width, n = min(T, D).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PositionBias = Literal["rank1", "diagonal", "identity", "none"]

# sigma = 1e-4 sigma_1: below this, the singular values of float32 tokens carry few correct digits.
DEFAULT_FLOOR = 1e-8
# Smallest eigenvalue that is told from 0 when all of an example's tokens vanish.
_SMALLEST = 1e-12
# A column sum this close to 0 does not decide the sign of a unit vector.
_SIGN_TOLERANCE = 1e-9


class Spectrum(NamedTuple):
    """Eigendecomposition of the smaller Gram matrix of B token matrices; carries no gradient.

    values: (B, n) float64 eigenvalues λ = σ², largest first.
    vectors: (B, n, n) float64 eigenvectors in columns: U of the tokens if T <= D, else their V.
    transposed: whether the Gram matrix is Hᵀ H (T > D).
    """

    values: Tensor
    vectors: Tensor
    transposed: bool


def decompose(tokens_BTD: Tensor) -> Spectrum:
    """Return the spectrum of every example's (T, D) matrix.

    Examples with non-finite tokens (an overflow in half precision) do not stop the batch: their
    spectra are finite and meaningless, and what is computed from their tokens stays non-finite.
    """
    with torch.no_grad(), torch.autocast(tokens_BTD.device.type, enabled=False):
        transposed = tokens_BTD.shape[-2] > tokens_BTD.shape[-1]
        rows = tokens_BTD.detach().double()
        rows = rows.mT if transposed else rows
        gram = torch.nan_to_num(rows @ rows.mT, nan=0.0, posinf=0.0, neginf=0.0)
        values, vectors = torch.linalg.eigh(gram)
        return Spectrum(values.flip(-1).clamp_min(0.0), vectors.flip(-1), transposed)


def soften(
    tokens_BTD: Tensor, tau: Tensor | float, spectrum: Spectrum, floor: float = DEFAULT_FLOOR
) -> tuple[Tensor, Tensor]:
    """Return softened tokens `U Σ^τ Vᵀ` (equations 16-18) and the singular values.

    tau: scalar exponent; 1 leaves the tokens alone, 0 gives the polar factor U Vᵀ.
    spectrum: `decompose(tokens_BTD)`.
    Returns (B, T, D) softened tokens, float32 or the tokens' wider type, and (B, n) float64
    singular values, largest first. Both carry gradients to the tokens, the first also to tau.
    """
    tau = torch.as_tensor(tau, dtype=torch.float64, device=tokens_BTD.device)
    rows = tokens_BTD.mT if spectrum.transposed else tokens_BTD
    softened, sigma = _Soften.apply(rows, tau, spectrum.values, spectrum.vectors, floor)
    return (softened.mT if spectrum.transposed else softened), sigma


def position_vector(
    tokens_BTD: Tensor,
    sigma: Tensor,
    spectrum: Spectrum,
    beta: Tensor,
    through_vectors: bool = False,
) -> Tensor:
    """Return p (B, T) float64 with P_bias = p pᵀ: `p = σ1 U f(σ / σ1)` (equations 22-25).

    sigma: (B, n) singular values from `soften`; beta: (3,) coefficients of f(x) = β0 + β1 x + β2
    x². A singular vector is defined up to its sign, and p is not invariant to it. The sign is
    chosen so that the entries of each u sum to a positive number (or, where the sum vanishes, the
    largest entry is positive): this depends neither on the solver nor on the order of the tokens.
    through_vectors: also differentiate U. Off by default: that gradient grows as one over the gap
    between eigenvalues, and p jumps where a sum crosses 0. (Repeated eigenvalues contribute
    nothing.)
    """
    with torch.autocast(tokens_BTD.device.type, enabled=False):
        vectors = spectrum.vectors
        rows = tokens_BTD.double() if through_vectors else tokens_BTD.detach().double()
        if through_vectors:
            side = rows.mT if spectrum.transposed else rows
            vectors = _Eigenvectors.apply(side @ side.mT, spectrum.values, vectors)
        if spectrum.transposed:
            scale = sigma if through_vectors else sigma.detach()
            vectors = rows @ vectors / _floored(scale, 1e-8, 1e-6)[..., None, :]
        weights = sigma[..., :1] * _polynomial(sigma, beta) * canonical_signs(vectors)
        return (vectors @ weights[..., None])[..., 0]


def position_bias(
    kind: PositionBias,
    tokens_BTD: Tensor,
    sigma: Tensor,
    spectrum: Spectrum,
    beta: Tensor,
) -> Tensor:
    """Return P_bias (B, T, T) float64.

    `rank1`: p pᵀ as in the paper, U detached. `diagonal`: U diag(σ1² f²) Uᵀ, which needs no sign
    and is smooth in the tokens. `identity`: U Uᵀ (the paper's ablation P = I). `none`: zeros.
    """
    if kind == "rank1":
        p = position_vector(tokens_BTD, sigma, spectrum, beta)
        return p[..., :, None] * p[..., None, :]
    num_tokens = tokens_BTD.shape[-2]
    if kind == "none":
        return sigma.new_zeros(*tokens_BTD.shape[:-1], num_tokens)
    with torch.autocast(tokens_BTD.device.type, enabled=False):
        if spectrum.transposed:
            tokens = tokens_BTD.double()
            polar, _ = soften(tokens, 0.0, spectrum)
            identity, root = polar @ polar.mT, polar @ tokens.mT
        else:
            identity = torch.eye(num_tokens, dtype=torch.float64, device=sigma.device)
            identity = identity.expand(len(sigma), -1, -1)
            root = None
        if kind == "identity":
            return identity
        if root is None:
            root = _Root.apply(tokens_BTD, spectrum.values, spectrum.vectors, DEFAULT_FLOOR)
        sigma1 = sigma[..., :1, None]
        # U diag(σ / σ1) Uᵀ is a function of the Gram matrix: no sign, no gap in its gradient.
        root = root / sigma1.clamp_min(_SMALLEST)
        b0, b1, b2 = beta.double().unbind()
        mapped = b0 * identity + b1 * root + b2 * (root @ root)
        return sigma1.square() * (mapped @ mapped)


def canonical_signs(vectors: Tensor) -> Tensor:
    """Return (B, n) signs that make each column of (B, T, n) `vectors` sum to a positive number."""
    vectors = vectors.detach()
    total = vectors.sum(-2)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))[..., 0, :]
    deciding = torch.where(total.abs() > _SIGN_TOLERANCE, total, largest)
    return torch.where(deciding < 0, -1.0, 1.0).to(vectors.dtype)


def _polynomial(sigma: Tensor, beta: Tensor) -> Tensor:
    """Return f(σ / σ1) of equation 24, (B, n)."""
    ratio = sigma / sigma[..., :1].clamp_min(_SMALLEST)
    b0, b1, b2 = beta.double().unbind()
    return b0 + ratio * (b1 + ratio * b2)


def _floored(values: Tensor, floor: float, smallest: float) -> Tensor:
    """Return (B, n) `values`, largest first, raised to `floor` times the largest."""
    return torch.maximum(values, (floor * values[..., :1]).clamp_min(smallest))


def divided_differences(values: Tensor, power: Tensor, floor: float) -> Tensor:
    """Return K (B, n, n), the divided differences of x -> max(x, floor·x1)^power at `values`.

    K_ij = (g_i - g_j) / (x_i - x_j) and K_ii = g'(x_i). Equal and nearly equal values use the
    series of sinh(p r) / sinh(r) in r = ½ ln(x_i / x_j), times (x_i x_j)^((p-1)/2), instead of a
    difference that cancels. Where one of a pair lies under the floor only a part of the distance
    counts; where both do, the slope is 0.
    """
    raised = _floored(values, floor, _SMALLEST)
    half_log = 0.5 * raised.log()
    powered = raised**power
    root = raised ** ((power - 1.0) / 2.0)
    squared = (half_log[..., :, None] - half_log[..., None, :]).square()
    distance = values[..., :, None] - values[..., None, :]
    equal = distance == 0
    distance = distance.masked_fill(equal, 1.0)
    # The next term of the series is below 1e-14 for |r| < 0.01.
    p2 = power.square()
    series = 1.0 + squared * ((p2 - 1.0) / 6.0) * (1.0 + squared * ((3.0 * p2 - 7.0) / 60.0))
    series = series * (power * root)[..., :, None] * root[..., None, :]
    part = (raised[..., :, None] - raised[..., None, :]) / distance
    above = (values >= raised)[..., :, None].to(part.dtype)
    near = series * torch.where(equal, above, part)
    far = (powered[..., :, None] - powered[..., None, :]) / distance
    return torch.where(squared < 1e-4, near, far)


def _power(values: Tensor, vectors: Tensor, power: Tensor, floor: float) -> Tensor:
    """Return Q diag(λ^p) Qᵀ (B, n, n) float64 with floored λ."""
    scale = _floored(values, floor, _SMALLEST) ** power
    return vectors * scale[..., None, :] @ vectors.mT


def _power_backward(
    grad: Tensor, values: Tensor, vectors: Tensor, power: Tensor, floor: float
) -> tuple[Tensor, Tensor]:
    """Return C (B, n, n) with grad_X = C X, and the gradient of p, for Y = (X Xᵀ)^p and `grad` of
    Y.

    With M = Qᵀ grad Q: C = 2 Q (K ∘ sym(M)) Qᵀ and grad_p = Σ_i M_ii λ_i^p ln λ_i.
    """
    raised = _floored(values, floor, _SMALLEST)
    inner = vectors.mT @ grad @ vectors
    along = inner.diagonal(dim1=-2, dim2=-1) * raised**power
    mixed = (inner + inner.mT) * divided_differences(values, power, floor)
    # The floor itself moves with λ1: d(floor·λ1)^p / dλ1 = p (floor·λ1)^p / λ1.
    rises = (values < raised) & (floor * values[..., :1] > _SMALLEST)
    moved = 2.0 * power * torch.where(rises, along, 0.0).sum(-1)
    mixed[..., 0, 0] += moved / values[..., 0].clamp_min(_SMALLEST)
    return vectors @ mixed @ vectors.mT, (along * raised.log()).sum()


class _Soften(torch.autograd.Function):
    """(rows X (B, n, m), τ, λ, Q, floor) -> (Q diag(λ^((τ-1)/2)) Qᵀ X, sqrt(λ))."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, tau: Tensor, values: Tensor, vectors: Tensor, floor: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):
            wide = torch.promote_types(rows.dtype, torch.float32)
            power = _power(values, vectors, (tau - 1.0) / 2.0, floor)
            softened = power.to(wide) @ rows.to(wide)
        ctx.save_for_backward(rows, tau, values, vectors)
        ctx.floor = floor
        return softened, values.sqrt()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sigma: Tensor) -> tuple[Tensor | None, ...]:
        rows, tau, values, vectors = ctx.saved_tensors
        power = (tau - 1.0) / 2.0
        with torch.autocast(rows.device.type, enabled=False):
            wide_rows = rows.to(grad.dtype)
            grad_power = (grad @ wide_rows.mT).double()
            mixed, slope = _power_backward(grad_power, values, vectors, power, ctx.floor)
            # dσ_i = u_iᵀ dH v_i and v_i = Hᵀ u_i / σ_i.
            weight = grad_sigma / _floored(values, ctx.floor, _SMALLEST).sqrt()
            mixed = mixed + vectors * weight[..., None, :] @ vectors.mT
            outer = _power(values, vectors, power, ctx.floor)
            grad_rows = torch.baddbmm(outer.to(grad.dtype) @ grad, mixed.to(grad.dtype), wide_rows)
        return grad_rows.to(rows.dtype), 0.5 * slope, None, None, None


class _Root(torch.autograd.Function):
    """(rows X (B, n, m), λ, Q, floor) -> (X Xᵀ)^½ (B, n, n) float64."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, values: Tensor, vectors: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(rows, values, vectors)
        ctx.floor = floor
        return _power(values, vectors, values.new_tensor(0.5), floor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, values, vectors = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            half = values.new_tensor(0.5)
            mixed, _ = _power_backward(grad, values, vectors, half, ctx.floor)
            wide = torch.promote_types(rows.dtype, torch.float32)
            grad_rows = mixed.to(wide) @ rows.to(wide)
        return grad_rows.to(rows.dtype), None, None, None


class _Eigenvectors(torch.autograd.Function):
    """(gram (B, n, n), λ, Q) -> Q, differentiable in the Gram matrix.

    dQ = Q (F ∘ (Qᵀ dA Q)) with F_ij = 1 / (λ_j - λ_i), broadened to gap / (gap² + δ²) with δ = 1e-9
    λ1 so that equal eigenvalues, whose vectors have no derivative, contribute 0 instead of
    infinity.
    """

    @staticmethod
    def forward(ctx: Any, gram: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(values, vectors)
        return vectors.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, vectors = ctx.saved_tensors
        gap = values[..., None, :] - values[..., :, None]
        width = (1e-9 * values[..., :1, None]).clamp_min(_SMALLEST)
        inner = (vectors.mT @ grad) * gap / (gap.square() + width.square())
        grad_gram = vectors @ inner @ vectors.mT
        return 0.5 * (grad_gram + grad_gram.mT), None, None

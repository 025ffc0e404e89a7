# SPDX-License-Identifier: MIT
# pyright: reportIncompatibleMethodOverride=false
"""The spectral operator: softening, position bias and their exact gradients.

SpecFormer (equations 16-18 and 22-25) is written with one singular value decomposition an example,
`H = U Σ Vᵀ`. No decomposition of H is needed: softening is a power of a Gram matrix,
`H* = U Σ^τ Vᵀ = (H Hᵀ)^((τ-1)/2) H`, and one symmetric eigendecomposition of the smaller of `H Hᵀ`
and `Hᵀ H` (models/spectral/spectrum.py) serves softening and position bias together. Its gradient
is written down instead of left to autograd (models/spectral/matrix_power.py): differentiating
eigenvectors divides by the gaps between eigenvalues, the gradient of a matrix *function* does not.

Everything of a Gram matrix's size runs in the type of the spectrum, float64 unless float32 was
measured to be enough; the products with the tokens run in the tokens' own type, at least float32.
Neither follows autocast.

Shapes: B examples, T tokens, D token width, n = min(T, D).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.spectral import fused
from models.spectral.matrix_power import SMALLEST, floored, matrix_power, matrix_power_backward
from models.spectral.spectrum import Spectrum

PositionBias = Literal["rank1", "diagonal", "identity", "none"]

# sigma = 1e-4 sigma_1: below this, the singular values of float32 tokens carry few correct digits.
DEFAULT_FLOOR = 1e-8
# A column sum this close to 0 does not decide the sign of a unit vector.
_SIGN_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-9}


def soften(
    tokens_BTD: Tensor, tau: Tensor | float, spectrum: Spectrum, floor: float = DEFAULT_FLOOR
) -> tuple[Tensor, Tensor]:
    """Return softened tokens `U Σ^τ Vᵀ` (equations 16-18) and the singular values.

    Args:
        tokens_BTD: (B, T, D).
        tau: scalar exponent; 1 leaves the tokens alone, 0 gives the polar factor U Vᵀ.
        spectrum: `decompose(tokens_BTD)`.
        floor: eigenvalues are floored at this share of the largest.

    Returns:
        (B, T, D) softened tokens, float32 or the tokens' wider type, and (B, n) singular values,
        largest first, in the type of the spectrum. Both carry gradients to the tokens, the first
        also to tau.
    """
    tau = torch.as_tensor(tau, dtype=torch.float64, device=tokens_BTD.device)
    if fused.applies(tokens_BTD):
        softened, sigma = _FusedSoften.apply(
            tokens_BTD, tau, spectrum.values, spectrum.vectors, floor
        )
        return softened, sigma
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
    """Return p (B, T) with P_bias = p pᵀ: `p = σ1 U f(σ / σ1)` (equations 22-25).

    A singular vector is defined up to its sign, and p is not invariant to it. The sign is chosen so
    that the entries of each u sum to a positive number (or, where the sum vanishes, the largest
    entry is positive): this depends neither on the solver nor on the order of the tokens.

    Args:
        tokens_BTD: (B, T, D).
        sigma: (B, n) singular values from `soften`.
        spectrum: `decompose(tokens_BTD)`.
        beta: (3,) coefficients of f(x) = β0 + β1 x + β2 x².
        through_vectors: whether to differentiate U too. That gradient grows as one over the gap
            between eigenvalues, and p jumps where a sum crosses 0. Repeated eigenvalues contribute
            nothing.

    Returns:
        p in the type of the spectrum.

    Raises:
        ValueError: through_vectors with a float32 spectrum, which cannot tell such gaps.
    """
    with torch.autocast(tokens_BTD.device.type, enabled=False):
        vectors = spectrum.vectors
        rows = (tokens_BTD if through_vectors else tokens_BTD.detach()).to(vectors.dtype)
        if through_vectors:
            if vectors.dtype != torch.float64:
                raise ValueError(
                    "position_vector: through_vectors needs a float64 spectrum, got "
                    f"{vectors.dtype}; use decompose(tokens, precision='double')"
                )
            side = rows.mT if spectrum.transposed else rows
            vectors = _Eigenvectors.apply(side @ side.mT, spectrum.values, vectors)
        if spectrum.transposed:
            scale = sigma if through_vectors else sigma.detach()
            vectors = _product(rows, vectors) / floored(scale, 1e-8, 1e-6)[..., None, :]
        # (B, n)
        weights = sigma[..., :1] * _polynomial(sigma, beta) * canonical_signs(vectors)
        # (B, 1, n) @ (B, n, T) -> (B, T): a row times a matrix, since the solvers' vectors lie in
        # rows: three times as fast as the matrix times a column.
        return _product(weights[..., None, :], vectors.mT)[..., 0, :]


def position_bias(
    kind: PositionBias,
    tokens_BTD: Tensor,
    sigma: Tensor,
    spectrum: Spectrum,
    beta: Tensor,
) -> Tensor:
    """Return P_bias (B, T, T) in the type of the spectrum.

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
            tokens = tokens_BTD.to(torch.promote_types(tokens_BTD.dtype, sigma.dtype))
            polar, _ = soften(tokens, 0.0, spectrum)
            identity, root = _product(polar, polar.mT), _product(polar, tokens.mT)
        else:
            identity = torch.eye(num_tokens, dtype=sigma.dtype, device=sigma.device)
            identity = identity.expand(len(sigma), -1, -1)
            root = None
        if kind == "identity":
            return identity
        if root is None:
            root = _Root.apply(tokens_BTD, spectrum.values, spectrum.vectors, DEFAULT_FLOOR)
        sigma1 = sigma[..., :1, None]
        # U diag(σ / σ1) Uᵀ is a function of the Gram matrix: no sign, no gap in its gradient.
        root = root / sigma1.clamp_min(SMALLEST)
        b0, b1, b2 = beta.to(sigma.dtype).unbind()
        mapped = b0 * identity + b1 * root + b2 * _product(root, root)
        return sigma1.square() * _product(mapped, mapped)


def canonical_signs(vectors: Tensor) -> Tensor:
    """Return (B, n) signs that make each column of (B, T, n) `vectors` sum to a positive number."""
    vectors = vectors.detach()
    deciding = vectors.sum(-2)
    clear = deciding.abs() > _SIGN_TOLERANCE[vectors.dtype]
    # A sum that vanishes is rare, and finding the largest entries takes longer than all else. A
    # traced graph cannot branch on values, and asking a GPU for them would wait for it.
    ask = vectors.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (ask and bool(clear.all())):
        largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))[..., 0, :]
        deciding = torch.where(clear, deciding, largest)
    return torch.where(deciding < 0, -1.0, 1.0).to(vectors.dtype)


def _polynomial(sigma: Tensor, beta: Tensor) -> Tensor:
    """Return f(σ / σ1) of equation 24, (B, n)."""
    ratio = sigma / sigma[..., :1].clamp_min(SMALLEST)
    b0, b1, b2 = beta.to(sigma.dtype).unbind()
    return b0 + ratio * (b1 + ratio * b2)


class _Product(torch.autograd.Function):
    """(A, B) -> A B, whose backward leaves autocast too, should it be called inside one."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_left = grad @ right.mT if ctx.needs_input_grad[0] else None
            return grad_left, left.mT @ grad if ctx.needs_input_grad[1] else None


def _product(left: Tensor, right: Tensor) -> Tensor:
    product = _Product.apply(left, right)
    assert isinstance(product, Tensor)
    return product


class _Soften(torch.autograd.Function):
    """(rows X (B, n, m), τ, λ, Q, floor) -> (Q diag(λ^((τ-1)/2)) Qᵀ X, sqrt(λ)).

    With P = (X Xᵀ)^((τ-1)/2), Y = P X and `grad` of Y: grad_X = P grad + C X, where C is the
    gradient of the power for `grad Xᵀ` (models/spectral/matrix_power.py).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, tau: Tensor, values: Tensor, vectors: Tensor, floor: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):
            wide = torch.promote_types(rows.dtype, torch.float32)
            power = matrix_power(values, vectors, (tau - 1.0) / 2.0, floor).to(wide)
            softened = power @ rows.to(wide)
        ctx.save_for_backward(rows, tau, values, vectors, power)
        ctx.floor = floor
        return softened, values.sqrt()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sigma: Tensor) -> tuple[Tensor | None, ...]:
        rows, tau, values, vectors, power = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            rows_wide = rows.to(grad.dtype)
            # dσ_i = u_iᵀ dH v_i and v_i = Hᵀ u_i / σ_i.
            along = grad_sigma / floored(values, ctx.floor).sqrt()
            grad_power = (grad @ rows_wide.mT).to(values.dtype)
            exponent = (tau - 1.0) / 2.0
            mixed, slope = matrix_power_backward(
                grad_power, values, vectors, exponent, ctx.floor, along
            )
            grad_rows = power @ grad
            grad_rows.baddbmm_(mixed.to(grad.dtype), rows_wide)
        return grad_rows.to(rows.dtype), 0.5 * slope.to(tau.dtype), None, None, None


class _FusedSoften(torch.autograd.Function):
    """What `_Soften` is, of tokens (B, T, D), by compiled code: models/spectral/fused.py."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, tau: Tensor, values: Tensor, vectors: Tensor, floor: float
    ) -> tuple[Tensor, Tensor]:
        exponent = (float(tau) - 1.0) / 2.0
        softened, power = fused.soften(tokens, values, vectors, exponent, floor)
        ctx.save_for_backward(tokens, values, vectors, power)
        ctx.exponent, ctx.floor = exponent, floor
        return softened, values.sqrt()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sigma: Tensor) -> tuple[Tensor | None, ...]:
        tokens, values, vectors, power = ctx.saved_tensors
        along = grad_sigma / floored(values, ctx.floor).sqrt()
        found = fused.Found(values, vectors.mT)
        grad_tokens, slope = fused.soften_backward(
            grad, tokens, found, power, along, ctx.exponent, ctx.floor
        )
        grad_tau = torch.tensor(0.5 * slope, dtype=torch.float64)
        return grad_tokens.to(tokens.dtype), grad_tau, None, None, None


class _Root(torch.autograd.Function):
    """(rows X (B, n, m), λ, Q, floor) -> (X Xᵀ)^½ (B, n, n), of the type of λ."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, values: Tensor, vectors: Tensor, floor: float) -> Tensor:
        ctx.save_for_backward(rows, values, vectors)
        ctx.floor = floor
        return matrix_power(values, vectors, values.new_tensor(0.5), floor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, values, vectors = ctx.saved_tensors
        with torch.autocast(rows.device.type, enabled=False):
            half = values.new_tensor(0.5)
            nothing = torch.zeros_like(values)
            mixed, _ = matrix_power_backward(grad, values, vectors, half, ctx.floor, nothing)
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
        width = (1e-9 * values[..., :1, None]).clamp_min(SMALLEST)
        inner = (vectors.mT @ grad) * gap / (gap.square() + width.square())
        grad_gram = vectors @ inner @ vectors.mT
        return 0.5 * (grad_gram + grad_gram.mT), None, None

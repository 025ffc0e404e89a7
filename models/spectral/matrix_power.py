# SPDX-License-Identifier: MIT
"""Powers of symmetric matrices from their eigendecompositions, and the gradient of such a power.

For A = Q diag(λ) Qᵀ and g(x) = x^p, the derivative of g(A) in the direction E is
`Q (K ∘ (Qᵀ E Q)) Qᵀ` with the divided differences `K_ij = (g(λ_i) - g(λ_j)) / (λ_i - λ_j)` and
`K_ii = g'(λ_i)` (Daleckii-Krein). The formula contains no derivative of an eigenvector. It is
finite and exact for repeated, nearly equal and zero eigenvalues. Automatic differentiation through
an eigendecomposition is not.

Eigenvalues are floored at `floor · λ1`, because x^p has infinite slope at 0. The gradient is that
of the floored function, including the dependence of the floor on λ1.

Shapes: B examples, n eigenvalues, largest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Absolute floor of the eigenvalues, for examples whose tokens are all 0.
SMALLEST = 1e-12
# Smallest λn/λ1 of an example whose spectrum is kept in float32 (models/spectral/spectrum.py).
MIN_RATIO = 1e-3
# Bytes of one (chunk, n, n) array of a CPU's chunk, small enough for its cache.
_CACHED_BYTES = 1 << 19


def floored(values: Tensor, floor: float, smallest: float = SMALLEST) -> Tensor:
    """Return (B, n) `values`, largest first, raised to `floor` times the largest."""
    return torch.maximum(values, (floor * values[..., :1]).clamp_min(smallest))


def divided_differences(values: Tensor, power: Tensor, floor: float) -> Tensor:
    """Return K (B, n, n), the divided differences of x -> max(x, floor·x1)^power at `values`.

    Let r be the floored values and D_ij = ln r_i - ln r_j. The difference quotient of the power is
    `r_j^(p-1) · expm1(p D_ij) / expm1(D_ij)`. It does not cancel when r_i is near r_j, and is
    `p r_j^(p-1)` at D_ij = 0. If one value of a pair is below the floor, only a part of their
    distance counts. If both are, the slope is 0.

    Args:
        values: (B, n) eigenvalues, largest first.
        power: 0-d exponent p.
        floor: relative floor of the eigenvalues.
    """
    raised = floored(values, floor)
    logs = raised.log()
    gap = logs[..., :, None] - logs[..., None, :]  # (B, n, n), D_ij
    below = torch.expm1(gap)
    quotient = torch.expm1(gap.mul_(power.to(gap.dtype))).div_(below)
    quotient = torch.where(below == 0, power.to(gap.dtype), quotient)
    quotient.mul_((raised ** (power - 1.0))[..., None, :])
    if values.dtype == torch.float32 and floor <= MIN_RATIO:
        return quotient  # no eigenvalue is below the floor: models/spectral/spectrum.py checks it
    distance = values[..., :, None] - values[..., None, :]
    equal = distance == 0
    part = (raised[..., :, None] - raised[..., None, :]) / distance.masked_fill(equal, 1.0)
    above = (values >= raised)[..., :, None].to(part.dtype)  # (B, n, 1)
    return quotient.mul_(torch.where(equal, above, part))


def matrix_power(values: Tensor, vectors: Tensor, power: Tensor, floor: float) -> Tensor:
    """Return Q diag(λ^p) Qᵀ (B, n, n) with floored λ."""
    return vectors * (floored(values, floor) ** power)[..., None, :] @ vectors.mT


def matrix_power_backward(
    grad: Tensor, values: Tensor, vectors: Tensor, power: Tensor, floor: float, along: Tensor
) -> tuple[Tensor, Tensor]:
    """Return C (B, n, n) with grad_X = C X, and the gradient of p, for Y = (X Xᵀ)^p.

    With M = Qᵀ grad Q, `C = 2 Q (K ∘ sym(M)) Qᵀ` and `grad_p = Σ_i M_ii λ_i^p ln λ_i`.

    Args:
        grad: (B, n, n) gradient of Y.
        values: (B, n) eigenvalues of X Xᵀ, largest first.
        vectors: (B, n, n) eigenvectors in columns.
        power: 0-d exponent p.
        floor: relative floor of the eigenvalues.
        along: (B, n) added to the diagonal between Q and Qᵀ, for the gradients of functions of the
            eigenvalues alone.
    """
    chunk = len(grad)
    if grad.device.type == "cpu":
        chunk = max(1, _CACHED_BYTES // (grad.element_size() * grad.shape[-1] ** 2))
    parts = zip(*(x.split(chunk) for x in (grad, values, vectors, along)), strict=True)
    done = [_part_backward(*part, power=power, floor=floor) for part in parts]
    mixed, slopes = zip(*done, strict=True)
    return torch.cat(mixed), torch.stack(slopes).sum()


def _part_backward(
    grad: Tensor, values: Tensor, vectors: Tensor, along: Tensor, power: Tensor, floor: float
) -> tuple[Tensor, Tensor]:
    raised = floored(values, floor)
    inner = vectors.mT @ grad @ vectors  # (B, n, n), M
    share = inner.diagonal(dim1=-2, dim2=-1) * raised**power  # (B, n), M_ii λ_i^p
    mixed = divided_differences(values, power, floor).mul_(inner + inner.mT)
    mixed.diagonal(dim1=-2, dim2=-1).add_(along)
    # The floor itself moves with λ1: d(floor·λ1)^p / dλ1 = p (floor·λ1)^p / λ1.
    rises = (values < raised) & (floor * values[..., :1] > SMALLEST)
    moved = 2.0 * power * torch.where(rises, share, 0.0).sum(-1)
    mixed[..., 0, 0] += moved / values[..., 0].clamp_min(SMALLEST)
    return vectors @ mixed @ vectors.mT, (share * raised.log()).sum()

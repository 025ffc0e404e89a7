# SPDX-License-Identifier: MIT
"""Powers of symmetric matrices from their eigendecompositions, and the gradient of such a power.

For A = Q diag(λ) Qᵀ and g(x) = x^p, the derivative of g(A) in the direction E is
`Q (K ∘ (Qᵀ E Q)) Qᵀ` with the divided differences `K_ij = (g(λ_i) - g(λ_j)) / (λ_i - λ_j)` and
`K_ii = g'(λ_i)` (Daleckii-Krein). It contains no derivative of an eigenvector and no gap in a
denominator that is not also in its numerator: it is finite and exact for repeated, nearly equal and
zero eigenvalues, where automatic differentiation through an eigendecomposition is not.

Eigenvalues are floored at `floor · λ1`, because x^p has infinite slope at 0; the gradient is that
of the floored function, the moving floor included.

Shapes: B examples, n eigenvalues, largest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Smallest eigenvalue that is told from 0 when all of an example's tokens vanish.
SMALLEST = 1e-12
# Least λn/λ1 of every example whose spectrum is kept in float32 (models/spectral/spectrum.py).
MIN_RATIO = 1e-3
# Bytes of one (chunk, n, n) array that a CPU works on at a time, so that its cache holds them.
_CACHED_BYTES = 1 << 19


def floored(values: Tensor, floor: float, smallest: float = SMALLEST) -> Tensor:
    """Return (B, n) `values`, largest first, raised to `floor` times the largest."""
    return torch.maximum(values, (floor * values[..., :1]).clamp_min(smallest))


def divided_differences(values: Tensor, power: Tensor, floor: float) -> Tensor:
    """Return K (B, n, n), the divided differences of x -> max(x, floor·x1)^power at `values`.

    With r the floored values and D_ij = ln r_i - ln r_j the difference quotient of the power is
    `r_j^(p-1) · expm1(p D_ij) / expm1(D_ij)`, which does not cancel however near r_i is to r_j, and
    is `p r_j^(p-1)` at D_ij = 0. Where one of a pair lies under the floor only a part of the
    distance between them counts; where both do, the slope is 0.
    """
    raised = floored(values, floor)
    logs = raised.log()
    gap = logs[..., :, None] - logs[..., None, :]
    below = torch.expm1(gap)
    quotient = torch.expm1(gap.mul_(power.to(gap.dtype))).div_(below)
    quotient = torch.where(below == 0, power.to(gap.dtype), quotient)
    quotient.mul_((raised ** (power - 1.0))[..., None, :])
    if values.dtype == torch.float32 and floor <= MIN_RATIO:
        return quotient  # nothing lies under the floor, as models/spectral/spectrum.py has measured
    distance = values[..., :, None] - values[..., None, :]
    equal = distance == 0
    part = (raised[..., :, None] - raised[..., None, :]) / distance.masked_fill(equal, 1.0)
    above = (values >= raised)[..., :, None].to(part.dtype)
    return quotient.mul_(torch.where(equal, above, part))


def matrix_power(values: Tensor, vectors: Tensor, power: Tensor, floor: float) -> Tensor:
    """Return Q diag(λ^p) Qᵀ (B, n, n) with floored λ."""
    return vectors * (floored(values, floor) ** power)[..., None, :] @ vectors.mT


def matrix_power_backward(
    grad: Tensor, values: Tensor, vectors: Tensor, power: Tensor, floor: float, along: Tensor
) -> tuple[Tensor, Tensor]:
    """Return C (B, n, n) with grad_X = C X, and the gradient of p, for Y = (X Xᵀ)^p.

    grad: (B, n, n), the gradient of Y. With M = Qᵀ grad Q, `C = 2 Q (K ∘ sym(M)) Qᵀ` and
    `grad_p = Σ_i M_ii λ_i^p ln λ_i`. along: (B, n) added to the diagonal between Q and Qᵀ, for the
    gradients of functions of the eigenvalues alone.
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
    inner = vectors.mT @ grad @ vectors
    share = inner.diagonal(dim1=-2, dim2=-1) * raised**power
    mixed = divided_differences(values, power, floor).mul_(inner + inner.mT)
    mixed.diagonal(dim1=-2, dim2=-1).add_(along)
    # The floor itself moves with λ1: d(floor·λ1)^p / dλ1 = p (floor·λ1)^p / λ1.
    rises = (values < raised) & (floor * values[..., :1] > SMALLEST)
    moved = 2.0 * power * torch.where(rises, share, 0.0).sum(-1)
    mixed[..., 0, 0] += moved / values[..., 0].clamp_min(SMALLEST)
    return vectors @ mixed @ vectors.mT, (share * raised.log()).sum()

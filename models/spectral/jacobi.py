# SPDX-License-Identifier: MIT
"""Eigendecompositions of a batch of small symmetric matrices by parallel Jacobi rotations.

LAPACK decomposes a batch one matrix after the other. Jacobi's method applies the same operations to
all matrices at once. A round rotates n/2 disjoint pairs of rows and columns in every matrix. A
sweep is n - 1 rounds, which cover every pair once, as in a round-robin tournament. A few sweeps
converge quadratically. The method is for devices where many small kernels are faster than one
matrix at a time. On a CPU LAPACK is faster (models/README.md has both figures).

Shapes: B matrices, n rows. Internally the batch dimension is last, for contiguous memory access.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_SWEEPS = 16


def eigh_jacobi(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (B, n), ascending, and eigenvectors (B, n, n) in columns, as `eigh` does.

    Args:
        matrices: (B, n, n), symmetric, float32 or float64, finite.

    Raises:
        RuntimeError: 16 sweeps do not converge; it does not happen with finite input.
    """
    num_rows = matrices.shape[-1]
    odd = num_rows % 2
    # An odd number of rows is padded by a row of zeros, which no rotation mixes with others.
    padded = torch.nn.functional.pad(matrices, (0, odd, 0, odd))
    inner = padded.permute(1, 2, 0).contiguous()
    size = num_rows + odd
    # Rows of `frame` are the eigenvectors, in the same order as those of `inner`.
    frame = torch.eye(size, dtype=inner.dtype, device=inner.device)[..., None].expand_as(inner)
    order = _next_round(size).to(inner.device)
    tolerance = 4.0 * torch.finfo(inner.dtype).eps
    for _ in range(_MAX_SWEEPS):
        for _ in range(size - 1):
            cosine, sine = _rotation(inner)
            inner = _rotate(inner, cosine, sine)[order]
            inner = _rotate(inner.transpose(0, 1), cosine, sine)[order].transpose(0, 1)
            frame = _rotate(frame, cosine, sine)[order]
        if _converged(inner, tolerance):
            break
    else:
        raise RuntimeError(f"jacobi: no convergence within {_MAX_SWEEPS} sweeps of {size} rows")
    values = inner.diagonal(dim1=0, dim2=1)
    # The padding row is the one whose eigenvector lies in the padded dimension: sort it last.
    rank = values
    if odd:
        rank = values.masked_fill(frame[:, -1].mT.abs() > 0.5, torch.inf)
    index = rank.argsort(dim=-1)[:, :num_rows]
    vectors = frame.permute(2, 1, 0)[:, :num_rows]
    return values.gather(-1, index), vectors.gather(
        -1, index[:, None, :].expand(-1, num_rows, -1)
    ).contiguous()


def _next_round(size: int) -> Tensor:
    """Return (size,) rows of this round in the order of the next; row i meets row i + size/2."""
    half = size // 2
    if half == 1:
        return torch.arange(size)
    top, bottom = list(range(half)), list(range(half, size))
    return torch.tensor([top[0], bottom[0], *top[1:-1], *bottom[1:], top[-1]])


def _rotation(inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (n/2, 1, B) that clear entries (i, i + n/2)."""
    half = inner.shape[0] // 2
    diagonal = inner.diagonal(dim1=0, dim2=1).mT
    twice = 2.0 * inner[:half, half:].diagonal(dim1=0, dim2=1).mT
    distance = diagonal[half:] - diagonal[:half]
    # Tangent of the smaller of the two angles; 0/0 is a pair that needs no rotation.
    tangent = twice / (distance + torch.copysign(torch.hypot(distance, twice), distance))
    tangent = tangent.nan_to_num(nan=0.0)
    cosine = (1.0 + tangent.square()).rsqrt()
    return cosine[:, None], (tangent * cosine)[:, None]


def _rotate(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = rows.shape[0] // 2
    top, bottom = rows[:half], rows[half:]
    return torch.cat(
        [
            torch.addcmul(cosine * top, sine, bottom, value=-1.0),
            torch.addcmul(cosine * bottom, sine, top),
        ]
    )


def _converged(inner: Tensor, tolerance: float) -> bool:
    diagonal = inner.diagonal(dim1=0, dim2=1).abs()
    rest = inner - torch.diag_embed(inner.diagonal(dim1=0, dim2=1), dim1=0, dim2=1)
    return bool((rest.abs().amax((0, 1)) <= tolerance * diagonal.amax(-1)).all())

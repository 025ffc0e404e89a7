# SPDX-License-Identifier: MIT
"""Spectra of a batch of token matrices: one small symmetric eigendecomposition an example.

The smaller of the Gram matrices H Hᵀ and Hᵀ H is decomposed instead of H. It squares the condition
number, so float64 is the reference. Float32 is used for an example only if its computed spectrum
allows it:

- The eigenvalues of a float32 Gram matrix have an error of about 1e-7 λ1. If the computed λn is
  above 1e-3 λ1 (singular values within a factor of 32), every direction has a relative error of
  about 1e-4, or 1e-5 of the whole, and needs no floor.
- Other examples are decomposed again in float64.
- A Cholesky factorisation costs a twentieth of a decomposition. Its smallest pivot bounds λn from
  above, so it shows in advance whether most of a batch needs float64.

Nothing here carries a gradient or follows autocast. models/spectral/matrix_power.py computes the
gradients. Examples with non-finite tokens (an overflow in half precision) do not stop the batch:
they get the spectrum of the identity, and results computed from their tokens stay non-finite.

Shapes: B examples, T tokens, D token width, n = min(T, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from models.spectral import fused
from models.spectral.jacobi import eigh_jacobi
from models.spectral.matrix_power import MIN_RATIO

Precision = Literal["measured", "double"]
Eigensolver = Literal["auto", "lapack", "jacobi"]


def _by_lapack(gram: Tensor) -> tuple[Tensor, Tensor]:
    return _SOLVERS["lapack"](gram)


_SOLVERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "auto": _by_lapack,
    "lapack": lambda gram: tuple(torch.linalg.eigh(gram)),
    "jacobi": eigh_jacobi,
}
# Numbers that a CPU converts to float64 at a time, so that they stay in its cache. This takes a
# third of the time of converting the whole batch first.
_CACHED_TOKENS = 80_000


class Spectrum(NamedTuple):
    """Eigendecomposition of the smaller Gram matrix of B token matrices; carries no gradient.

    Args:
        values: (B, n) eigenvalues λ = σ², largest first; float64, or float32 where every example's
            λn is above 1e-3 λ1.
        vectors: (B, n, n) eigenvectors in columns, of the same type: U of the tokens if T <= D,
            else their V.
        transposed: whether the Gram matrix is Hᵀ H (T > D).
    """

    values: Tensor
    vectors: Tensor
    transposed: bool


def decompose(
    tokens_BTD: Tensor, precision: Precision = "measured", solver: Eigensolver = "auto"
) -> Spectrum:
    """Return the spectrum of every example's (T, D) matrix.

    Args:
        tokens_BTD: (B, T, D).
        precision: `measured` uses float32 where the spectrum allows it; `double` uses float64. A
            traced or exported graph cannot branch on values and uses `double`, as do float64
            tokens.
        solver: `lapack`, one matrix after another; `jacobi`, all matrices at once; `auto`, the
            compiled one (models/spectral/fused.py) where it is there, else `lapack`.
    """
    with torch.no_grad(), torch.autocast(tokens_BTD.device.type, enabled=False):
        transposed = tokens_BTD.shape[-2] > tokens_BTD.shape[-1]
        if solver == "auto" and fused.applies(tokens_BTD):
            found = fused.decompose(tokens_BTD, precision == "double")
            if found is not None:
                return Spectrum(found.values, found.rows.mT, transposed)
        rows = tokens_BTD.detach()
        rows = rows.mT if transposed else rows
        wide = rows.dtype == torch.float64 or torch.compiler.is_compiling()
        if precision == "double" or wide:
            values, vectors = _descending(_double_gram(rows), solver)
        else:
            values, vectors = _measured(rows, solver)
        return Spectrum(values, vectors, transposed)


def _measured(rows: Tensor, solver: Eigensolver) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and -vectors, float32 if that is enough for all, else float64."""
    narrow = rows.float()
    gram = narrow @ narrow.mT
    overflown = ~gram.isfinite().flatten(1).all(1)
    if overflown.any():
        # Finite tokens whose Gram matrix overflows in float32 are decomposed in float64.
        overflown &= rows.isfinite().flatten(1).all(1)
        gram = _finite(gram)
    factor, failed = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    beyond = overflown | (failed > 0) | ~(pivots > MIN_RATIO * largest)
    if 4 * int(beyond.sum()) > len(rows):
        return _descending(_double_gram(rows), solver)
    values, vectors = _descending(gram, solver)
    beyond = overflown | ~(values[:, -1] > MIN_RATIO * values[:, 0])
    if not beyond.any():
        return values, vectors
    values, vectors = values.double(), vectors.double()
    values[beyond], vectors[beyond] = _descending(_double_gram(rows[beyond]), solver)
    return values, vectors


def _descending(gram: Tensor, solver: Eigensolver) -> tuple[Tensor, Tensor]:
    values, vectors = _SOLVERS[solver](gram)
    return values.flip(-1).clamp_min(0.0), vectors.flip(-1)


def _double_gram(rows: Tensor) -> Tensor:
    """Return rows rowsᵀ (B, n, n) in float64."""
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        wide = rows.double()
        return _finite(wide @ wide.mT)
    length = rows.shape[-2]
    gram = torch.empty(len(rows), length, length, dtype=torch.float64)
    chunk = max(1, _CACHED_TOKENS // (length * rows.shape[-1]))
    for part, out in zip(rows.split(chunk), gram.split(chunk), strict=True):
        wide = part.double()
        torch.bmm(wide, wide.mT, out=out)
    return _finite(gram)


def _finite(gram: Tensor) -> Tensor:
    """Return `gram` with non-finite examples replaced by the identity."""
    finite = gram.isfinite().flatten(1).all(1)[:, None, None]
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.where(finite, gram, identity)

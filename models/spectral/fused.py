# SPDX-License-Identifier: MIT
"""The spectral operator as compiled code for CPUs, where there is a compiler.

`fused.cpp` is one pass over each example, with all of it in the cache: Gram matrix, decomposition
of as many matrices at once as a vector register has numbers, power, and products. spectrum.py and
spectral.py are its reference, and what runs where it is not there: without a compiler, on a GPU,
for float64 tokens and in traced graphs.

This package builds nothing. Whoever starts a process (`trainer/runtime/native.py`) names a
function, `provide(function)`, that returns the compiled library; it is called when a spectrum is
first asked for. The library has a C interface, so it depends on no version of torch.

Shapes: B examples, T tokens, D token width, n = min(T, D), m = max(T, D).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("fused.cpp")
# Numbers that the arguments of the library hold: rows of a matrix, and of its Gram matrix.
_MOST_ROWS, _MOST_COLUMNS = 1024, 1 << 20

_pointer, _int, _double = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
_SHAPE = (_pointer, ctypes.c_int64, _int, _int, _int)
_SIGNATURES = {
    "fullrank_decompose": (ctypes.c_int64, (*_SHAPE, *[_pointer] * 3)),
    "fullrank_decompose_wide": (ctypes.c_int64, (*_SHAPE, *[_pointer] * 3)),
    "fullrank_soften": (
        None,
        (*_SHAPE, _int, _pointer, _pointer, _double, _double, _pointer, _pointer),
    ),
    "fullrank_soften_backward": (
        _double,
        (_pointer, *_SHAPE, _int, *[_pointer] * 4, _double, _double, _pointer),
    ),
}


@dataclass
class _State:
    """What this process has been told, and what came of it."""

    provider: Callable[[], ctypes.CDLL | None] | None = None
    library: ctypes.CDLL | None = None
    paused: bool = False


_state = _State()


def provide(provider: Callable[[], ctypes.CDLL | None] | None) -> None:
    """Name what returns the library, or None where there is none; called at most once."""
    _state.provider, _state.library = provider, None


def library() -> ctypes.CDLL | None:
    """Return the library, or None: then the reference runs."""
    if _state.paused:
        return None
    if _state.provider is not None:
        provider, _state.provider = _state.provider, None
        found = provider()
        _state.library = None if found is None else _typed(found)
    return _state.library


def check(found: ctypes.CDLL) -> str:
    """Compare a library with LAPACK on a few matrices; return what is wrong, or nothing.

    A compiler for another machine, or a damaged file, must not train a model.
    """
    places = torch.arange(3 * 5 * 9, dtype=torch.float64).view(3, 5, 9)
    tokens = (places * places).remainder(13.0) - 6.0
    values, vectors = torch.linalg.eigh(tokens @ tokens.mT)
    exact = vectors * values.pow(-0.25)[:, None] @ vectors.mT @ tokens
    before, _state.library = _state.library, _typed(found)
    try:
        ours = decompose(tokens.float())
        if ours is not None:
            softened, _ = soften(tokens.float(), ours.values, ours.rows.mT, -0.25, 1e-8)
            if float((softened - exact).norm()) < 1e-4 * float(exact.norm()):
                return ""
    finally:
        _state.library = before
    return "the compiled library does not compute what LAPACK does"


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    """Return a library whose functions know the types of their arguments."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """Have the reference run inside the context."""
    before, _state.paused = _state.paused, True
    try:
        yield
    finally:
        _state.paused = before


class Found(NamedTuple):
    """A decomposition: eigenvalues (B, n), largest first, and eigenvectors (B, n, n) in rows."""

    values: Tensor
    rows: Tensor


def applies(tokens: Tensor) -> bool:
    """Return whether the library is there for (B, T, D) tokens."""
    if torch.compiler.is_compiling() or tokens.device.type != "cpu":
        return False
    if tokens.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tokens.dim() != 3:
        return False
    num, width = tokens.shape[1:]
    fits = 1 <= min(num, width) <= _MOST_ROWS and max(num, width) <= _MOST_COLUMNS
    return fits and library() is not None


def decompose(tokens_BTD: Tensor, double: bool = False) -> Found | None:
    """Return spectra, float32 if that is enough for all examples, else float64.

    None where an iteration did not converge, which finite tokens do not cause.

    Args:
        tokens_BTD: (B, T, D).
        double: use float64 for all.
    """
    tokens = tokens_BTD.detach().float().contiguous()
    shape = _shape(tokens)
    batch, size = shape[1:3]
    values, rows = torch.empty(batch, size), torch.empty(batch, size, size)
    narrow = torch.zeros(batch, dtype=torch.uint8)
    functions = _loaded()
    given = (values.data_ptr(), rows.data_ptr(), narrow.data_ptr())
    if not double and not functions.fullrank_decompose(*shape, *given):
        return Found(values, rows)
    wide = Found(values.double(), rows.double())
    given = (wide.values.data_ptr(), wide.rows.data_ptr(), narrow.data_ptr())
    return None if functions.fullrank_decompose_wide(*shape, *given) else wide


def soften(
    tokens_BTD: Tensor, values: Tensor, vectors: Tensor, exponent: float, floor: float
) -> tuple[Tensor, Tensor]:
    """Return softened tokens (B, T, D) and the power (B, n, n), both float32.

    Args:
        tokens_BTD: (B, T, D).
        values: (B, n) eigenvalues, largest first, float32 or float64.
        vectors: (B, n, n) eigenvectors in columns, of the same type.
        exponent: of the Gram matrix.
        floor: eigenvalues are floored at this share of the largest.
    """
    tokens = tokens_BTD.float().contiguous()
    values, rows = values.contiguous(), vectors.mT.contiguous()
    softened, power = torch.empty_like(tokens), torch.empty(rows.shape)
    wide = int(values.dtype == torch.float64)
    _loaded().fullrank_soften(
        *_shape(tokens),
        *(wide, values.data_ptr(), rows.data_ptr(), exponent, floor),
        *(power.data_ptr(), softened.data_ptr()),
    )
    return softened, power


def soften_backward(
    grad_BTD: Tensor,
    tokens_BTD: Tensor,
    found: Found,
    power: Tensor,
    along: Tensor,
    exponent: float,
    floor: float,
) -> tuple[Tensor, float]:
    """Return the gradient of the tokens (B, T, D), float32, and that of the exponent.

    Args:
        grad_BTD: gradient of the softened tokens.
        tokens_BTD: (B, T, D).
        found: the decomposition.
        power: as `soften` returned it.
        along: (B, n), as `matrix_power_backward` takes it.
        exponent: as `soften` took it.
        floor: as `soften` took it.
    """
    tokens, grad = tokens_BTD.float().contiguous(), grad_BTD.float().contiguous()
    values, rows, along = found.values.contiguous(), found.rows.contiguous(), along.contiguous()
    out = torch.empty_like(tokens)
    slope = _loaded().fullrank_soften_backward(
        *(grad.data_ptr(), *_shape(tokens), int(values.dtype == torch.float64)),
        *(values.data_ptr(), rows.data_ptr(), power.data_ptr(), along.data_ptr()),
        *(exponent, floor, out.data_ptr()),
    )
    return out, slope


def _shape(tokens: Tensor) -> tuple[int, int, int, int, int]:
    """Return what every function of the library begins with."""
    batch, num, width = tokens.shape
    return tokens.data_ptr(), batch, min(num, width), max(num, width), int(num > width)


def _loaded() -> ctypes.CDLL:
    assert _state.library is not None, "library() has been asked"
    return _state.library

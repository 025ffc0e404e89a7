# SPDX-License-Identifier: MIT
"""NumPy float64 pieces from which tests derive what a tower must return, one vector at a time.

Nothing here is batched and nothing is shared with the models: a mistake in a layout, a mask or a
fused product cannot be made twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

Array = np.ndarray[Any, np.dtype[np.float64]]

erf = np.vectorize(math.erf, otypes=[np.float64])


def array(tensor: Tensor | None) -> Array:
    """Return a parameter's values; zero for one that is not there."""
    return np.zeros(()) if tensor is None else tensor.detach().double().numpy()


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def layer_norm(x: Array, norm: nn.LayerNorm) -> Array:
    """Norm one vector."""
    centred = x - x.mean()
    size = math.sqrt((centred**2).mean() + norm.eps)
    return centred / size * array(norm.weight) + array(norm.bias)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Norm one vector."""
    return x / math.sqrt((x**2).mean() + eps) * gain


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def randomize(module: nn.Module, seed: int, std: float = 0.5) -> None:
    """Give every parameter, gains and biases included, values that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std, generator=generator)


def check_gradients(module: nn.Module, call: Callable[..., Any], *inputs: Tensor) -> None:
    """Compare the gradients of inputs and all parameters with finite differences.

    call(*inputs) returns the positional arguments of the module.
    """
    names = [name for name, _ in module.named_parameters()]

    def run(*values: Tensor) -> Tensor:
        parameters = dict(zip(names, values[len(inputs) :], strict=True))
        return functional_call(module, parameters, call(*values[: len(inputs)]))

    leaves = [value.detach().clone().requires_grad_() for value in (*inputs, *module.parameters())]
    assert torch.autograd.gradcheck(run, tuple(leaves), atol=1e-6, rtol=1e-5)


def close(got: Tensor, expected: Array, tolerance: float = 1e-10) -> bool:
    """Whether values agree, relative to the largest expected one."""
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    return bool(np.abs(array(got) - expected).max(initial=0) <= tolerance * scale)

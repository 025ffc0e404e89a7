# SPDX-License-Identifier: MIT
"""What SpecFormer's spectral operator and layer cost, against `svd` and against plain attention.

    python -m tests.benchmarks.towers [--rounds 9] [--profile] [--only operator|layer]

Forward and backward, float32, one thread. The operator is compared with the same function by
`torch.linalg.svd` and autograd, on the three shapes that the targets name; before it is timed its
values and gradients are compared with the SVD's in float64. Both of its forms are timed: compiled
code, where there is a compiler, and the reference. The layer is compared with a plain attention
layer (query, key and value projections, one head, the same norms and per-token feed-forward).
`--profile` shows what the reference's time is made of, and how long the alternatives that were
tried take; every line is a share of the SVD's time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import PerTokenFFN, xavier_linear
from models.spectral import fused
from models.spectral.jacobi import eigh_jacobi
from models.spectral.matrix_power import matrix_power, matrix_power_backward
from models.spectral.spectral import DEFAULT_FLOOR, position_vector, soften
from models.spectral.spectrum import Precision, decompose
from models.towers.specformer import SpecFormerConfig
from tests.benchmarks.timing import Line, interleave, single_threaded
from trainer.runtime.runtime import find_spectral

Shape = tuple[int, int, int]
OPERATOR_SHAPES: tuple[Shape, ...] = ((1024, 16, 304), (512, 39, 312), (4096, 24, 64))
LAYER_SHAPES = OPERATOR_SHAPES[:2]
# The compiled form's, at these shapes.
OPERATOR_TARGETS: dict[Shape, float] = dict(zip(OPERATOR_SHAPES, (8.0, 6.0, 6.0), strict=True))
LAYER_TARGET = 1.2


class PlainLayer(nn.Module):
    """Post-norm attention with one head and a per-token feed-forward: (B, T, D) to (B, T, D)."""

    def __init__(self, num_tokens: int, dim: int, ffn_ratio: int = 4) -> None:
        super().__init__()
        self.projection = xavier_linear(dim, 3 * dim, bias=False)
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn = PerTokenFFN(num_tokens, dim, ffn_ratio * dim)
        self.ffn_norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (x[:, None] for x in self.projection(tokens).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(query, key, value)[:, 0]
        tokens = self.attention_norm(attended + tokens)
        return self.ffn_norm(tokens + self.ffn(tokens))


def by_svd(tokens: Tensor, grad: Tensor, tau: float = 0.5) -> tuple[Tensor, Tensor]:
    """Softened tokens and the tokens' gradient, by an SVD and autograd."""
    leaf = tokens.detach().requires_grad_()
    u, s, vt = torch.linalg.svd(leaf, full_matrices=False)
    out = u * (s ** torch.tensor(tau, requires_grad=True))[..., None, :] @ vt
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def by_operator(
    tokens: Tensor, grad: Tensor, precision: Precision = "measured", position: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the same by the spectral operator; position: with the position vector, too."""
    leaf = tokens.detach().requires_grad_()
    tau, beta = torch.tensor(0.5, requires_grad=True), torch.tensor([0.0, 1.0, 0.0])
    spectrum = decompose(leaf, precision)
    out, sigma = soften(leaf, tau, spectrum)
    if position:
        vector = position_vector(leaf, sigma, spectrum, beta.requires_grad_())
        torch.autograd.backward([out, vector], [grad, torch.zeros_like(vector)])
    else:
        out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def check(tokens: Tensor, grad: Tensor) -> None:
    """Raise RuntimeError unless operator and SVD agree."""
    exact = by_svd(tokens.double(), grad.double())
    for ours, theirs in zip(by_operator(tokens, grad), exact, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        if not error < 1e-5:
            raise RuntimeError(f"the operator is {error:.1e} off the SVD, expected below 1e-5")


def operator_lines(shape: Shape, rounds: int) -> Iterator[Line]:
    """Yield how many times as long the SVD takes."""
    torch.manual_seed(0)
    tokens, grad = torch.randn(*shape), torch.randn(*shape)
    check(tokens, grad)

    def by_reference() -> object:
        with fused.reference():
            return by_operator(tokens, grad)

    candidates: dict[str, Callable[[], object]] = {
        "svd": lambda: by_svd(tokens, grad),
        "softening": lambda: by_operator(tokens, grad),
        "softening and position vector": lambda: by_operator(tokens, grad, position=True),
        "softening, all in float64": lambda: by_operator(tokens, grad, "double"),
        "softening by the reference": by_reference,
    }
    times = interleave(candidates, rounds=rounds)
    for name in list(candidates)[1:]:
        aimed = name == "softening"
        yield Line(
            name=f"{shape} svd / {name}",
            ratio=times.ratio("svd", name),
            bound="at least" if aimed else None,
            target=OPERATOR_TARGETS[shape] if aimed else None,
        )


def profile_lines(shape: Shape, rounds: int) -> Iterator[Line]:
    """Yield the shares of the SVD's time that parts and alternatives take."""
    torch.manual_seed(0)
    tokens, grad = torch.randn(*shape), torch.randn(*shape)
    gram = tokens @ tokens.mT
    double_gram = gram.double()
    values, vectors, _ = decompose(tokens)
    power = torch.tensor(-0.25, dtype=torch.float64)
    matrix = matrix_power(values, vectors, power, DEFAULT_FLOOR)
    wide = (decompose(tokens, "double"), torch.zeros(values.shape, dtype=torch.float64))
    along = torch.zeros_like(values)

    def all_products() -> Tensor:
        gram, out = tokens @ tokens.mT, matrix @ tokens
        mixed = grad @ tokens.mT
        torch.baddbmm(matrix @ grad, mixed, tokens)
        return gram + out.sum()

    def power_gradient_double() -> object:
        spectrum, along = wide
        return matrix_power_backward(
            double_gram, spectrum.values, spectrum.vectors, power, DEFAULT_FLOOR, along
        )

    candidates: dict[str, Callable[[], object]] = {
        "svd": lambda: by_svd(tokens, grad),
        "the five products with tokens alone": all_products,
        "Gram matrix and eigh": lambda: decompose(tokens, solver="lapack"),
        "Gram matrix and eigh, float64": lambda: decompose(tokens, "double", "lapack"),
        "eigh alone": lambda: torch.linalg.eigh(gram),
        "eigh alone, float64": lambda: torch.linalg.eigh(double_gram),
        "Jacobi instead of eigh": lambda: eigh_jacobi(gram),
        "power": lambda: matrix_power(values, vectors, power, DEFAULT_FLOOR),
        "gradient of the power": lambda: matrix_power_backward(
            gram, values, vectors, power, DEFAULT_FLOOR, along
        ),
        "gradient of the power, float64": power_gradient_double,
        "one product of two Gram matrices": lambda: gram @ gram,
    }
    times = interleave(candidates, rounds=rounds)
    for name in list(candidates)[1:]:
        yield Line(name=f"{shape} {name} / svd", ratio=times.ratio(name, "svd"))


def layer_lines(shape: Shape, rounds: int) -> Iterator[Line]:
    """Yield how many times as long as a plain layer a SpecFormer layer takes."""
    torch.manual_seed(0)
    batch, num_tokens, dim = shape
    tokens, grad = torch.randn(batch, num_tokens, dim), torch.randn(batch, num_tokens, dim)
    configs = {
        "the paper": SpecFormerConfig(num_layers=1),
        "diagonal": SpecFormerConfig(num_layers=1, position_bias="diagonal"),
        "no position bias": SpecFormerConfig(num_layers=1, position_bias="none"),
        "float64 spectrum": SpecFormerConfig(num_layers=1, precision="double"),
        "concat": SpecFormerConfig(num_layers=1, score_form="concat"),
    }
    layers: dict[str, nn.Module] = {"plain": PlainLayer(num_tokens, dim)}
    for name, config in configs.items():
        layers[name] = config.build(num_tokens, dim).layers[0]

    def step(layer: nn.Module) -> None:
        leaf = tokens.detach().requires_grad_()
        layer.zero_grad()
        layer(leaf).backward(grad)

    times = interleave({n: lambda m=m: step(m) for n, m in layers.items()}, rounds=rounds)
    for name in configs:
        yield Line(
            name=f"{shape} SpecFormer layer, {name} / plain attention",
            ratio=times.ratio(name, "plain"),
            bound="at most",
            target=LAYER_TARGET,
        )


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description="SpecFormer's operator and layer against others")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison, >= 7")
    parser.add_argument("--profile", action="store_true", help="also what the time is made of")
    parser.add_argument("--only", choices=["operator", "layer"], help="one of the two alone")
    words = parser.parse_args()
    single_threaded()
    library, reason = find_spectral()
    fused.provide(lambda: library)
    form = "compiled" if library else f"the reference ({reason})"
    print(f"torch {torch.__version__}, one thread, spectral operator: {form}")
    print(f"medians of {words.rounds} rounds (quartiles)")
    if words.only != "layer":
        for shape in OPERATOR_SHAPES:
            for line in operator_lines(shape, words.rounds):
                print(line, flush=True)
            for line in profile_lines(shape, words.rounds) if words.profile else ():
                print(line, flush=True)
    if words.only != "operator":
        for shape in LAYER_SHAPES:
            for line in layer_lines(shape, words.rounds):
                print(line, flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""Checks and times of the towers' parts on a GPU; torch alone, within eight minutes.

    python -m tests.benchmarks.gpu [--rounds 9] [--seconds 480]

Equalities first: the spectral operator, its gradient and a SpecFormer layer against float64 on the
CPU, by either eigensolver, in fp32, bf16 and fp16; attention with causal, sliding and padding masks
against its definition, and whether a flash kernel takes it. Then times: both eigensolvers and both
precisions, the score forms against plain attention in each number format, the operator's share of
a SpecFormer step, and a table of step times and memory in each number format, with and without
fused attention, compiled and not (`gpu_steps.py`). Exits with 1 if an equality does not hold, and
with 2 where there is no GPU. A part that finds the time used up is skipped and named.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.attention.attention import attention, reference_attention, sliding_mask
from models.spectral.spectral import position_vector, soften
from models.spectral.spectrum import Eigensolver, Precision, decompose
from models.towers.specformer import SpecFormerConfig
from tests.benchmarks import gpu_steps
from tests.benchmarks.timing import Line, interleave
from tests.benchmarks.towers import LAYER_SHAPES, OPERATOR_SHAPES, PlainLayer, Shape

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VARIANTS: tuple[tuple[Precision, Eigensolver], ...] = (
    ("measured", "lapack"),
    ("double", "lapack"),
    ("measured", "jacobi"),
    ("double", "jacobi"),
)


class Report:
    """Prints what was checked and measured, and remembers what did not hold."""

    def __init__(self, device: torch.device, rounds: int, seconds: float) -> None:
        self.device, self.rounds = device, rounds
        self._end = time.monotonic() + seconds
        self.failures: list[str] = []

    def out_of_time(self) -> bool:
        """Whether another part should not be started."""
        return time.monotonic() > self._end

    def check(self, name: str, ours: Tensor, exact: Tensor, tolerance: float) -> None:
        """Print the relative error of `ours`, and remember it if it is above the tolerance."""
        ours, exact = ours.detach().double().cpu(), exact.detach().double().cpu()
        error = float((ours - exact).norm() / exact.norm().clamp_min(1e-300))
        holds = error <= tolerance
        print(f"{'ok  ' if holds else 'FAIL'} {name}: off by {error:.1e}, allowed {tolerance:.0e}")
        if not holds:
            self.failures.append(name)

    def times(self, candidates: dict[str, Callable[[], object]], over: str, what: str) -> None:
        """Print every candidate's milliseconds and its ratio to the candidate `over`."""
        times = interleave(candidates, rounds=self.rounds, device=self.device)
        for name in candidates:
            line = Line(name=f"{what} {name} / {over}", ratio=times.ratio(name, over))
            print(f"{line}  {1e3 * times.median(name):.2f} ms", flush=True)


def operator(
    tokens: Tensor, grad: Tensor, precision: Precision = "measured", solver: Eigensolver = "lapack"
) -> tuple[Tensor, ...]:
    """Softened tokens, position vector, gradients of the tokens and of τ."""
    leaf = tokens.detach().requires_grad_()
    tau = torch.tensor(0.5, device=tokens.device, requires_grad=True)
    beta = torch.tensor([0.0, 1.0, 0.0], device=tokens.device)
    spectrum = decompose(leaf, precision, solver)
    out, sigma = soften(leaf, tau, spectrum)
    vector = position_vector(leaf, sigma, spectrum, beta)
    out.backward(grad.to(out.dtype))
    assert leaf.grad is not None and tau.grad is not None
    return out.detach(), vector.detach(), leaf.grad, tau.grad


def tokens_of(shape: Shape, decay: float) -> Tensor:
    """Return (B, T, D) float32 tokens; decay: singular values fall from 1 to this share."""
    torch.manual_seed(0)
    tokens = torch.randn(*shape)
    u, s, vt = torch.linalg.svd(tokens, full_matrices=False)
    return u * (s * decay ** torch.linspace(0, 1, s.shape[-1]))[:, None] @ vt


def check_operator(report: Report) -> None:
    """The operator equals float64 on the CPU, generic and collapsed, T above and below D."""
    names = ("softened", "position vector", "gradient", "gradient of tau")
    for shape in ((64, 16, 304), (64, 39, 312), (64, 24, 16)):
        for kind, decay in (("generic", 1.0), ("collapsed", 1e-2)):
            tokens = tokens_of(shape, decay)
            grad = torch.randn(*shape)
            exact = operator(tokens.double(), grad.double())
            for precision, solver in VARIANTS:
                on_gpu = (tokens.to(report.device), grad.to(report.device))
                ours = operator(*on_gpu, precision, solver)
                for name, a, b in zip(names, ours, exact, strict=True):
                    # Single vectors of a random spectrum are known to about 1e-7 over a gap.
                    allowed = 1e-2 if name == "position vector" else 2e-4
                    report.check(f"{shape} {kind} {precision} {solver} {name}", a, b, allowed)
    twins = torch.randn(8, 6, 16, device=report.device)
    twins[:, 1], twins[:, 2], twins[0] = twins[:, 0], 0.0, 0.0
    finite = [x.isfinite().all() for x in operator(twins, torch.ones_like(twins))]
    report.check("twins and zeros are finite", torch.stack(finite), torch.ones(4), 0.0)


def check_layer(report: Report) -> None:
    """A SpecFormer layer equals itself in float64 on the CPU, in every number format."""
    for form in ("terms", "concat"):
        config = SpecFormerConfig(num_layers=1, logit_scale="rsqrt_dim", score_form=form)
        torch.manual_seed(0)
        tower = config.build(39, 312)
        tokens = torch.randn(32, 39, 312)
        exact = tower.double()(tokens.double()).detach()
        tower = tower.float().to(report.device)
        for name, dtype in FORMATS.items():
            with _autocast(dtype, report.device):
                ours = tower(tokens.to(report.device))
            report.check(f"layer {form} {name}", ours, exact, 1e-5 if name == "fp32" else 2e-2)


def check_attention(report: Report) -> None:
    """Attention equals its definition under every mask, in every number format."""
    length, window = 200, 16
    valid = torch.arange(length) < torch.tensor([[length], [length // 2], [1], [0]])
    masks: dict[str, Tensor | None] = {
        "no mask": None,
        "sliding window": sliding_mask(length, window),
        "window as long as the sequence": sliding_mask(length, length),
        "padding": valid[:, None, None, :].expand(-1, 1, length, -1),
    }
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 4, length, 32, dtype=torch.float64)
    for name, dtype in FORMATS.items():
        narrow = [x.to(report.device, dtype) for x in (query, key, value)]
        allowed = 1e-5 if name == "fp32" else 2e-2
        for kind, mask in masks.items():
            on_gpu = None if mask is None else mask.to(report.device)
            ours = attention(*narrow, mask=on_gpu)
            exact = reference_attention(query, key, value, mask=mask)
            report.check(f"attention {name} {kind}", ours, exact, allowed)
        ours = attention(*narrow, causal=True)
        exact = reference_attention(query, key, value, causal=True)
        report.check(f"attention {name} causal", ours, exact, allowed)
        for width in (32, 128, 256, 625):
            query_wide = torch.randn(4, 4, 128, width, device=report.device, dtype=dtype)
            print(f"     flash kernel, {name}, width {width}: {_takes_flash(query_wide)}")


def _takes_flash(query: Tensor) -> str:
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attention(query, query, query, causal=True)
    except RuntimeError:
        return "no"
    return "yes"


def time_operator(report: Report) -> None:
    """Eigensolvers and precisions against an SVD under autograd."""
    for shape in OPERATOR_SHAPES:
        tokens = torch.randn(*shape, device=report.device)
        grad = torch.randn_like(tokens)

        def svd(tokens: Tensor = tokens, grad: Tensor = grad) -> None:
            leaf = tokens.detach().requires_grad_()
            u, s, vt = torch.linalg.svd(leaf, full_matrices=False)
            (u * s.sqrt()[..., None, :] @ vt).backward(grad)

        candidates: dict[str, Callable[[], object]] = {
            f"{p} {s}": lambda p=p, s=s, t=tokens, g=grad: operator(t, g, p, s) for p, s in VARIANTS
        }
        report.times(candidates, "measured lapack", f"operator {shape}")
        candidates = {"operator": candidates["measured lapack"], "svd": svd}
        report.times(candidates, "operator", f"operator {shape}")


def time_layers(report: Report) -> None:
    """SpecFormer layers in both score forms against plain attention, in each number format."""
    for batch, num_tokens, dim in LAYER_SHAPES:
        tokens = torch.randn(batch, num_tokens, dim, device=report.device)
        layers: dict[str, nn.Module] = {"plain": PlainLayer(num_tokens, dim)}
        for form in ("terms", "concat"):
            config = SpecFormerConfig(num_layers=1, score_form=form)
            layers[form] = config.build(num_tokens, dim).layers[0]
        config = SpecFormerConfig(num_layers=1, softening="none", position_bias="none")
        layers["no spectrum"] = config.build(num_tokens, dim).layers[0]
        for layer in layers.values():
            layer.to(report.device)
        for name, dtype in FORMATS.items():
            candidates: dict[str, Callable[[], object]] = {
                n: lambda m=m, d=dtype, t=tokens: _step(m, t, d) for n, m in layers.items()
            }
            report.times(candidates, "plain", f"layer ({batch}, {num_tokens}, {dim}) {name}")


def time_share(report: Report) -> None:
    """The operator's share of a three-layer SpecFormer's step, forward and backward."""
    for batch, num_tokens, dim in LAYER_SHAPES:
        tokens = torch.randn(batch, num_tokens, dim, device=report.device)
        grad = torch.randn_like(tokens)
        tower = SpecFormerConfig(num_layers=3).build(num_tokens, dim).to(report.device)
        for name, dtype in FORMATS.items():
            candidates: dict[str, Callable[[], object]] = {
                "step": lambda m=tower, d=dtype, t=tokens: _step(m, t, d),
                "three operators": lambda t=tokens, g=grad: [operator(t, g) for _ in range(3)],
            }
            report.times(candidates, "step", f"share ({batch}, {num_tokens}, {dim}) {name}")


def time_steps(report: Report) -> None:
    """Towers in each number format, with and without fused attention, compiled and not."""
    for line in gpu_steps.table(report.device, 1024, report.rounds):
        print(line, flush=True)


def _step(module: nn.Module, tokens: Tensor, dtype: torch.dtype) -> None:
    module.zero_grad()
    with _autocast(dtype, tokens.device):
        out = module(tokens)
    out.float().sum().backward()


def _autocast(
    dtype: torch.dtype, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def _parts() -> Iterator[Callable[[Report], None]]:
    yield from (check_operator, check_layer, check_attention)
    yield from (time_operator, time_layers, time_share, time_steps)


def main() -> int:
    """Run all parts; return the exit code."""
    parser = argparse.ArgumentParser(description="checks and times on a GPU")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison, >= 7")
    parser.add_argument("--seconds", type=float, default=480.0, help="start no part after this")
    words = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: torch sees no CUDA device; run this on a machine with one", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}")
    report = Report(device, words.rounds, words.seconds)
    for part in _parts():
        if report.out_of_time():
            print(f"SKIPPED {part.__name__}: {words.seconds:g} seconds are over")
            continue
        print(f"-- {part.__doc__}", flush=True)
        try:
            part(report)
        except Exception:  # the parts after it are worth having
            traceback.print_exc()
            report.failures.append(f"{part.__name__} raised")
    print(f"{len(report.failures)} failures" + "".join(f"\n  {x}" for x in report.failures))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

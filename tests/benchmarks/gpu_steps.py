# SPDX-License-Identifier: MIT
"""The part of `tests/benchmarks/gpu.py` that takes whole steps: time and memory of each setting.

A table: towers by number format, with and without fused attention kernels, as they are written and
compiled. A step is forward and backward of a tower on random tokens (TokenFormer: a stream of
histories of all lengths); memory is the most that was allocated in a step, the tower's weights and
gradients included, and 0 on a CPU. Torch alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.stream import Stream
from models.towers.specformer import SpecFormerConfig
from models.towers.tokenformer import TokenFormerConfig
from tests.benchmarks.timing import interleave
from trainer.distributed.compile import compile_tower, uncompiled

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Gradients of this many times the loss are far from both ends of fp16.
_SCALE = 1024.0


def towers(size: int, device: torch.device) -> Iterator[tuple[str, nn.Module, Any, bool]]:
    """Yield towers, what they read of `size` examples, and whether that is ragged."""
    torch.manual_seed(0)
    config = SpecFormerConfig(num_layers=2, logit_scale="rsqrt_dim", score_form="concat")
    tokens = torch.randn(size, 24, 64, device=device)
    yield "specformer, concat, T 24, D 64", config.build(24, 64).to(device), tokens, False
    width, fields, longest = 64, 8, 256
    ragged = TokenFormerConfig(num_heads=2, max_length=longest, windows=(32, 16))
    lengths = torch.randint(0, longest + 1, (size,))
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    stream = Stream(
        fields=torch.randn(size, fields, width, device=device),
        events=torch.randn(int(offsets[-1]), width, device=device),
        offsets=offsets.to(device),
        actions=None,
        targets=torch.randn(size, 1, width, device=device),
    )
    name = f"tokenformer, 2F2S, history up to {longest}, D {width}"
    yield name, ragged.build(fields, width).to(device), stream, True


def steps(
    tower: nn.Module, inputs: Any, dtype: torch.dtype, device: torch.device, compiles: bool
) -> dict[str, Callable[[], None]]:
    """Return a step a setting: with and without fused attention, written and compiled."""

    def step(fused: bool, compiled: bool) -> None:
        half = dtype != torch.float32
        choice = contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
        with uncompiled(compiles and not compiled), choice:
            tower.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=dtype, enabled=half):
                output = tower(inputs)
            (output.float().square().mean() * _SCALE).backward()

    found: dict[str, Callable[[], None]] = {}
    for fused, compiled in itertools.product(
        (True, False), (False, True) if compiles else (False,)
    ):
        name = f"{'fused' if fused else 'plain'} attention, {'compiled' if compiled else 'eager'}"
        found[name] = lambda fused=fused, compiled=compiled: step(fused, compiled)
    return found


def table(device: torch.device, size: int, rounds: int, compiles: bool = True) -> Iterator[str]:
    """Yield the lines of the table: milliseconds, megabytes, and the time over the first's."""
    for name, tower, inputs, ragged in towers(size, device):
        if compiles:
            compile_tower(tower, ragged)
        for form, dtype in FORMATS.items():
            candidates = steps(tower, inputs, dtype, device, compiles)
            times = interleave(candidates, rounds=rounds, device=device)
            first = next(iter(candidates))
            for setting, step in candidates.items():
                yield (
                    f"{name}  {form}  {setting:<26}  {1e3 * times.median(setting):8.2f} ms  "
                    f"{_megabytes(step, device):8.1f} MB  {times.ratio(setting, first)}x"
                )


def finite(tower: nn.Module) -> bool:
    """Return whether every weight of `tower` has a finite gradient."""
    gradients = [weight.grad for weight in tower.parameters() if weight.requires_grad]
    return all(isinstance(g, Tensor) and bool(g.isfinite().all()) for g in gradients)


def _megabytes(step: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        step()
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 1e6

# SPDX-License-Identifier: MIT
"""Towers through `torch.compile`, applied from outside: models stay plain code.

Each block is compiled by itself. So weights are still gathered and reduced block by block, and
hooks on a block's output still run. Names of weights do not change, because a module's method is
replaced and no module is put around it. Where a tower reads ragged histories, a block's shapes are
symbols, so batches of other lengths need no new compilation.

Not compiled: tables and their exchanges, tokenizers and heads. Of TokenFormer also its packing of
ragged rows, its attention (its kernel depends on the batch), and the maps to queries and keys (one
product each).
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from models.towers.interaction import InteractionBlock

BACKEND = "inductor"
# Blocks whose towers call their parts, and those that are more than one product.
_PARTS: dict[type[nn.Module], tuple[str, ...]] = {InteractionBlock: ("finish",)}


def compile_tower(tower: nn.Module, ragged: bool) -> int:
    """Compile the blocks of `tower` when they first run; return how many there are.

    Args:
        tower: a single-device tower, changed in place.
        ragged: whether shapes differ from batch to batch.
    """
    import torch._dynamo
    import torch.fx.experimental._config

    # The tracer asks tensors for what they do not have, and hides that only where it is printed.
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
    )
    # Blocks are compiled one by one; cutting them again at DDP's buckets would gain nothing.
    torch._dynamo.config.optimize_ddp = False
    # Two sizes that happen to be equal in the first batch need not be in the next.
    torch.fx.experimental._config.use_duck_shape = not ragged
    made: dict[Callable[..., Any], Callable[..., Any]] = {}
    blocks = list(_blocks(tower))
    for block in blocks:
        for name in _PARTS.get(type(block), ("forward",)):
            method = getattr(type(block), name)
            if method not in made:
                made[method] = torch.compile(
                    method, backend=BACKEND, dynamic=True if ragged else None
                )
            setattr(block, name, types.MethodType(made[method], block))
    return len(blocks)


def uncompiled(compiles: bool) -> AbstractContextManager[object]:
    """Return a context in which compiled blocks run as they are written.

    There, whatever looks into a block (`models.diagnostics.rank.diagnose`) sees its parts.
    """
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def num_graphs() -> int:
    """Return how many graphs this process has compiled; a run in its stride adds none."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _blocks(tower: nn.Module) -> Iterator[nn.Module]:
    """Yield a tower's blocks, or the whole of a tower without any."""
    lists = [child for child in tower.children() if isinstance(child, nn.ModuleList)]
    if not lists:
        yield tower
    for child in lists:
        yield from child

# SPDX-License-Identifier: MIT
"""Dense weights of which every rank holds a share: FSDP2 (`fully_shard`).

This is the only file that uses FSDP2. Each block of a tower is gathered before it runs and freed
after. Its gradients are summed and scattered during backward, and the optimizer steps the shares.
The tables stay where DistributedModelParallel put them.

Shapes: R ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from models.tower import Tower, blocks_of
from trainer.distributed.dense import Replicated, align, apply_step, dense_parts

# A block of fewer weights is gathered with what is around it.
_LEAST_ELEMENTS = 4096


class ShardDense(DataParallelWrapper):
    """Tells DistributedModelParallel to shard what is no table."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Shard every dense part of the model in place, block by block."""
        # Parts and blocks may return views; nothing here writes into them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        for part in dense_parts(dmp.module).values():
            align(part, device)
            for unit in _units(part):
                fully_shard(unit)


class Sharded(Replicated):
    """Dense weights of which this rank holds a share, as DTensors."""

    def gradients(self) -> list[Tensor]:
        """Return this rank's share of the gradients."""
        return [cast(DTensor, gradient).to_local() for gradient in super().gradients()]

    def square(self) -> Tensor:
        """Return the square of this rank's share."""
        return get_total_norm(self.gradients()).double() ** 2

    def step(self, factor: Tensor, skip: Tensor) -> None:
        """Step this rank's share, unless `skip`."""
        apply_step(self.optimizer, self.gradients(), factor, skip)

    def whole(self) -> dict[str, Tensor] | None:
        """Return every dense weight whole. Collective."""
        return {
            name: cast(DTensor, weight.detach()).full_tensor()
            for name, weight in self.parameters.items()
        }


def _units(part: nn.Module) -> Iterator[nn.Module]:
    """Yield what is gathered at once, inner before outer: a tower's blocks, then the rest of it."""
    for block in part.fsdp_units() if isinstance(part, Tower) else blocks_of(part):
        if sum(weight.numel() for weight in block.parameters()) >= _LEAST_ELEMENTS:
            yield block
    if any(True for _ in part.parameters()):
        yield part

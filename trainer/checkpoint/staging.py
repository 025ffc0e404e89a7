# SPDX-License-Identifier: MIT
"""Copies of a run's tensors in host memory, from which a checkpoint is written.

The copies reuse the same memory each time. Fresh memory costs a page fault every 4 KiB, several
times the cost of copying. Copies from a GPU go through page-locked memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor


class Staging:
    """Host memory for the state of one rank, as large as that state."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested copies of nested tensors on the CPU; sharded tensors stay sharded.

        The next call overwrites them.
        """
        copied = self._copy_mapping(tensors, "")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy_mapping(self, tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return {
            key: self._copy_mapping(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else self._copy(value, f"{prefix}{key}")
            for key, value in tensors.items()
        }

    def _copy(self, value: Any, name: str) -> Any:
        """Return a copy of one entry."""
        if isinstance(value, ShardedTensor):
            shards = [
                Shard(self._copy_plain(shard.tensor, f"{name}/{i}"), shard.metadata)
                for i, shard in enumerate(value.local_shards())
            ]
            # The base class does not check that shards are on the device in the metadata.
            return ShardedTensorBase._init_from_local_shards_and_global_metadata(
                shards, value.metadata()
            )
        if isinstance(value, DTensor):
            return DTensor(  # pyright: ignore[reportCallIssue]
                self._copy_plain(value._local_tensor, name),
                value._spec,
                requires_grad=False,
            )
        if isinstance(value, Tensor):
            return self._copy_plain(value, name)
        return value

    def _copy_plain(self, tensor: Tensor, name: str) -> Tensor:
        """Copy a tensor of this rank into the memory reserved for its name."""
        memory = self._memory.get(name)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[name] = memory
        return memory.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def local_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of this rank's part of nested tensors."""
    total = 0
    for value in tensors.values():
        if isinstance(value, Mapping):
            total += local_bytes(value)
        elif isinstance(value, ShardedTensor):
            total += sum(shard.tensor.nbytes for shard in value.local_shards())
        elif isinstance(value, DTensor):
            total += value._local_tensor.nbytes
        elif isinstance(value, Tensor):
            total += value.nbytes
    return total

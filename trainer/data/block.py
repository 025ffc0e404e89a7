# SPDX-License-Identifier: MIT
"""The batches of a window in one piece of memory: one segment and one file descriptor to send.

So low limits on open files do not matter, whatever the number of features and batches. A worker
writes straight into shared memory. Where /dev/shm is too small (containers often get 64 MB), the
block goes through the pipe. Without that, the worker would die of a bus error.

Shapes: B rows, F sparse features, C dense features, K labels, N values of all lists.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_ALIGNMENT = 16
_SHARED_MEMORY = "/dev/shm"
_TYPES = ("int64", "float32", "int32", "float32", "float32", "float32", "int64", "int64", "int64")
_WIDTHS = tuple(np.dtype(name).itemsize for name in _TYPES)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchArrays:
    """A batch as NumPy arrays: the fields of `Batch`, with `sparse` as its values and lengths.

    Attributes:
        values: (N,) int64 table rows (ids where the table is dynamic), feature by feature.
        factors: (N,) float32 factors of the vectors; (0,) if no feature has weights.
        lengths: (F, B) int32.
        dense: (B, C) float32; null is NaN.
        labels: (B, K) float32 in {0, 1}.
        weights: (B, K) float32; 0 where a label is null.
        groups: (B,) int64 mixed user ids; zeros if the schema names no user.
        actions: int64 past actions, one per item of the history that has them; (0,) if none has.
        day: (1,) int64 days since the epoch.
    """

    values: np.ndarray
    factors: np.ndarray
    lengths: np.ndarray
    dense: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    actions: np.ndarray
    day: np.ndarray

    def fields(self) -> tuple[np.ndarray, ...]:
        """Return the arrays in the order of their declaration."""
        return (
            *(self.values, self.factors, self.lengths, self.dense, self.labels),
            *(self.weights, self.groups, self.actions, self.day),
        )


class Slot(NamedTuple):
    """Where an array lies in a block.

    Attributes:
        offset: its first byte.
        shape: its shape.
    """

    offset: int
    shape: Shape


@dataclass
class Block:
    """The batches of one window, in one piece of memory.

    Attributes:
        memory: (bytes,) uint8 tensor; a NumPy array if it goes through the pipe.
        slots: per batch, where its arrays lie, in the order of `BatchArrays.fields`.
        counts: per batch, its out-of-range `identity` values by feature.
        error: what is wrong with the data; empty if nothing is.
    """

    memory: Tensor | np.ndarray
    slots: list[tuple[Slot, ...]]
    counts: list[Counter[str]]
    error: str = ""

    @classmethod
    def failed(cls, error: str) -> Block:
        """Return a block of no batches that says what is wrong."""
        return cls(np.empty(0, np.uint8), [], [], error)

    @classmethod
    def reserve(cls, shapes: Sequence[Sequence[Shape]]) -> Block:
        """Return a block with room for batches whose arrays have these shapes."""
        slots, size = [], 0
        for batch in shapes:
            places = []
            for shape, width in zip(batch, _WIDTHS, strict=True):
                places.append(Slot(size, shape))
                size += -(-math.prod(shape) * width // _ALIGNMENT) * _ALIGNMENT
            slots.append(tuple(places))
        return cls(_memory(size), slots, [])

    def arrays(self) -> list[BatchArrays]:
        """Return each batch's arrays; they share the block's memory."""
        memory = self.memory if isinstance(self.memory, np.ndarray) else self.memory.numpy()
        return [
            BatchArrays(
                **{
                    name: np.ndarray(slot.shape, type_, memory, slot.offset)
                    for name, slot, type_ in zip(_NAMES, batch, _TYPES, strict=True)
                }
            )
            for batch in self.slots
        ]

    def tensors(self) -> list[list[Tensor]]:
        """Return each batch's tensors; they share the block's memory."""
        memory = self.memory
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory)
        typed = {name: memory.view(getattr(torch, name)) for name in set(_TYPES)}
        kinds = [(typed[name], width) for name, width in zip(_TYPES, _WIDTHS, strict=True)]
        return [
            [
                numbers.as_strided(shape, (shape[-1], 1) if len(shape) == 2 else (1,), at // width)
                for (at, shape), (numbers, width) in zip(batch, kinds, strict=True)
            ]
            for batch in self.slots
        ]

    def pin_memory(self) -> Block:
        """Return the block in page-locked memory."""
        memory = self.memory
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory)
        return Block(memory.pin_memory(), self.slots, self.counts, self.error)


_NAMES = tuple(BatchArrays.__dataclass_fields__)


def _memory(num_bytes: int) -> Tensor | np.ndarray:
    """Return memory of a block: in a worker, shared with the process that trains."""
    if get_worker_info() is None:
        return torch.from_numpy(np.empty(num_bytes, np.uint8))
    if not _fits_shared_memory(num_bytes):
        return np.empty(num_bytes, np.uint8)
    storage = torch.UntypedStorage._new_shared(num_bytes)
    memory = torch.empty(0, dtype=torch.uint8)
    return memory.set_(storage, 0, (num_bytes,))  # pyright: ignore[reportCallIssue, reportArgumentType]


def _fits_shared_memory(num_bytes: int) -> bool:
    """Return whether shared memory has room for a block and for those of other workers."""
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize > 8 * num_bytes

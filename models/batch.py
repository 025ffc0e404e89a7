# SPDX-License-Identifier: MIT
"""A batch of examples: the only thing a model is given.

Shapes: B examples per rank, C dense features, K tasks, N ids in all lists of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """B examples, ready for the tables: ids are final row numbers, or raw where a table is dynamic.

    Attributes:
        sparse: the schema's sparse features in order. Values are int64 table rows, or ids where a
            table is dynamic (`MISSING_ID` for a null). A feature of kind `id` has one value an
            example. The sequences of one history have equal lengths, oldest event first. If a
            feature of the schema has weights, the tensor has weights (N,) float32: for the ids of a
            bag the factor of each vector in the sum (its weight, or 1, over the number of ids where
            the bag takes the mean), for others 1.
        dense: (B, C) float32; NaN where the log has a null.
        labels: (B, K) float32 in {0, 1}; 0 where absent.
        weights: (B, K) float32 >= 0; 0 masks an absent label and padding.
        groups: (B,) int64, the hashed user by which GAUC groups examples; 0 if the schema has no
            user.
        actions: (N,) int64 past actions of the first history that has them (bit k: the k-th label),
            aligned with that history's values; empty if the schema has none.
        num_padding: how many of the B examples, at the end, are padding (weight 0) that evens out
            ranks.
        day: the latest of the examples' days, since the epoch; 0 if the log has none.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor
    weights: Tensor
    groups: Tensor
    actions: Tensor
    num_padding: int = 0
    day: int = 0

    @property
    def num_examples(self) -> int:
        """Number of real examples, padding not counted."""
        return self.labels.shape[0] - self.num_padding

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`."""
        return Batch(
            sparse=self.sparse.to(device=device, non_blocking=non_blocking),
            dense=self.dense.to(device=device, non_blocking=non_blocking),
            labels=self.labels.to(device=device, non_blocking=non_blocking),
            weights=self.weights.to(device=device, non_blocking=non_blocking),
            groups=self.groups.to(device=device, non_blocking=non_blocking),
            actions=self.actions.to(device=device, non_blocking=non_blocking),
            num_padding=self.num_padding,
            day=self.day,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the batch's memory."""
        self.sparse.record_stream(stream)  # pyright: ignore[reportArgumentType]
        for tensor in (self.dense, self.labels, self.weights, self.groups, self.actions):
            tensor.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory."""
        return Batch(
            sparse=self.sparse.pin_memory(),
            dense=self.dense.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
            groups=self.groups.pin_memory(),
            actions=self.actions.pin_memory(),
            num_padding=self.num_padding,
            day=self.day,
        )

# SPDX-License-Identifier: MIT
"""Counts the lookups and exchanges of a running step.

Features share lookups because a plan puts the tables of one module and one kind of sharding into
one kernel, and their ids and vectors into one exchange. This module counts whether that holds: by
hooks on the lookup kernels and on the exchange of ids, and by wrapping the collectives of
torch.distributed. Outside a `with Counters(...)` block nothing is changed.

Shapes: R ranks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.lookups import lookup_modules

_UNBUILT = ("_has_uninitialized_input_dist", "_has_uninitialized_input_dists")
_KERNELS = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)


@dataclass
class Counts:
    """Counts of this rank since the counters were entered.

    In a pipelined step, ids are those of the next batch and lookups are those of this one.

    Attributes:
        lookups: forward lookup kernels.
        collectives: exchanges that TorchRec called.
        ids_in: ids of batches.
        ids_sent: the same after deduplication.
        ids_looked_up: rows that this rank read for all ranks.
        bytes_sent: to other ranks.
    """

    lookups: int = 0
    collectives: int = 0
    ids_in: int = 0
    ids_sent: int = 0
    ids_looked_up: int = 0
    bytes_sent: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name, for a log or an exporter."""
        return dataclasses.asdict(self)


class Counters:
    """Counts while it is entered: `with Counters(model) as counts: step()`.

    Args:
        model: sharded, and stepped at least once: TorchRec builds its exchanges in the first step.

    Raises:
        RuntimeError: on entry, if no step was taken yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Counts:
        """Start counting."""
        counts = Counts()
        for name, module in self._model.named_modules():
            if isinstance(module, ShardedModule):
                # A dynamic collection has two parts: one exchanges ids, the other looks them up.
                exchanges: Any = getattr(module, "_input_dists", ())
                if any(getattr(module, flag, False) for flag in _UNBUILT):
                    self.__exit__()
                    raise RuntimeError(
                        f"counters: {name} has not exchanged ids yet; take one step before counting"
                    )
                self._watch_ids(module, exchanges, counts)
                for part in lookup_modules(module):
                    if isinstance(part, _KERNELS):
                        self._watch_kernel(part, counts)
        for name, sent in _SENT.items():
            self._replace(dist, name, _counted(getattr(dist, name), sent, counts))
        return counts

    def __exit__(self, *_: object) -> None:
        """Stop counting and leave everything as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _watch_kernel(self, kernel: nn.Module, counts: Counts) -> None:
        def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            indices = named["indices"] if "indices" in named else arguments[0]
            counts.lookups += 1
            counts.ids_looked_up += indices.numel()

        self._undo.append(kernel.register_forward_pre_hook(note, with_kwargs=True).remove)

    def _watch_ids(self, module: Any, exchanges: Any, counts: Counts) -> None:
        dedup = getattr(module, "_use_index_dedup", False)

        def note(_: nn.Module, arguments: tuple[KeyedJaggedTensor, ...]) -> None:
            ids = arguments[0].values().numel()
            counts.ids_sent += ids
            counts.ids_in += 0 if dedup else ids

        for exchange in exchanges:
            self._undo.append(exchange.register_forward_pre_hook(note).remove)
        if dedup:
            original = module._dedup_indices

            def counting(context: Any, features: list[KeyedJaggedTensor]) -> Any:
                counts.ids_in += sum(part.values().numel() for part in features)
                return original(context, features)

            self._replace(module, "_dedup_indices", counting)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the counters are left."""
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(
            (lambda: delattr(owner, name))
            if before is None
            else (lambda: setattr(owner, name, before))
        )


def _counted(call: Callable[..., Any], sent: Callable[..., int], counts: Counts) -> Any:
    """Wrap a collective: count its calls by TorchRec and the bytes that leave this rank.

    The signature stays open, because it is that of whichever collective is wrapped.
    """

    def counting(*arguments: Any, **named: Any) -> Any:
        # Dense weights are exchanged by the same functions, called from elsewhere.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torchrec."):
            counts.collectives += 1
            counts.bytes_sent += sent(*arguments, **named)
        return call(*arguments, **named)

    return counting


def _all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> int:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = input_split_sizes or [input.shape[0] // size] * size
    total = sum(parts)
    return input.nbytes * (total - parts[rank]) // total if total else 0


def _reduce_scatter(
    output: Tensor,
    input: Tensor | list[Tensor],
    op: Any = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> int:
    if isinstance(input, list):
        return sum(part.nbytes for part in input) - input[dist.get_rank(group)].nbytes
    size = dist.get_world_size(group)
    return input.nbytes * (size - 1) // size


def _all_gather(
    output: Any,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> int:
    return input.nbytes * (dist.get_world_size(group) - 1)


# The bytes that each collective sends, by the name under which TorchRec calls it.
_SENT: dict[str, Callable[..., int]] = {
    "all_to_all_single": _all_to_all,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "all_gather": _all_gather,
}

# SPDX-License-Identifier: MIT
"""What tables are used for: occupancy, missing ids, skew and row norms, per table on this rank.

Nothing here runs in the hot path. A row's optimizer state tells whether it was ever updated, so
occupancy needs no counter of its own; ids are kept by reference for a window of batches and counted
when somebody asks; norms are of a sample. All of it is of this rank alone: its shards, its ids.

Shapes: E rows and D columns of a table, N values of a jagged tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.schema import Schema

_SAMPLE_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """A table's rows on this rank.

    rows: held here. touched: of them, ever updated; None if the optimizer keeps no state.
    mean_norm, max_norm: Euclidean, of a sample of the touched rows (of all rows without state); of
      a shard's columns where a table is cut by column. bytes: of the weights.
    """

    rows: int
    touched: int | None
    mean_norm: float
    max_norm: float
    bytes: int

    @property
    def occupancy(self) -> float | None:
        """Share of the rows that were ever updated."""
        return None if self.touched is None or not self.rows else self.touched / self.rows


@dataclass(frozen=True, kw_only=True)
class IdStats:
    """The ids of a table in this rank's latest batches.

    ids: how many. missing: share of row 0 (null, empty or out of vocabulary). distinct: different
    rows, row 0 left out. top_share: share of the ids that fall on the `top` most frequent rows.
    """

    ids: int
    missing: float
    distinct: int
    top_share: float


def shard_stats(
    layer: EmbeddingLayer, states: Mapping[str, Any] | None = None, sample: int = _SAMPLE_ROWS
) -> dict[str, ShardStats]:
    """Return statistics of the rows on this rank, by table; tables without rows here are left out.

    Args:
        layer: sharded or not.
        states: `state_dict()["state"]` of the fused optimizer.
        sample: rows of which norms are taken, evenly spaced, at most.
    """
    by_table = {
        key.rsplit(".", 1)[0].rsplit(".", 1)[-1]: value
        for parts in (states or {}).values()
        for key, value in parts.items()
        if key.endswith(".momentum1")
    }
    found = {}
    for name, weight in layer.table_weights().items():
        shards = [shard for shard, _, _ in local_shards(weight)]
        held = [shard for shard in shards if shard.numel()]
        if not held:
            continue
        touched = None
        rows = [torch.arange(len(shard), device=shard.device) for shard in held]
        if name in by_table:
            marks = [state for state, _, _ in local_shards(by_table[name]) if state.numel()]
            rows = [mark.reshape(len(mark), -1).any(1).nonzero()[:, 0] for mark in marks]
            touched = sum(map(len, rows))
        norms = _norms(held, rows, max(1, sample // len(held)))
        found[name] = ShardStats(
            rows=sum(map(len, held)),
            touched=touched,
            mean_norm=norms.mean().item() if len(norms) else 0.0,
            max_norm=norms.max().item() if len(norms) else 0.0,
            bytes=sum(shard.nbytes for shard in held),
        )
    return found


class IdWindow:
    """The ids of this rank's latest batches, counted on demand.

    Args:
        schema: which features read which table.
        batches: kept, by reference.
        top: rows that count as the most frequent ones.
    """

    def __init__(self, schema: Schema, batches: int = 16, top: int = 10) -> None:
        self._features: dict[str, list[str]] = {table.name: [] for table in schema.tables}
        for feature in schema.sparse:
            self._features[feature.table].append(feature.name)
        self._window: deque[KeyedJaggedTensor] = deque(maxlen=batches)
        self._top = top

    def update(self, features: KeyedJaggedTensor) -> None:
        """Remember a batch's ids; no copy, no work."""
        self._window.append(features)

    def stats(self) -> dict[str, IdStats]:
        """Count the window; tables without ids in it are left out."""
        found = {}
        lists = [features.to_dict() for features in self._window]
        for table, names in self._features.items():
            parts = [batch[name].values() for batch in lists for name in names if name in batch]
            ids = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
            if not len(ids):
                continue
            rows, counts = torch.unique(ids, return_counts=True)
            top = counts.topk(min(self._top, len(counts))).values
            found[table] = IdStats(
                ids=len(ids),
                missing=(ids == 0).double().mean().item(),
                distinct=int((rows != 0).sum()),
                top_share=top.sum().item() / len(ids),
            )
        return found


def _norms(shards: list[Tensor], rows: list[Tensor], sample: int) -> Tensor:
    """Return the norms of at most `sample` evenly spaced `rows` of each shard."""
    parts = []
    for shard, chosen in zip(shards, rows, strict=True):
        kept = chosen[:: max(1, -(-len(chosen) // sample))]
        parts.append(shard.detach()[kept].float().norm(dim=1))
    return torch.cat(parts)

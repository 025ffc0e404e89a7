# SPDX-License-Identifier: MIT
"""How tables are used: occupancy, hits, missing ids, skew and row norms, per table and rank.

Nothing here runs in the hot path. A row's optimizer state tells whether it was ever updated, so
occupancy needs no counter. Ids are kept by reference for a window of batches and counted on demand.
Hits are counted where the rows are, in the lookup kernels of an evaluation. Norms are of a sample.
`rank_numbers` gives one rank's numbers, and `merge_numbers` combines the ranks.

Shapes: B examples, E rows and D columns of a table, N values of a jagged tensor, F features of a
kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
)
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.dynamic.dynamic import dynamic_parts
from embeddings.dynamic.idmap import TOTALS
from embeddings.lookups import lookup_modules
from embeddings.schema.lifetime import MISSING_ID
from embeddings.schema.schema import Schema

_SAMPLE_ROWS = 4096
# Numbers of ranks are added, except means (weighted by another number), maxima, and shares.
_MEANS = {"missing": "ids", "top_share": "ids", "mean_norm": "rows"}
_LARGEST = ("max_norm", "distinct")
_SHARES = {"occupancy": ("touched", "rows"), "hit_rate": ("hits", "lookups")}


@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """A table's rows on this rank.

    Attributes:
        rows: held here.
        touched: rows that were ever updated; None if the optimizer keeps no state.
        mean_norm: Euclidean, of a sample of the touched rows (of all rows without state); of a
          shard's columns where a table is cut by column.
        max_norm: the largest of the same.
        bytes: of the weights.
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

    Attributes:
        ids: their number.
        missing: share of row 0 (null, empty or out of vocabulary).
        distinct: different rows, row 0 left out.
        top_share: share of the ids that fall on the `top` most frequent rows.
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
        self._missing = {t.name: MISSING_ID if t.dynamic else 0 for t in schema.tables}
        self._window: deque[KeyedJaggedTensor] = deque(maxlen=batches)
        self._top = top

    def update(self, features: KeyedJaggedTensor) -> None:
        """Keep a batch's ids by reference."""
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
                missing=(ids == self._missing[table]).double().mean().item(),
                distinct=int((rows != self._missing[table]).sum()),
                top_share=top.sum().item() / len(ids),
            )
        return found


class Hits:
    """Counts how many ids read rows that were ever updated, while it is entered.

    Enter it around an evaluation: it keeps, by reference, the ids that the kernels of this rank
    look up in their first batches. Deduplicated ids count once per batch, feature and source rank.
    In a hashed table another id of the same row may have trained it; in a dynamic table only an id
    with a row of its own can hit.

    Args:
        model: sharded.
        batches: to look at.
    """

    def __init__(self, model: nn.Module, batches: int = 16) -> None:
        self._handles: list[Any] = []
        self._seen: list[tuple[Any, deque[tuple[Tensor, Tensor]]]] = []
        for module in model.modules():
            if isinstance(module, ShardedModule):
                for part in lookup_modules(module):
                    if isinstance(part, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                        self._seen.append((part, deque()))
        self._batches = batches
        self._maps = {part.table.name: part.map for part in dynamic_parts(model)}

    def __enter__(self) -> Hits:
        """Start to record."""
        for part, seen in self._seen:
            self._handles.append(part.register_forward_pre_hook(partial(self._note, seen)))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; the records stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _note(
        self, seen: deque[tuple[Tensor, Tensor]], _: nn.Module, inputs: tuple[KeyedJaggedTensor]
    ) -> None:
        if len(seen) < self._batches:
            seen.append((inputs[0].values(), inputs[0].offsets()))

    def numbers(self) -> dict[str, dict[str, int]]:
        """Return, by table, `lookups` (missing ids left out) and `hits` among them."""
        found: dict[str, dict[str, int]] = {}
        for part, seen in self._seen:
            states = part.emb_module.split_optimizer_states()
            feature = 0
            for number, table in enumerate(part.config.embedding_tables):
                first, feature = feature, feature + table.num_features()
                marks = states[number][0] if number < len(states) and states[number] else None
                if marks is None or not marks.numel():
                    continue  # without state it is unknown
                trained = marks.reshape(table.local_rows, -1).any(1)  # (rows,)
                if table.name in self._maps:
                    trained &= self._maps[table.name].ids != MISSING_ID
                shard = table.local_metadata
                holds_missing = shard is None or shard.shard_offsets[0] == 0
                numbers = found.setdefault(table.name, {"lookups": 0, "hits": 0})
                for values, offsets in seen:
                    size = (len(offsets) - 1) // part.config.num_features()
                    ids = values[offsets[first * size] : offsets[feature * size]].long()
                    if holds_missing:
                        ids = ids[ids != 0]
                    numbers["lookups"] += len(ids)
                    numbers["hits"] += int(trained[ids].sum())
        return found


def rank_numbers(
    shards: Mapping[str, ShardStats],
    ids: Mapping[str, IdStats],
    hits: Mapping[str, Mapping[str, float]],
    more: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, dict[str, float]]:
    """Return this rank's numbers by table; unknown numbers are absent.

    Args:
        shards: of the rows held here.
        ids: of the latest batches.
        hits: of `Hits.numbers`.
        more: counts of dynamic tables (`dynamic_numbers`), which replace numbers of the same name.
    """
    found: dict[str, dict[str, float]] = {}
    plain = [{table: asdict(own) for table, own in part.items()} for part in (shards, ids)]
    for part in (*plain, hits, more or {}):
        for table, own in part.items():
            found.setdefault(table, {}).update({n: v for n, v in own.items() if v is not None})
    for numbers in found.values():
        _add_shares(numbers)
    return found


def dynamic_numbers(layer: EmbeddingLayer) -> dict[str, dict[str, int]]:
    """Return the counts of the dynamic tables on this rank since they were built.

    They are those of `embeddings/dynamic/idmap.py` (admissions, evictions, failed inserts and
    more), and `touched`, the rows that ids hold.
    """
    return {
        part.table.name: {
            "touched": part.map.occupancy()[0],
            **{
                f"dynamic_{name}": number
                for name, number in zip(TOTALS, part.map.totals.tolist(), strict=True)
            },
        }
        for part in dynamic_parts(layer)
    }


def merge_numbers(ranks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """Combine the ranks' numbers: by table, those of all ranks and, as `ranks`, those of each.

    Counts are added. `missing`, `top_share` and `mean_norm` are weighted means. `max_norm` and
    `distinct` are the largest. `occupancy` and `hit_rate` follow from the counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for table in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [{"rank": n, **rank[table]} for n, rank in enumerate(ranks) if table in rank]
        merged: dict[str, Any] = {}
        for name in {n: 0 for part in parts for n in part if n not in ("rank", *_SHARES)}:
            values = [part[name] for part in parts if name in part]
            if name in _MEANS:
                sizes = [part.get(_MEANS[name], 0) for part in parts if name in part]
                total = sum(v * size for v, size in zip(values, sizes, strict=True))
                merged[name] = total / max(1, sum(sizes))
            else:
                merged[name] = max(values) if name in _LARGEST else sum(values)
        _add_shares(merged)
        found[table] = {**merged, "ranks": parts}
    return found


def _add_shares(numbers: dict[str, Any]) -> None:
    """Set the shares that follow from other numbers."""
    for name, (part, whole) in _SHARES.items():
        if part in numbers and numbers.get(whole):
            numbers[name] = numbers[part] / numbers[whole]


def _norms(shards: list[Tensor], rows: list[Tensor], sample: int) -> Tensor:
    """Return the norms of at most `sample` evenly spaced `rows` of each shard."""
    parts = []
    for shard, chosen in zip(shards, rows, strict=True):
        kept = chosen[:: max(1, -(-len(chosen) // sample))]
        parts.append(shard.detach()[kept].float().norm(dim=1))
    return torch.cat(parts)

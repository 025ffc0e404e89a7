# SPDX-License-Identifier: MIT
"""Tables whose rows follow the ids: TorchRec's managed collision, on any device.

`DynamicCollection` holds tables of one width, each with an `IdMap`; its sharded form is in
`embeddings/dynamic/dynamic_sharding.py`. Single ids, bags and sequences all get one vector per id,
so one collection serves them all; for single ids that is less to exchange than pooling over ranks.

Rows that get another id are reset here and not by TorchRec, whose reset has no CPU kernel. A new id
starts from a vector that depends on its bits, the seed and the table's name, so it is the same in
any row and on any rank, and from an optimizer state of zero. A row without an id holds zeros.

Shapes: U ids, D columns of a table.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from embeddings.dynamic.buckets import mix64
from embeddings.dynamic.idmap import IdMap
from embeddings.schema.lifetime import MISSING_ID
from embeddings.schema.schema import Table

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def draw_vectors(ids: Tensor, table: Table, seed: int) -> Tensor:
    """Return the (U, D) float32 vectors that new ids start from, normal with `init_std`.

    They depend only on id, seed and the table's name. Each 16 of an id's mixed bits choose one of
    65,536 quantiles, which takes a quarter of the time of logarithms and angles.

    Args:
        ids: (U,) int64.
        table: gives D, `init_std` and the name.
        seed: the same on all ranks.
    """
    digest = hashlib.sha256(f"{seed}/{table.name}/ids".encode()).digest()
    salt = int.from_bytes(digest[:8], "little", signed=True)
    fours = torch.arange(1, table.embedding_dim // 4 + 1, device=ids.device) * _GOLDEN  # (D / 4,)
    bits = mix64(mix64(ids ^ salt)[:, None] + fours)  # (U, D / 4), 64 bits for four numbers
    chosen = bits.view(torch.int16).flatten().int() + 2**15  # (U * D,) 0 to 65,535
    drawn = _quantiles(ids.device).index_select(0, chosen)
    return (drawn * table.init_std).view(-1, table.embedding_dim)


@functools.cache
def _quantiles(device: torch.device) -> Tensor:
    """Return (65536,) float32: medians of that many equally likely slices of a standard normal."""
    shares = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    return torch.special.ndtri(shares).float().to(device)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of a table that are on this rank.

    Attributes:
        table: the whole table.
        seed: of the vectors.
        map: from ids to these rows.
        weight: (rows, D).
        states: of the optimizer, (rows,) or (rows, ...) each.
    """

    table: Table
    seed: int
    map: IdMap
    weight: Tensor
    states: tuple[Tensor, ...]

    @torch.no_grad()
    def reset(self) -> None:
        """Start without ids: all rows are zero but the default rows and row 0."""
        self.map.reset()
        if self.weight.is_meta:
            return
        if self.weight.any():  # memory that was never written is zero, and takes no room
            self.weight.zero_()
        layout = self.map.layout
        rows = layout.default_rows(self.weight.device)
        buckets = torch.arange(layout.first_bucket, layout.last_bucket, device=rows.device)
        self._draw(rows, buckets)
        if layout.first_bucket == 0:
            self._draw(rows.new_zeros(1), rows.new_full((1,), -1))

    @torch.no_grad()
    def renew(self, rows: Tensor) -> None:
        """Reset vector and optimizer state of `rows` (rows,), whose ids have changed."""
        ids = self.map.ids[rows]
        vectors = draw_vectors(ids, self.table, self.seed)  # (rows, D)
        vectors = vectors.masked_fill((ids == MISSING_ID)[:, None], 0)
        self.weight[rows] = vectors.to(self.weight.dtype)
        for state in self.states:
            state[rows] = 0

    def _draw(self, rows: Tensor, keys: Tensor) -> None:
        # Salted: `keys` are small numbers, which may also be ids.
        self.weight[rows] = draw_vectors(keys ^ _GOLDEN, self.table, self.seed).to(
            self.weight.dtype
        )


class HasParts:
    """A collection of dynamic tables, sharded or not."""

    def parts(self) -> Iterator[Part]:
        """Yield each table's rows on this rank."""
        raise NotImplementedError


class DynamicCollection(ManagedCollisionEmbeddingCollection, HasParts):
    """Dynamic tables of one width, unsharded.

    Args:
        tables: each with a `dynamic` section.
        features: per table, the names of those that read it.
        seed: of the vectors.
        device: of the tables; `meta` to allocate nothing.
    """

    def __init__(
        self,
        tables: tuple[Table, ...],
        features: Mapping[str, list[str]],
        seed: int,
        device: torch.device,
    ) -> None:
        configs = [
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=features[table.name],
                init_fn=_leave,
            )
            for table in tables
        ]
        maps: dict[str, Any] = {}
        for table in tables:
            assert table.dynamic is not None
            maps[table.name] = IdMap(table.num_embeddings, table.dynamic, device)
        super().__init__(
            EmbeddingCollection(tables=configs, device=device),
            ManagedCollisionCollection(maps, configs, need_preprocess=False),
        )
        self.tables, self.seed = tables, seed

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[dict[str, JaggedTensor], None]:
        """Return one vector per id of each feature, and None for the rows."""
        rows = self._managed_collision_collection(features)
        changed = self._managed_collision_collection.evict()
        for part in self.parts():
            renewed = changed[part.table.name]
            if renewed is not None:
                part.renew(renewed)
        return cast(dict[str, JaggedTensor], self._embedding_module(rows)), None

    def parts(self) -> Iterator[Part]:
        """Yield the tables."""
        maps = self._managed_collision_collection._managed_collision_modules
        for table in self.tables:
            weight = self._embedding_module.get_parameter(f"embeddings.{table.name}.weight")
            optimizers: list[Any] = getattr(weight, "_in_backward_optimizers", [])
            states = [state for one in optimizers for state in one.state[weight].values()]
            yield Part(
                table=table,
                seed=self.seed,
                map=cast(IdMap, maps[table.name]),
                weight=weight.detach(),
                states=tuple(s for s in states if isinstance(s, Tensor) and s.dim()),
            )


def dynamic_parts(model: nn.Module) -> Iterator[Part]:
    """Yield the rows on this rank of every dynamic table in `model`."""
    for module in model.modules():
        if isinstance(module, HasParts):
            yield from module.parts()


def _leave(weight: Tensor) -> None:
    """Leave a weight as it is: `EmbeddingLayer.reset_parameters` fills it."""

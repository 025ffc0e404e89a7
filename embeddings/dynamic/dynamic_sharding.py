# SPDX-License-Identifier: MIT
"""Dynamic tables on several ranks: raw ids go to the rank of their bucket and become rows there.

TorchRec's managed collision needs a number of buckets that the ranks divide, and resets rows by a
kernel that CPUs lack. Here a rank holds any number of buckets (`embeddings/dynamic/buckets.py`),
and `Part.renew` resets rows. Sharding is by row only. Ids travel while the batch before is
computed, and are mapped in the step of their own batch, so none is admitted early.

Shapes: F features, B examples, N ids, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_modules import (
    ManagedCollisionCollectionContext,
    ManagedCollisionCollectionSharder,
    ShardedManagedCollisionCollection,
)
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import (
    Awaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from embeddings.dynamic.buckets import num_buckets, owners
from embeddings.dynamic.dynamic import DynamicCollection, HasParts, Part
from embeddings.dynamic.idmap import IdMap
from embeddings.lookups import unique_ids, without_weights
from embeddings.schema.schema import Table


class ShardedDynamicCollection(ShardedManagedCollisionEmbeddingCollection, HasParts):
    """The rows of dynamic tables on this rank."""

    tables: tuple[Table, ...]
    seed: int

    def parts(self) -> Iterator[Part]:
        """Yield the tables' parts on this rank."""
        maps = self._managed_collision_collection._managed_collision_modules
        for table in self.tables:
            kernel, index = self._table_to_tbe_and_index[table.name]
            number = int(index.item())
            states = kernel.split_optimizer_states()
            yield Part(
                table=table,
                seed=self.seed,
                map=cast(IdMap, maps[table.name]),
                weight=kernel.split_embedding_weights()[number],
                states=tuple(states[number]) if states else (),
            )

    def _evict(self, evictions_per_table: dict[str, Tensor | None]) -> None:
        if any(rows is not None for rows in evictions_per_table.values()):
            for part in self.parts():
                rows = evictions_per_table[part.table.name]
                if rows is not None:
                    part.renew(rows)


class _ByBucket(RwSparseFeaturesDist):
    """Sends each id unchanged, with its weight, to the rank that holds its bucket."""

    def __init__(
        self, group: dist.ProcessGroup, buckets: list[int], device: torch.device | None
    ) -> None:
        super().__init__(group, len(buckets), [group.size()] * len(buckets), is_sequence=True)
        self._buckets = torch.tensor(buckets, device=device)
        self._ones = torch.ones(len(buckets), dtype=torch.int64, device=device)

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        if self._world_size == 1:
            return self._dist(sparse_features)  # in the order in which they came
        ids = sparse_features.values()  # (N,)
        sizes = sparse_features.lengths().view(len(self._ones), -1).sum(1)  # (F,) ids a feature
        ranks = KeyedJaggedTensor(
            keys=sparse_features.keys(),
            values=owners(ids, self._buckets.repeat_interleave(sizes), self._world_size),
            lengths=sparse_features.lengths(),
            stride=sparse_features.stride(),
        )
        # TorchRec sorts by rank; the ids then take the places of their ranks. order: (N,).
        sent, order = bucketize_kjt_before_all2all(
            ranks, self._world_size, self._ones, output_permute=True
        )
        assert order is not None
        sent._values = torch.empty_like(ids).scatter_(0, order.long(), ids)
        times = sparse_features.weights_or_none()
        if times is not None:
            sent._weights = torch.empty_like(times).scatter_(0, order.long(), times)
        self.unbucketize_permute_tensor = order
        return self._dist(sent)


class _ShardedMaps(ShardedManagedCollisionCollection):
    """Sends ids by bucket; ranks may hold different numbers of buckets.

    With deduplication an id carries its number of occurrences as weight, so that counts, admissions
    and evictions are the same as without. Weights of the batch are not sent.
    """

    def input_dist(
        self,
        ctx: ManagedCollisionCollectionContext,
        features: KeyedJaggedTensor,
        skip_permute: bool = False,
    ) -> Awaitable[Awaitable[KJTList]]:
        return super().input_dist(ctx, without_weights(features), skip_permute)

    def get_lookup_value(
        self, table: str, features: KeyedJaggedTensor, write_weights: Tensor | None = None
    ) -> dict[str, JaggedTensor]:
        found = cast(IdMap, self._managed_collision_modules[table])
        rows = found.rows(features.values(), features.weights_or_none())
        return {table: JaggedTensor(values=rows, lengths=features.lengths())}

    def _create_dedup_indices(self) -> None:
        """Do nothing: TorchRec's buffers here assume bounded ids."""

    def _dedup_indices(
        self, ctx: Any, features: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        found = []
        for part in features:
            unique, reverse, often = unique_ids(part)
            ctx.input_features.append(part)
            ctx.reverse_indices.append(reverse)
            # TorchRec's sorting kernels take float weights only, which are exact up to 2^24.
            unique._weights = often.float()
            found.append(unique)
        return found

    def _create_input_dists(self, input_feature_names: list[str]) -> None:
        super()._create_input_dists(input_feature_names)
        self._input_dists = [
            _ByBucket(
                cast(dist.ProcessGroup, cast(Any, sharding)._pg),
                [
                    num_buckets(
                        self._table_name_to_config[self._feature_to_table[f]].num_embeddings
                    )
                    for f in features
                ],
                self._device,
            )
            for sharding, features in zip(
                self._embedding_shardings, self._sharding_features, strict=True
            )
        ]


class _MapSharder(ManagedCollisionCollectionSharder):
    def shard(
        self,
        module: ManagedCollisionCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        embedding_shardings: list[Any],
        device: torch.device | None = None,
        use_index_dedup: bool = False,
    ) -> ShardedManagedCollisionCollection:
        return _ShardedMaps(
            module,
            params,
            env=env,
            device=device or torch.device("cpu"),
            embedding_shardings=embedding_shardings,
            use_index_dedup=use_index_dedup,
        )


class DynamicSharder(ManagedCollisionEmbeddingCollectionSharder):
    """Shards `DynamicCollection`s by row, along their buckets."""

    def __init__(
        self, dedup: bool = False, codecs: dict[str, QuantizedCommCodecs] | None = None
    ) -> None:
        super().__init__(
            EmbeddingCollectionSharder(use_index_dedup=dedup, qcomm_codecs_registry=codecs),
            _MapSharder(),
        )

    def shard(
        self,
        module: ManagedCollisionEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicCollection:
        """Return the part of `module` that belongs on this rank."""
        assert isinstance(module, DynamicCollection)
        sharded = ShardedDynamicCollection(
            module,
            params,
            ec_sharder=cast(EmbeddingCollectionSharder, self._e_sharder),
            mc_sharder=self._mc_sharder,
            env=env,
            device=device or torch.device("cpu"),
        )
        sharded.tables, sharded.seed = module.tables, module.seed
        return sharded

    @property
    def module_type(self) -> type[DynamicCollection]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class of modules that are sharded."""
        return DynamicCollection

# SPDX-License-Identifier: MIT
"""Where this project's plans meet TorchRec's classes: sharders, and a plan in TorchRec's terms.

Shapes: R ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.dynamic.buckets import shard_rows
from embeddings.dynamic.dynamic_sharding import DynamicSharder
from embeddings.lookups import unique_ids, without_weights
from embeddings.sharding.exchange import Exchange
from embeddings.sharding.plans import Plan, TablePlan


class _Pooled(ShardedEmbeddingBagCollection):
    """Divides a mean by exactly the number of its ids.

    For a row-wise table of means TorchRec divides every pooled vector by its number of ids + 1e-6,
    and a sum's or a single id's by 1 + 1e-6. Results would depend on the plan. Weights are sent
    only to tables that are read with weights.
    """

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: Any) -> Any:
        features = features if self._is_weighted else without_weights(features)
        exchange = super().input_dist(ctx, features)
        if ctx.divisor is not None:
            ctx.divisor = ctx.divisor.round_().clamp_(min=1.0)
        return exchange


class _DedupCollection(ShardedEmbeddingCollection):
    """Finds the unique ids of a batch on CPUs too, where fbgemm has no kernel for it.

    Weights are not sent: they multiply the vectors after the exchange.
    """

    def input_dist(self, ctx: EmbeddingCollectionContext, features: Any) -> Any:
        return super().input_dist(ctx, without_weights(features))

    def _dedup_indices(
        self, ctx: EmbeddingCollectionContext, input_feature_splits: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        if any(features.device().type != "cpu" for features in input_feature_splits):
            return super()._dedup_indices(ctx, input_feature_splits)
        found = []
        for features in input_feature_splits:
            unique, reverse, _ = unique_ids(features)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(reverse)
            found.append(unique)
        return found


class _Into:
    """The part of a sharder that names the sharded class and the settings it takes."""

    into: type[Any]
    settings: tuple[str, ...] = ()

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        sharder = cast(Any, self)
        return self.into(
            module,
            params,
            env,
            sharder.fused_params,
            device,
            qcomm_codecs_registry=sharder.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **{name: getattr(sharder, f"_{name}") for name in self.settings},
        )


class _PooledSharder(_Into, EmbeddingBagCollectionSharder):
    """Offers `row_wise` on CPUs too: it works over gloo, although TorchRec leaves it out."""

    into = _Pooled

    def sharding_types(self, compute_device_type: str) -> list[str]:
        kinds = super().sharding_types(compute_device_type)
        return kinds if "row_wise" in kinds else [*kinds, "row_wise"]


class _CollectionSharder(_Into, EmbeddingCollectionSharder):
    """Sends each id once if `use_index_dedup` is set."""

    into = _DedupCollection
    settings = ("use_index_dedup",)


def sharders(
    dedup: bool = False, exchange: Exchange | None = None
) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of the modules that hold tables.

    Args:
        dedup: whether tables that keep one vector per id, dynamic ones too, send each id once
          (`ShardingConfig.dedup`).
        exchange: the format of vectors between ranks; None for fp32.
    """
    codecs = None if exchange is None else exchange.codecs
    return cast(
        list[ModuleSharder[nn.Module]],
        [
            _PooledSharder(qcomm_codecs_registry=codecs),
            _CollectionSharder(use_index_dedup=dedup, qcomm_codecs_registry=codecs),
            DynamicSharder(dedup, codecs),
        ],
    )


def sharding_plan(plan: Plan) -> ShardingPlan:
    """Return `plan` in TorchRec's terms.

    Raises:
        RuntimeError: a table does not fit, or leaves a rank without rows.
    """
    without = [table for table in plan.tables if not table.fits]
    if without:
        raise RuntimeError(
            f"sharding: no plan places the tables on {plan.world_size} {plan.device} ranks; "
            f"{len(without)} do not fit, first {without[0].table!r}: {without[0].advice}"
        )
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for table in plan.tables:
        sizes, offsets = _shards(table, plan)
        if not all(size[0] for size in sizes):
            raise RuntimeError(
                f"sharding: {table.sharding} leaves ranks without rows of table {table.table!r} "
                f"({table.rows} rows on {plan.world_size} ranks), which the lookup kernels do not "
                "survive; use table_wise for it"
            )
        modules.setdefault(table.module, EmbeddingModuleShardingPlan())[table.table] = (
            ParameterSharding(
                sharding_type=table.sharding,
                compute_kernel=table.kernel,
                ranks=list(table.ranks),
                sharding_spec=EnumerableShardingSpec(
                    [
                        ShardMetadata(
                            shard_sizes=size,
                            shard_offsets=offset,
                            placement=placement(plan.device, rank, plan.local_world_size),
                        )
                        for size, offset, rank in zip(sizes, offsets, table.ranks, strict=True)
                    ]
                ),
                # Rows are checked when the batch is made, so a row out of bounds is a bug.
                bounds_check_mode=BoundsCheckMode.FATAL,
            )
        )
    return ShardingPlan(plan=cast(Any, modules))


def _shards(table: TablePlan, plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes and the offsets (first row, first column) of a table's shards."""
    if table.dynamic:
        bounds = shard_rows(table.rows, plan.world_size)
        return [[rows, table.columns] for _, rows in bounds], [[first, 0] for first, _ in bounds]
    return calculate_shard_sizes_and_offsets(
        torch.empty(table.rows, table.columns, device="meta"),
        plan.world_size,
        plan.local_world_size,
        table.sharding,
    )

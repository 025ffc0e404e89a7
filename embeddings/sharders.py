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
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)

from embeddings.plans import Plan


class _PooledSharder(EmbeddingBagCollectionSharder):
    """Offers `row_wise` on CPUs too: TorchRec leaves it out, but over gloo it works as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        kinds = super().sharding_types(compute_device_type)
        return kinds if "row_wise" in kinds else [*kinds, "row_wise"]


def sharders(dedup: bool = False) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of the modules that hold tables.

    dedup: whether tables that keep one vector per id send each id once (`ShardingConfig.dedup`).
    """
    return cast(
        list[ModuleSharder[nn.Module]],
        [_PooledSharder(), EmbeddingCollectionSharder(use_index_dedup=dedup)],
    )


def sharding_plan(plan: Plan) -> ShardingPlan:
    """Return `plan` in TorchRec's terms.

    Raises:
        RuntimeError: a table does not fit.
    """
    without = [table for table in plan.tables if not table.fits]
    if without:
        raise RuntimeError(
            f"sharding: no plan places the tables on {plan.world_size} {plan.device} ranks; "
            f"{len(without)} do not fit, first {without[0].table!r}: {without[0].advice}"
        )
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for table in plan.tables:
        sizes, offsets = calculate_shard_sizes_and_offsets(
            torch.empty(table.rows, table.columns, device="meta"),
            plan.world_size,
            plan.local_world_size,
            table.sharding,
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
                # Rows were checked when the batch was made; anything else is a bug to stop at.
                bounds_check_mode=BoundsCheckMode.FATAL,
            )
        )
    return ShardingPlan(plan=cast(Any, modules))

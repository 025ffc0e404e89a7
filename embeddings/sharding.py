# SPDX-License-Identifier: MIT
"""Where the tables go: a model and a topology in, a `ShardingPlan` out.

Planning is a pure function of the model's tables and the topology, so any number of ranks can be
planned from one process (a dry run). TorchRec's planner chooses; three rules are ours:

- `data_parallel` is never allowed. The planner likes it for small tables, but such tables are not
  touched by the fused optimizer.
- Every table must be in the plan; one that is not would stay a plain parameter that nothing
  updates.
- Column-wise sharding changes what RowWiseAdagrad computes (its one number a row becomes one a row
  and shard), so it has to be asked for, and not together with that optimizer.

Shapes: E rows and D columns of a table, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, cast

import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embeddings.collection import EmbeddingLayer

ShardingKind = Literal["table_wise", "row_wise", "table_row_wise", "column_wise"]
_KINDS = ("table_wise", "row_wise", "table_row_wise", "column_wise")
# Share of memory that is kept for the dense model, its optimizer and batches.
_RESERVED = 0.2


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """What the planner may do.

    sharding_types: kinds it may choose from for every table; `table_row_wise` needs GPUs. On one
      rank every table is `table_wise`.
    tables: per table, the one kind it must get.
    device_memory_bytes: memory of a GPU for tables and activations; 0 for TorchRec's default.
    host_memory_bytes: main memory per rank; 0 for TorchRec's default.
    """

    sharding_types: tuple[ShardingKind, ...] = ("table_wise", "row_wise", "table_row_wise")
    tables: dict[str, ShardingKind] = field(default_factory=dict)
    device_memory_bytes: int = 0
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, kinds in (
            ("sharding_types", self.sharding_types),
            ("tables", self.tables.values()),
        ):
            unknown = sorted(set(kinds) - set(_KINDS))
            if unknown:
                raise ValueError(f"{name}: expected kinds among {list(_KINDS)}, got {unknown}")
        if not self.sharding_types:
            raise ValueError("sharding_types: expected at least one kind, got none")
        if self.device_memory_bytes < 0 or self.host_memory_bytes < 0:
            raise ValueError(
                "device_memory_bytes and host_memory_bytes: expected numbers >= 0, got "
                f"{self.device_memory_bytes} and {self.host_memory_bytes}"
            )

    def topology(self, world_size: int, local_world_size: int, device_type: str) -> Topology:
        """Return R ranks, `local_world_size` on a machine, as the planner sees them."""
        return TopologyFactory.create_topology(
            TrainerConfig(
                world_size=world_size,
                local_world_size=local_world_size,
                hbm_cap_bytes=self.device_memory_bytes or None,
                ddr_cap_bytes=self.host_memory_bytes or None,
            ),
            kernel_config=KernelConfig(compute_device=device_type),
        )


class _PooledSharder(EmbeddingBagCollectionSharder):
    """Offers `row_wise` on CPUs too: TorchRec leaves it out, but over gloo it works as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        kinds = super().sharding_types(compute_device_type)
        return kinds if "row_wise" in kinds else [*kinds, "row_wise"]


def sharders() -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of the modules that hold tables."""
    return cast(
        list[ModuleSharder[nn.Module]],
        [_PooledSharder(), EmbeddingCollectionSharder()],
    )


def plan_sharding(
    model: nn.Module,
    config: ShardingConfig,
    topology: Topology,
    batch_size: int = 512,
    group: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    """Plan every table of `model` onto the ranks of `topology`.

    Args:
        model: holds EmbeddingLayers, unsharded; on device `meta` nothing is allocated.
        config: what the planner may do.
        topology: the ranks, `ShardingConfig.topology`.
        batch_size: examples per rank (B), by which the planner estimates time and memory.
        group: plan on its first rank and share the result; None plans here, for any topology.

    Raises:
        ValueError: `config.tables` names a table that does not exist, or a kind that the table's
          optimizer does not survive.
        RuntimeError: the tables do not fit the topology under the constraints.
    """
    layers = [module for module in model.modules() if isinstance(module, EmbeddingLayer)]
    known = {table.name for layer in layers for table in layer.schema.tables}
    unknown = sorted(set(config.tables) - known)
    if unknown:
        raise ValueError(f"sharding.tables: {unknown} do not exist; tables: {sorted(known)}")
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED),
        constraints=_constraints(layers, config, topology.world_size),
        debug=False,
    )
    try:
        if group is not None and group.size() > 1:
            plan = planner.collective_plan(model, sharders(), group)
        else:
            plan = planner.plan(model, sharders())
    except (PlannerError, RuntimeError) as error:
        raise RuntimeError(
            f"sharding: no plan places the tables on {topology.world_size} "
            f"{topology.compute_device} ranks with sharding_types {list(config.sharding_types)}; "
            f"raise the memory limits, add ranks or allow more sharding types ({error})"
        ) from error
    _check(plan, model, known)
    return plan


def describe_plan(plan: ShardingPlan) -> str:
    """Return a text table: kind, kernel, shape, ranks and megabytes (float32) of each table."""
    rows = [("table", "sharding", "kernel", "rows x columns", "ranks", "MB")]
    total = 0.0
    for module_plan in plan.plan.values():
        for name, parameter in sorted(cast(EmbeddingModuleShardingPlan, module_plan).items()):
            shards = cast(EnumerableShardingSpec, parameter.sharding_spec).shards
            ends = [
                [offset + size for offset, size in zip(s.shard_offsets, s.shard_sizes, strict=True)]
                for s in shards
            ]
            shape = [max(column) for column in zip(*ends, strict=True)]
            megabytes = math.prod(shape) * 4 / 1e6
            total += megabytes
            ranks = ",".join(str(rank) for rank in parameter.ranks or [])
            kinds = (parameter.sharding_type, parameter.compute_kernel)
            rows.append((name, *kinds, f"{shape[0]} x {shape[1]}", ranks, f"{megabytes:.1f}"))
    rows.append(("total", "", "", "", "", f"{total:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _constraints(
    layers: list[EmbeddingLayer], config: ShardingConfig, world_size: int
) -> dict[str, ParameterConstraints]:
    """Return the planner's constraints per table."""
    constraints: dict[str, ParameterConstraints] = {}
    for layer in layers:
        for table in layer.schema.tables:
            features = [f for f in layer.schema.sparse if f.table == table.name]
            # Splitting rows over one rank would only cost the splitting.
            kind = config.tables.get(table.name, "table_wise" if world_size == 1 else None)
            constraints[table.name] = ParameterConstraints(
                sharding_types=[kind] if kind else list(config.sharding_types),
                pooling_factors=[float(max(1, feature.max_length)) for feature in features],
                feature_names=[feature.name for feature in features],
                # Rows were checked when the batch was made; anything else is a bug to stop at.
                bounds_check_mode=BoundsCheckMode.FATAL,
            )
    return constraints


def _check(plan: ShardingPlan, model: nn.Module, known: set[str]) -> None:
    """Refuse a plan under which a table would not be trained, or not as its optimizer says."""
    kinds: dict[str, str] = {}
    for module_plan in plan.plan.values():
        for name, parameter in cast(EmbeddingModuleShardingPlan, module_plan).items():
            kinds[name] = parameter.sharding_type
    missing = sorted(known - set(kinds))
    if missing:
        raise RuntimeError(
            f"sharding: expected every table in the plan, {missing} are missing and would not be "
            "trained"
        )
    optimizers = {
        kind
        for parameter in model.parameters()
        for kind in getattr(parameter, "_optimizer_classes", ())
    }
    by_column = sorted(name for name, kind in kinds.items() if "column" in kind)
    if by_column and RowWiseAdagrad in optimizers:
        raise ValueError(
            f"sharding: {by_column} are sharded by column, where rowwise_adagrad would keep one "
            "number per row and shard instead of one per row; use table_wise or row_wise, or kind "
            "'adagrad' or 'sgd'"
        )

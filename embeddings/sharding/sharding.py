# SPDX-License-Identifier: MIT
"""Plan the tables: a model and a topology in, a `ShardingPlan` out.

Planning is a pure function of the model's tables and the topology, so any number of ranks can be
planned from one process. `python -m trainer.plan` is the dry run of a recipe.

`embeddings/sharding/placement.py` chooses; four rules hold whatever it chooses:

- `data_parallel` is never allowed: such tables are not touched by the fused optimizer.
- Every table must be in the plan; one that is not would stay a plain parameter that nothing
  updates.
- Dynamic tables are row-wise, cut along their buckets, also on one rank.
- Column-wise sharding changes what RowWiseAdagrad computes (its one number a row becomes one a row
  and shard), so it has to be asked for, and not together with that optimizer.

Shapes: E rows and D columns of a table, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embeddings.collection import EmbeddingLayer
from embeddings.sharding.exchange import DTYPES, WireFormat
from embeddings.sharding.loads import KINDS, table_loads
from embeddings.sharding.placement import Machines, TableLoad, advise, place, usage
from embeddings.sharding.plans import (
    KEY,
    TABLE_SHARE,
    Plan,
    ShardingKind,
    TablePlan,
    differences,
    plan_from_dict,
    read_plan,
)
from embeddings.sharding.sharders import sharding_plan


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Settings of the planner and of the exchanges.

    Args:
        sharding_types: kinds that the planner may choose; `table_row_wise` needs GPUs. On one rank
          every table is `table_wise`.
        tables: per table, the one kind it must get.
        device_memory_bytes: memory of a GPU, of which four fifths are for tables, the rest for the
          dense model, its optimizer and batches; 0 for TorchRec's default.
        host_memory_bytes: main memory per rank; 0 for TorchRec's default. With GPUs it holds the
          tables that do not fit device memory, which is far slower; 0 there for none.
        unpool_ids: whether tables of single ids are read like sequences, one vector per id
          (`embeddings/sharding/coalesce.py`). Results are the same; a row-wise table then sends no
          partial sums.
        dedup: whether each id is sent once per batch, rank and feature, for tables that keep one
          vector per id: sequences, features that share a table with one, dynamic tables, and with
          `unpool_ids` single ids. Pooled lookups send every id.
        exchange: number format of vectors and their gradients between ranks
          (`embeddings/sharding/exchange.py`); tables keep theirs.
        pinned_plan: a JSON file that holds the plan to use: printed by `python -m trainer.plan`, or
          a checkpoint's manifest.json. Empty: plan.
        on_new_plan: for a resumed run whose checkpoint holds another plan: `allow` (tables move,
          values stay) or `refuse`.
    """

    sharding_types: tuple[ShardingKind, ...] = ("table_wise", "row_wise", "table_row_wise")
    tables: dict[str, ShardingKind] = field(default_factory=dict)
    device_memory_bytes: int = 0
    host_memory_bytes: int = 0
    unpool_ids: bool = False
    dedup: bool = False
    exchange: WireFormat = "fp32"
    pinned_plan: str = ""
    on_new_plan: Literal["allow", "refuse"] = "allow"

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, kinds in (
            ("sharding_types", self.sharding_types),
            ("tables", self.tables.values()),
        ):
            unknown = sorted(set(kinds) - set(KINDS))
            if unknown:
                raise ValueError(f"{name}: expected kinds among {list(KINDS)}, got {unknown}")
        if not self.sharding_types:
            raise ValueError("sharding_types: expected at least one kind, got none")
        if self.exchange not in DTYPES:
            raise ValueError(f"exchange: expected one of {list(DTYPES)}, got {self.exchange!r}")
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


def plan_tables(
    model: nn.Module, config: ShardingConfig, topology: Topology, batch_size: int = 512
) -> Plan:
    """Place every table of `model` on the ranks of `topology`, whether or not there is room.

    Args:
        model: holds EmbeddingLayers, unsharded; on device `meta` nothing is allocated.
        config: the kinds allowed, or the pinned plan.
        topology: the ranks, `ShardingConfig.topology`.
        batch_size: examples per rank (B), by which time and memory are estimated.

    Raises:
        ValueError: `config.tables` names a table that does not exist, or a kind that the table's
          optimizer does not survive; the pinned plan is of other tables or ranks.
        RuntimeError: the device offers none of the kinds that a table may have.
    """
    layers = [module for module in model.modules() if isinstance(module, EmbeddingLayer)]
    known = {table.name for layer in layers for table in layer.schema.tables}
    unknown = sorted(set(config.tables) - known)
    if unknown:
        raise ValueError(f"sharding.tables: {unknown} do not exist; tables: {sorted(known)}")
    loads = table_loads(model, config.tables, config.sharding_types, topology)
    if config.pinned_plan:
        plan = _pinned(config.pinned_plan, loads, topology)
    else:
        machines = _machines(config, topology, batch_size)
        places = place(loads, machines)
        used, busy = usage(places, machines)
        plan = Plan(
            world_size=topology.world_size,
            local_world_size=topology.local_world_size,
            device=topology.compute_device,
            batch_size=batch_size,
            capacity_bytes=machines.capacity_bytes,
            tables=tuple(
                TablePlan(
                    table=load.name,
                    module=load.module,
                    sharding=cast(ShardingKind, item.way.kind),
                    kernel="fused_uvm" if item.spilled else "fused",
                    rows=load.rows,
                    columns=load.columns,
                    dynamic=load.dynamic,
                    weight_bytes=load.weight_bytes,
                    ranks=item.ranks,
                    bytes_per_rank=item.way.bytes,
                    cost_ms=item.way.spilled_ms if item.spilled else item.way.cost_ms,
                    fits=item.fits,
                    advice="" if item.fits else advise(load, item, machines),
                )
                for load, item in zip(loads, places, strict=True)
            ),
            rank_bytes=tuple(used),
            rank_cost_ms=tuple(busy),
        )
    _check({table.table: table.sharding for table in plan.tables}, model, known)
    return plan


def plan_sharding(
    model: nn.Module, config: ShardingConfig, topology: Topology, batch_size: int = 512
) -> ShardingPlan:
    """Plan every table of `model` onto the ranks of `topology`, in TorchRec's terms.

    Raises:
        ValueError, RuntimeError: as `plan_tables` and `sharding_plan`.
    """
    return sharding_plan(plan_tables(model, config, topology, batch_size))


def check_plan(
    manifest: Mapping[str, Any], plan: Plan, config: ShardingConfig, path: str | Path
) -> None:
    """Compare `plan` with that of the checkpoint at `path`, if `on_new_plan` is `refuse`.

    Args:
        manifest: of the checkpoint.
        plan: of this run.
        config: holds `on_new_plan`.
        path: of the checkpoint.

    Raises:
        ValueError: `config.on_new_plan` is `refuse`, and the checkpoint has no plan or another.
    """
    if config.on_new_plan == "allow":
        return
    if KEY not in manifest:
        raise ValueError(f"{path}: holds no sharding plan; set parallel.sharding.on_new_plan allow")
    changes = differences(plan_from_dict(manifest[KEY], f"{path}: {KEY}"), plan)
    if changes:
        raise ValueError(
            f"parallel.sharding.on_new_plan refuses a plan other than that of {path}: "
            f"{'; '.join(changes[:5])}; pin the old one (pinned_plan {path}/manifest.json), or set "
            "on_new_plan allow"
        )


def _machines(config: ShardingConfig, topology: Topology, batch_size: int) -> Machines:
    """Return the ranks as the placement sees them."""
    storage = topology.devices[0].storage
    on_cpu = topology.compute_device == "cpu"
    capacity = storage.ddr if on_cpu else storage.hbm
    spill = 0 if on_cpu else config.host_memory_bytes
    return Machines(
        ranks=topology.world_size,
        local_ranks=topology.local_world_size,
        batch_size=batch_size,
        capacity_bytes=int(capacity * TABLE_SHARE),
        spill_bytes=int(spill * TABLE_SHARE),
        memory_speed=topology.ddr_mem_bw if on_cpu else topology.hbm_mem_bw,
        spill_speed=topology.hbm_to_ddr_mem_bw,
        local_speed=topology.intra_host_bw,
        network_speed=topology.inter_host_bw,
    )


def _pinned(path: str, loads: list[TableLoad], topology: Topology) -> Plan:
    """Return the plan at `path`, if it is one of these tables on these ranks."""
    plan = read_plan(path)
    ranks = (plan.world_size, plan.local_world_size, plan.device)
    expected = (topology.world_size, topology.local_world_size, topology.compute_device)
    shapes = {load.name: (load.module, load.rows, load.columns) for load in loads}
    found = {table.table: (table.module, table.rows, table.columns) for table in plan.tables}
    wrong = [name for name in sorted({*shapes, *found}) if shapes.get(name) != found.get(name)]
    if ranks != expected or wrong:
        what = (
            f"is for {ranks[0]} {ranks[2]} ranks, {ranks[1]} a machine, and these are "
            f"{expected[0]} {expected[2]}, {expected[1]} a machine"
            if ranks != expected
            else f"does not hold the tables of this model: {wrong[:5]} are absent or differ"
        )
        raise ValueError(
            f"sharding.pinned_plan: {path} {what}; plan again (python -m trainer.plan), or leave "
            "the setting out"
        )
    return plan


def _check(kinds: dict[str, str], model: nn.Module, known: set[str]) -> None:
    """Refuse a plan under which a table would not be trained, or by a changed optimizer."""
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

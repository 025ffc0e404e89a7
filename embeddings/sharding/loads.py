# SPDX-License-Identifier: MIT
"""The load that each table of a model puts on its ranks, and how it may be sharded.

Shapes: D columns of a table, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embeddings.collection import EmbeddingLayer
from embeddings.dynamic.buckets import shard_rows
from embeddings.dynamic.dynamic import DynamicCollection
from embeddings.optimizer import state_bytes
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import SparseFeature
from embeddings.sharding.placement import TableLoad
from embeddings.sharding.plans import ShardingKind
from embeddings.sharding.sharders import sharders

# In order of preference: each is cheaper to exchange than the next.
KINDS = ("table_wise", "table_row_wise", "row_wise", "column_wise")


def table_loads(
    model: nn.Module,
    told: Mapping[str, ShardingKind],
    sharding_types: Sequence[ShardingKind],
    topology: Topology,
) -> list[TableLoad]:
    """Return the load of every table of `model`.

    Args:
        model: holds EmbeddingLayers, unsharded.
        told: the one kind that a table must get, by name.
        sharding_types: the kinds that other tables may get.
        topology: the ranks.

    Raises:
        ValueError: a dynamic table has fewer buckets than there are ranks.
        RuntimeError: the device offers none of the kinds that a table may have.
    """
    offered = {sharder.module_type: sharder for sharder in sharders()}
    features: dict[str, SparseFeature] = {}
    dynamic: dict[str, DynamicConfig] = {}
    loads = []
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingLayer):
            features = {feature.name: feature for feature in module.schema.sparse}
            dynamic = {t.name: t.dynamic for t in module.schema.tables if t.dynamic}
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        parent = path.rpartition(".")[0]
        # A dynamic collection is sharded as a whole.
        place = parent if isinstance(model.get_submodule(parent), DynamicCollection) else path
        pooled = isinstance(module, EmbeddingBagCollection)
        device = offered[type(module)].sharding_types(topology.compute_device)
        configs = module.embedding_bag_configs() if pooled else module.embedding_configs()
        weights = {name.split(".")[-2]: weight for name, weight in module.named_parameters()}
        for table in configs:
            only, able = told.get(table.name), device
            if table.name in dynamic:
                only, able = only or "row_wise", _able_dynamic(table, topology)
            elif topology.world_size == 1:
                only = only or "table_wise"  # splitting rows would only cost the splitting
            kinds = _kinds(table, [only] if only else sharding_types, able, topology)
            own = [features[name] for name in table.feature_names]
            loads.append(
                TableLoad(
                    name=table.name,
                    module=place,
                    rows=table.num_embeddings,
                    columns=table.embedding_dim,
                    state_bytes=_state_bytes(weights[table.name], dynamic.get(table.name)),
                    ids=sum(max(1, feature.max_length) for feature in own),
                    vectors=len(own),
                    pooled=pooled,
                    kinds=kinds,
                    dynamic=table.name in dynamic,
                    weight_bytes=weights[table.name].element_size(),
                    id_bytes=12 if pooled and module.is_weighted() else 8,
                )
            )
    return loads


def _state_bytes(weight: Tensor, dynamic: DynamicConfig | None) -> int:
    """Return the bytes of a row's optimizer state and, of a dynamic table, of its map."""
    classes = getattr(weight, "_optimizer_classes", [RowWiseAdagrad])
    return state_bytes(classes[0], weight.shape[1]) + (dynamic.row_bytes if dynamic else 0)


def _kinds(
    table: BaseEmbeddingConfig, allowed: Sequence[str], device: Sequence[str], topology: Topology
) -> tuple[str, ...]:
    """Return the kinds that are allowed, offered by the device, and give every rank rows.

    Raises:
        RuntimeError: there is none.
    """
    able = [kind for kind in KINDS if kind in device and _fills(kind, table, topology)]
    kinds = tuple(kind for kind in able if kind in allowed)
    if not kinds:
        raise RuntimeError(
            f"sharding: table {table.name!r} of {table.num_embeddings:,} rows may be "
            f"{list(allowed)}, and {topology.world_size} {topology.compute_device} ranks offer "
            f"{able} for it (no rank may be left without rows); allow more sharding types"
        )
    return kinds


def _able_dynamic(table: BaseEmbeddingConfig, topology: Topology) -> list[str]:
    """Return the kinds for a dynamic table, which is cut along its buckets: by row.

    Raises:
        ValueError: there are more ranks than buckets.
    """
    try:
        shard_rows(table.num_embeddings, topology.world_size)
    except ValueError as error:
        raise ValueError(f"sharding: table {table.name!r}: {error}") from error
    return ["row_wise"]


def _fills(kind: str, table: BaseEmbeddingConfig, topology: Topology) -> bool:
    """Return whether each of a table's ranks gets rows of it.

    fbgemm's backward takes a table without rows for the next one in its kernel, whose columns
    beyond the first one's width then stay untrained.
    """
    parts = {"row_wise": topology.world_size, "table_row_wise": topology.local_world_size}
    ranks, rows = parts.get(kind, 1), table.num_embeddings
    return -(-rows // ranks) * (ranks - 1) < rows

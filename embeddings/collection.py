# SPDX-License-Identifier: MIT
"""Ids to vectors: one layer over every table of a schema, unsharded.

The table decides the collection. Tables of single ids and bags are in an EmbeddingBagCollection,
which pools inside the lookup. A table that any sequence reads is in an EmbeddingCollection, for its
single ids and bags too, so that a candidate item and the items of a history share one weight.
Tables of bags with weights are in a second EmbeddingBagCollection, to which weights travel with the
ids. Dynamic tables of one width are in a collection of their own
(`embeddings/dynamic/dynamic.py`). Callers see none of this: they get one pooled matrix and one
jagged tensor per sequence.

`EmbeddingLayer.forward` has no branch, because TorchRec's pipeline traces every module that owns a
table. The collections get the features untouched, because any operation on ids before them would
switch the pipeline's overlap off.

Shapes: B examples, P sum of the widths of pooled features, N values of a sequence in a batch, D
width of a table, E rows of a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.dynamic.dynamic import DynamicCollection, dynamic_parts
from embeddings.pooling import Assemble, Embeddings
from embeddings.schema.schema import Schema, Table

# Rows that one seed draws, whatever a table's sharding and number of rows.
_BLOCK_ROWS = 1024


class EmbeddingLayer(nn.Module):
    """Every table of a schema.

    Rows start from a normal distribution of the table's `init_std` that depends only on seed, table
    name and row number, so every sharding of a table starts from the same rows.

    Args:
        schema: tables and sparse features.
        device: where the tables are; `meta` to allocate nothing until they are sharded.
        seed: of the rows; `torch.initial_seed()` if None.
        by_id: tables of single ids that keep one vector per id as well
          (`embeddings/sharding/coalesce.py`).
    """

    def __init__(
        self,
        schema: Schema,
        device: torch.device | None = None,
        seed: int | None = None,
        by_id: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.schema = schema
        self.seed = torch.initial_seed() if seed is None else seed
        pooled = [feature for feature in schema.sparse if feature.kind != "sequence"]
        self.pooled_names = tuple(feature.name for feature in pooled)
        self.pooled_dims = tuple(schema.table(feature.table).embedding_dim for feature in pooled)
        self.sequence_names = tuple(
            feature.name for feature in schema.sparse if feature.kind == "sequence"
        )
        unpooled = tables_of_collections(schema).union(by_id)
        bags, weighted, collections = _configs(schema, unpooled)
        # Built on meta and allocated afterwards: TorchRec would draw rows only for them to be drawn
        # again here, and would advance the random numbers of the rest of the model.
        meta = torch.device("meta")
        self.bags = EmbeddingBagCollection(tables=bags, device=meta) if bags else None
        self.weighted = (
            EmbeddingBagCollection(tables=weighted, is_weighted=True, device=meta)
            if weighted
            else None
        )
        # An EmbeddingCollection holds tables of one width.
        self.collections = nn.ModuleDict(
            {
                f"dim{width}": EmbeddingCollection(tables=tables, device=meta)
                for width, tables in collections.items()
            }
        )
        self.dynamic = nn.ModuleDict(_dynamic(schema, self.seed))
        self.assemble = Assemble(schema, unpooled)
        if device is None or device.type != "meta":
            self.to_empty(device=device or "cpu")
            self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> Embeddings:
        """Look up the schema's features.

        Args:
            features: one key a feature, with B lists of rows, or of ids for dynamic tables. Weights
              multiply vectors before they are added; they include the division of a mean
              (`models/batch.py`).
        """
        bags = [part(features) for part in (self.bags, self.weighted) if part is not None]
        rows = [collection(features) for collection in self.collections.values()]
        rows += [collection(features)[0] for collection in self.dynamic.values()]
        return self.assemble(bags, rows, features)

    def table_weights(self) -> dict[str, Tensor | ShardedTensor]:
        """Return each table's weight by name, sharded or not, sharing memory with the layer."""
        return {
            name.split(".")[-2]: weight
            for name, weight in self.state_dict().items()
            if name.endswith(".weight")
        }

    def set_day(self, day: int) -> None:
        """Set the log's day of the next batch for dynamic tables, in days since the epoch."""
        for part in dynamic_parts(self):
            part.map.day = day

    def reset_parameters(self) -> None:
        """Draw the initial rows of every table, or of the shards of it that are on this rank.

        Dynamic tables start without ids.
        """
        for part in dynamic_parts(self):
            part.reset()
        for name, weight in self.table_weights().items():
            if self.schema.table(name).dynamic:
                continue
            for shard, first_row, first_column in local_shards(weight):
                draw_rows(shard, self.schema.table(name), self.seed, first_row, first_column)


def tables_of_collections(schema: Schema) -> set[str]:
    """Return the names of the tables that must keep one vector per id.

    They are tables that a sequence reads, dynamic tables, and tables whose bags are pooled in
    different ways: a table of an EmbeddingBagCollection pools in one way only. With weights a mean
    is a sum too.
    """
    names = {feature.table for feature in schema.sparse if feature.kind == "sequence"}
    names |= {table.name for table in schema.tables if table.dynamic}
    weighted = {feature.table for feature in schema.sparse if feature.weights}
    poolings: dict[str, set[str]] = {}
    for feature in schema.sparse:
        if feature.kind == "bag" and feature.table not in weighted:
            poolings.setdefault(feature.table, set()).add(feature.pooling)
    return names | {table for table, kinds in poolings.items() if len(kinds) > 1}


def local_shards(weight: Tensor | ShardedTensor) -> Iterator[tuple[Tensor, int, int]]:
    """Yield this rank's parts of a table, each with its first row and first column in the table."""
    if isinstance(weight, ShardedTensor):
        for shard in weight.local_shards():
            row, column = (*shard.metadata.shard_offsets, 0)[:2]
            yield shard.tensor, row, column
    else:
        yield weight, 0, 0


@torch.no_grad()
def draw_rows(
    weight: Tensor, table: Table, seed: int, first_row: int = 0, first_column: int = 0
) -> None:
    """Fill a shard of `table` with its initial rows.

    Args:
        weight: (rows, columns), part of the table from `first_row` and `first_column` on.
        table: its width D and standard deviation `init_std`.
        seed: the same on all ranks.
        first_row: of the shard in the table.
        first_column: of the shard in the table.
    """
    rows, columns = weight.shape
    generator = torch.Generator()
    block = torch.empty(_BLOCK_ROWS, table.embedding_dim)
    for index in range(first_row // _BLOCK_ROWS, -(-(first_row + rows) // _BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{table.name}/{index}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        block.normal_(0.0, table.init_std, generator=generator)
        start = index * _BLOCK_ROWS
        low, high = max(start, first_row), min(start + _BLOCK_ROWS, first_row + rows)
        weight[low - first_row : high - first_row].copy_(
            block[low - start : high - start, first_column : first_column + columns]
        )


def _configs(
    schema: Schema, unpooled: Collection[str]
) -> tuple[list[EmbeddingBagConfig], list[EmbeddingBagConfig], dict[int, list[EmbeddingConfig]]]:
    """Return TorchRec's configurations of pooled tables, of those with weights, and of the rest.

    The rest are the `unpooled` tables, by width.
    """
    bags: list[EmbeddingBagConfig] = []
    weighted: list[EmbeddingBagConfig] = []
    collections: dict[int, list[EmbeddingConfig]] = {}
    for table in schema.tables:
        if table.dynamic:
            continue
        features = [feature for feature in schema.sparse if feature.table == table.name]
        names = [feature.name for feature in features]
        if table.name in unpooled:
            collections.setdefault(table.embedding_dim, []).append(
                EmbeddingConfig(
                    name=table.name,
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    feature_names=names,
                    init_fn=_leave,
                )
            )
            continue
        # For single ids all poolings agree; a sum saves the division.
        pooling = next((f.pooling for f in features if f.kind == "bag"), "sum")
        has_weights = any(f.weights for f in features)
        (weighted if has_weights else bags).append(
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=names,
                # With weights a mean's division is in the weights (`trainer/data/transforms.py`).
                pooling=PoolingType.MEAN
                if pooling == "mean" and not has_weights
                else PoolingType.SUM,
                init_fn=_leave,
            )
        )
    return bags, weighted, collections


def _dynamic(schema: Schema, seed: int) -> dict[str, DynamicCollection]:
    """Return the collections of dynamic tables, by width, on `meta`."""
    widths: dict[int, list[Table]] = {}
    for table in schema.tables:
        if table.dynamic:
            widths.setdefault(table.embedding_dim, []).append(table)
    features = {
        table.name: [f.name for f in schema.sparse if f.table == table.name]
        for table in schema.tables
    }
    return {
        f"dim{width}": DynamicCollection(tuple(tables), features, seed, torch.device("meta"))
        for width, tables in widths.items()
    }


def _leave(weight: Tensor) -> None:
    """Leave a weight as it is: `EmbeddingLayer.reset_parameters` draws it once, shard by shard."""

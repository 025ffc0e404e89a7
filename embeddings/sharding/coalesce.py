# SPDX-License-Identifier: MIT
"""Which features share a lookup and its exchanges.

Features share without any setting. All pooled tables are in one EmbeddingBagCollection (those that
are read with weights in a second one), and tables that keep one vector per id are in one
EmbeddingCollection a width. TorchRec puts the tables of a collection that a plan shards alike into
one kernel a rank (where optimizer settings agree) and their ids and vectors into one exchange. So a
step costs one lookup and one exchange for each collection and kind of sharding, however many
features there are: `embeddings/sharding/counters.py` counts that.

What a setting chooses is how tables of single ids are read. Pooled, every id travels and a vector
comes back for each; every rank of a row-wise table sends a partial sum, mostly zeros. Unpooled, as
sequences are read, only the rank that has a row answers, and ids can be sent once per batch, rank
and feature, with one vector back for each (`embeddings/lookups.py`). A single id needs one vector,
so both give the same result, bit for bit. Bags stay pooled: they have fewer vectors than ids. An id
sent to a dynamic table carries its number of occurrences, so that counts are those of the batch.
"""

from __future__ import annotations

import torch

from embeddings.collection import EmbeddingLayer
from embeddings.schema.schema import Schema


def single_id_tables(schema: Schema) -> frozenset[str]:
    """Return the tables read by single ids alone; dynamic ones are never pooled and left out."""
    others = {feature.table for feature in schema.sparse if feature.kind != "id"}
    return frozenset(table.name for table in schema.tables if not table.dynamic) - others


def unpool(layer: EmbeddingLayer) -> EmbeddingLayer:
    """Return a layer like `layer`, on device `meta`, whose single ids are read unpooled.

    Call it before optimizers are fused and tables sharded.

    Raises:
        ValueError: no table is read by single ids alone.
    """
    tables = single_id_tables(layer.schema)
    if not tables:
        raise ValueError(
            "sharding.unpool_ids: has no effect, no table is read by single ids alone; remove it"
        )
    return EmbeddingLayer(layer.schema, torch.device("meta"), layer.seed, by_id=tables)

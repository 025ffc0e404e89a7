# SPDX-License-Identifier: MIT
"""Which features share a lookup and its exchanges, and which ids travel once.

Features share without being told. All pooled tables stand in one EmbeddingBagCollection (those that
are read with weights in a second), and those that keep one vector per id in one EmbeddingCollection
a width; TorchRec puts the tables of a
collection that a plan shards alike into one kernel a rank (where optimizer settings agree) and
their ids and vectors into one exchange. So a step costs a lookup and an exchange a collection and
kind of sharding, however many features there are: `embeddings/counters.py` counts that.

What can be chosen is how tables of single ids are read. Pooled, every id travels and a vector comes
back for each; a row-wise table sends a partial sum, mostly zeros, from every rank. Unpooled, as
sequences are read, only the rank that has a row answers, and ids can be sent once a batch, rank and
feature, with one vector back for each. One vector per id is all that a single id needs, so results
are the same, bit for bit. Bags stay pooled: their vectors are fewer than their ids.

Shapes: R ranks.
"""

from __future__ import annotations

import torch

from embeddings.collection import EmbeddingLayer
from embeddings.schema import Schema


def single_id_tables(schema: Schema) -> frozenset[str]:
    """Return the tables that nothing but single ids reads; dynamic ones are unpooled anyway."""
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

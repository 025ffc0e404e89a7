# SPDX-License-Identifier: MIT
"""Which features share a lookup and its exchanges, and which ids travel once.

Features share without being told. All pooled tables stand in one EmbeddingBagCollection (those that
are read with weights in a second), and those that keep one vector per id in one EmbeddingCollection
a width; TorchRec puts the tables of a
collection that a plan shards alike into one kernel a rank (where optimizer settings agree) and
their ids and vectors into one exchange. So a step costs a lookup and an exchange a collection and
kind of sharding, however many features there are: `embeddings/sharding/counters.py` counts that.

What can be chosen is how tables of single ids are read. Pooled, every id travels and a vector comes
back for each; a row-wise table sends a partial sum, mostly zeros, from every rank. Unpooled, as
sequences are read, only the rank that has a row answers, and ids can be sent once a batch, rank and
feature, with one vector back for each. One vector per id is all that a single id needs, so results
are the same, bit for bit. Bags stay pooled: their vectors are fewer than their ids. To a dynamic
table the number of occurrences goes with each id, so that what it counts is what the batch holds.

Shapes: R ranks, F features of B examples, N ids, U different ones of a feature.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer
from embeddings.schema.schema import Schema


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


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the same ids without weights; nothing is copied."""
    if features.weights_or_none() is None:
        return features
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        stride=features.stride(),
        # Known to the batch from then on, so that no collection asks the device again.
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )


def unique_ids(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor, Tensor]:
    """Return each feature's ids once, where among them each of N values is, how often each came.

    Which of the B lists an id comes to lie in has no meaning: they are spread evenly.

    Returns:
        The U ids, (N,) positions and (U,) counts, int64.
    """
    size = features.stride()
    lengths_FB = features.lengths().view(-1, size).long()
    values = features.values()
    owner = torch.arange(lengths_FB.shape[0], device=values.device)
    owner = owner.repeat_interleave(lengths_FB.sum(1))
    low, high = map(int, values.aminmax()) if values.numel() else (0, 0)
    span, ids = high - low + 1, None
    if span * lengths_FB.shape[0] >= 2**63:  # ids of all 64 bits: number them first
        ids, values = torch.unique(values, return_inverse=True)
        low, span = 0, len(ids)
    # Ids that no table has stay what they are, negative ones too, for the lookup to refuse.
    both, reverse, often = torch.unique(
        owner * span + (values - low), return_inverse=True, return_counts=True
    )
    found = both % span + low if ids is None else ids[both % span]
    counts = torch.bincount(both // span, minlength=lengths_FB.shape[0])
    spread = counts[:, None] // size + (
        torch.arange(size, device=values.device) < counts[:, None] % size
    )
    unique = KeyedJaggedTensor(
        keys=features.keys(),
        values=found.to(features.values().dtype),
        lengths=spread.flatten().to(features.lengths().dtype),
    )
    return unique, reverse, often

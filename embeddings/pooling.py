# SPDX-License-Identifier: MIT
"""Combine the outputs of a layer's collections into pooled vectors and sequences.

Most bags arrive pooled. Bags of a table that keeps one vector per id (one that a sequence reads, or
a dynamic one) are pooled here, after the exchange; their weights never travel.

Shapes: B examples, P sum of the widths of pooled features, N values of a feature in a batch, D
width of a table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embeddings.schema.schema import Schema, SparseFeature


class Embeddings(NamedTuple):
    """Looked-up vectors of B examples.

    Attributes:
        pooled: (B, P) float32, the vectors of the features of kind `id` and `bag` side by side, in
          the schema's order (`EmbeddingLayer.pooled_names` and `pooled_dims`).
        sequences: per feature of kind `sequence`, (N, D) float32 values and the lengths of B lists.
    """

    pooled: Tensor
    sequences: dict[str, JaggedTensor]


class Assemble(nn.Module):
    """Combine the collections' outputs; a leaf of the pipeline's tracer, so it may branch."""

    def __init__(self, schema: Schema, in_collections: Collection[str]) -> None:
        super().__init__()
        self._pooled = [f for f in schema.sparse if f.kind != "sequence"]
        self._sequences = [f.name for f in schema.sparse if f.kind == "sequence"]
        self._from_rows = [f for f in self._pooled if f.table in in_collections]
        self._names = [f.name for f in self._pooled]

    def forward(
        self,
        bags: list[KeyedTensor],
        rows: list[dict[str, JaggedTensor]],
        features: KeyedJaggedTensor,
    ) -> Embeddings:
        """Return the `Embeddings` of a batch.

        Args:
            bags: pooled vectors, (B, sum of widths) a collection.
            rows: jagged vectors by feature, (N, D) each, a dictionary a collection.
            features: what was looked up, for the weights of bags that are pooled here.
        """
        jagged: dict[str, JaggedTensor] = {}
        for collection in rows:
            jagged.update(collection.items())
        sequences = {name: jagged[name] for name in self._sequences}
        if len(bags) == 1 and not self._from_rows and bags[0].keys() == self._names:
            return Embeddings(bags[0].values(), sequences)
        parts: dict[str, Tensor] = {}
        for pooled in bags:
            widths = pooled.length_per_key()
            parts |= dict(zip(pooled.keys(), pooled.values().split(widths, dim=1), strict=True))
        for feature in self._from_rows:
            weights = features[feature.name].weights() if feature.weights else None
            parts[feature.name] = pool(jagged[feature.name], feature, weights)
        if not parts:
            any_values = sequences[self._sequences[0]]
            return Embeddings(
                any_values.values().new_zeros(any_values.lengths().numel(), 0), sequences
            )
        return Embeddings(torch.cat([parts[name] for name in self._names], dim=1), sequences)


def pool(rows: JaggedTensor, feature: SparseFeature, weights: Tensor | None = None) -> Tensor:
    """Reduce the rows of an `id` or `bag` feature to (B, D); an empty list gives zeros.

    Args:
        rows: (N, D) values in B lists.
        feature: says how to pool.
        weights: (N,), one an id, the division of a mean included.
    """
    if feature.kind == "id":
        return rows.values()  # exactly one value an example
    lengths, vectors = rows.lengths(), rows.values()  # (B,), (N, D)
    if weights is not None:
        vectors = vectors * weights[:, None]
    total = torch.segment_reduce(vectors, "sum", lengths=lengths.long(), unsafe=True)  # (B, D)
    if feature.pooling == "sum" or weights is not None:
        return total
    return total / lengths.clamp(min=1).unsqueeze(1)

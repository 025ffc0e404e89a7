# SPDX-License-Identifier: MIT
"""The smallest ranking model with every kind of feature, and batches for it.

Tables: `item` is shared by a single id and a sequence, `user` has a single id, `tag` a bag,
`action` a second sequence aligned with the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer, Embeddings
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from models.batch import Batch

SCHEMA = Schema(
    tables=(
        Table(name="user", num_embeddings=50, embedding_dim=8, init_std=0.1),
        Table(name="item", num_embeddings=60, embedding_dim=16, init_std=0.1),
        Table(name="tag", num_embeddings=20, embedding_dim=4, init_std=0.1),
        Table(name="action", num_embeddings=5, embedding_dim=8, init_std=0.1),
    ),
    sparse=(
        SparseFeature(name="item", table="item", side="item"),
        SparseFeature(name="user", table="user"),
        SparseFeature(name="tags", table="tag", kind="bag", max_length=4, pooling="mean"),
        SparseFeature(
            name="clicks", table="item", kind="sequence", max_length=6, history="clicked"
        ),
        SparseFeature(
            name="acts", table="action", kind="sequence", max_length=6, history="clicked"
        ),
    ),
    labels=(Label(name="click"),),
)


class Output(NamedTuple):
    """Predictions (B, 1) and the weight that the loss is a mean over."""

    logits: Tensor
    weight_sum: Tensor


class TinyTokenizer(nn.Module):
    """(B, 28) pooled features beside summed (16 + 8) histories."""

    def forward(self, embeddings: Embeddings, dense: Tensor) -> Tensor:
        sums = [
            torch.segment_reduce(rows.values().float(), "sum", offsets=rows.offsets(), unsafe=True)
            for rows in embeddings.sequences.values()
        ]
        return torch.cat([embeddings.pooled.float(), *sums, dense], dim=1)


class TinyRanker(nn.Module):
    """A model as the trainer expects it: embeddings, tokenizer, the rest."""

    def __init__(self, device: torch.device | None = None, schema: Schema = SCHEMA) -> None:
        super().__init__()
        self.embeddings = EmbeddingLayer(schema, device)
        self.tokenizer = TinyTokenizer()
        self.rest = TinyRest()

    def forward(self, batch: Batch) -> tuple[Tensor, Output]:
        tokens = self.tokenizer(self.embeddings(batch.sparse), batch.dense)
        return self.rest(tokens, batch)


class TinyRest(nn.Module):
    """Two layers and a weighted mean of the binary cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(54, 12)
        self.out = nn.Linear(12, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor, batch: Batch) -> tuple[Tensor, Output]:
        logits = self.out(torch.tanh(self.hidden(tokens))).float()
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, batch.weights, reduction="sum"
        )
        weight_sum = batch.weights.sum()
        return losses / weight_sum.clamp(min=1e-12), Output(logits, weight_sum)


def make_batch(num_examples: int, seed: int, first: int = 0, last: int | None = None) -> Batch:
    """Return examples `first` to `last` - 1 of a random batch of `num_examples`."""
    generator = torch.Generator().manual_seed(seed)
    chosen = slice(first, num_examples if last is None else last)

    def draw(high: int, size: int) -> Tensor:
        return torch.randint(0, high, (size,), generator=generator)

    tag_lengths, lengths = draw(5, num_examples), draw(7, num_examples)
    lists: list[tuple[Tensor, ...]] = []
    for high, sizes in (
        (60, torch.ones(num_examples, dtype=torch.int64)),
        (50, torch.ones(num_examples, dtype=torch.int64)),
        (20, tag_lengths),
        (60, lengths),
        (5, lengths),
    ):
        lists.append(draw(high, int(sizes.sum())).split(sizes.tolist())[chosen])
    dense = torch.randn(num_examples, 2, generator=generator)
    labels = draw(2, num_examples).float()[:, None]
    weights = torch.rand(num_examples, 1, generator=generator) + 0.5
    kept = len(lists[0])
    return Batch(
        sparse=KeyedJaggedTensor(
            keys=[feature.name for feature in SCHEMA.sparse],
            values=torch.cat([values for lists_of_key in lists for values in lists_of_key]),
            lengths=torch.tensor([len(v) for lists_of_key in lists for v in lists_of_key]),
        ),
        dense=dense[chosen],
        labels=labels[chosen],
        weights=weights[chosen],
        groups=torch.zeros(kept, dtype=torch.int64),
        actions=torch.empty(0, dtype=torch.int64),
    )

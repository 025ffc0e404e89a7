# SPDX-License-Identifier: MIT
"""The ranking model: tables -> tokens -> tower -> head -> (loss, predictions).

`RankingModel.forward` is straight-line on purpose: TorchRec's pipeline FX-traces the module that
owns sharded tables, so every branch lives in a child (tokenizer, tower, objective), which the
tracer treats as a leaf.

Shapes: B examples, K tasks, N events of all histories, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embeddings.collection import EmbeddingLayer
from embeddings.schema.schema import Schema
from models.batch import Batch
from models.heads import HeadConfig
from models.losses import TaskLoss, action_classes, action_cross_entropy, task_logits
from models.stream import UserOutputs
from models.tokens import FieldTokenizer, StreamTokenizer, TokenizerConfig
from models.tower import StreamTowerConfig, TowerConfig
from models.towers.specformer import SpecFormerConfig


class Predictions(NamedTuple):
    """Output of a step for the metrics.

    Args:
        probabilities: (B, K) float32.
        labels: (B, K) float32.
        weights: (B, K) float32.
        groups: (B,) int64.
        weight_sum: 0-d sum of weights that the loss was averaged over.
        num_examples: number of leading examples that are not padding.
    """

    probabilities: Tensor
    labels: Tensor
    weights: Tensor
    groups: Tensor
    weight_sum: Tensor
    num_examples: int


def _predictions(probabilities: Tensor, weight_sum: Tensor, batch: Batch) -> Predictions:
    """Combine (B, K) probabilities with the labels and weights of the batch."""
    return Predictions(
        probabilities=probabilities.detach(),
        labels=batch.labels,
        weights=batch.weights,
        groups=batch.groups,
        weight_sum=weight_sum,
        num_examples=batch.num_examples,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Tower, tokenizer and head of a ranking model."""

    tower: TowerConfig = field(default_factory=SpecFormerConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    head: HeadConfig = field(default_factory=HeadConfig)


class ImpressionObjective(nn.Module):
    """Binary cross-entropy of K tasks on the example's own item.

    Args:
        head: from (B, D) to (B, K) logits.
        task_loss: of the logits; the plain weighted mean if None.
    """

    def __init__(self, head: nn.Module, task_loss: TaskLoss | None = None) -> None:
        super().__init__()
        self.head = head
        self.task_loss = task_loss or TaskLoss(0)

    def forward(self, representation: Tensor, batch: Batch) -> tuple[Tensor, Predictions]:
        """Map a representation (B, D), or target tokens (B, 1, D), to (loss, predictions)."""
        if representation.dim() == 3:
            representation = representation[:, 0]
        logits = self.head(representation).float()
        loss, weight_sum = self.task_loss(logits, batch.labels, batch.weights)
        return loss, _predictions(logits.sigmoid(), weight_sum, batch)


class UserCentricObjective(nn.Module):
    """Softmax over action classes at every item position (TokenFormer's user-centric mode).

    Equations 20-21. A class is the bit pattern of the K labels, so a task's probability is the sum
    over the classes that have its bit. Past events are supervised by the actions of the log; the
    example's own item by its labels. An item with an absent label, or padding, has weight 0.
    """

    def __init__(self, head: nn.Module, num_labels: int) -> None:
        super().__init__()
        self.head = head
        self.num_labels = num_labels

    def forward(self, outputs: UserOutputs, batch: Batch) -> tuple[Tensor, Predictions]:
        """Map outputs at M past items and B own items to (loss, predictions)."""
        num_items = outputs.items.shape[0]
        logits = self.head(torch.cat([outputs.items, outputs.targets[:, 0]])).float()
        classes = torch.cat([batch.actions[outputs.events], action_classes(batch.labels)])
        weights = torch.cat([batch.weights.new_ones(num_items), batch.weights.amin(1)])
        loss, weight_sum = action_cross_entropy(logits, classes, weights)
        own = task_logits(logits[num_items:], self.num_labels)
        return loss, _predictions(own.sigmoid(), weight_sum, batch)


class RankingModel(nn.Module):
    """A whole model on one device. Distribution is applied from outside.

    Attributes: embeddings (the tables), tokenizer, tower, objective.

    Args:
        schema: tables, features, labels.
        config: tokenizer, tower, head.
        table_device: device of the tables; `meta` to allocate nothing until they are sharded.
        seed: seed of the tables' rows; torch's initial seed if None.

    Raises:
        ValueError: the tower does not fit the schema.
    """

    def __init__(
        self,
        schema: Schema,
        config: ModelConfig,
        table_device: torch.device | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        num_labels = len(schema.labels)
        self.embeddings = EmbeddingLayer(schema, table_device, seed)
        user_centric = (
            isinstance(config.tower, StreamTowerConfig) and config.tower.learns_from_history
        )
        if user_centric and not schema.history_actions:
            raise ValueError(
                "model.tower.mode: 'user_centric' learns from the action on every past event, the "
                "schema has no history_actions; declare that column, or use mode 'impression'"
            )
        if isinstance(config.tower, StreamTowerConfig):
            self.tokenizer = StreamTokenizer(schema, config.tokenizer)
            # An action token has one class per bit pattern of the labels.
            num_actions = 2**num_labels if schema.history_actions else 0
            tower = replace(config.tower, num_actions=num_actions)
            self.tower = tower.build(self.tokenizer.num_fields, self.tokenizer.token_dim)
        else:
            self.tokenizer = FieldTokenizer(schema, config.tokenizer)
            self.tower = config.tower.build(self.tokenizer.num_tokens, self.tokenizer.token_dim)
        if user_centric:
            config.head.check_classes()
            head = config.head.build(self.tower.output_dim, 2**num_labels)
            self.objective = UserCentricObjective(head, num_labels)
        else:
            head = config.head.build(self.tower.output_dim, num_labels)
            self.objective = ImpressionObjective(head, config.head.build_loss(num_labels))

    def forward(self, batch: Batch) -> tuple[Tensor, Predictions]:
        """Return the local weighted mean loss (0-d) and predictions of a batch of B examples."""
        embeddings = self.embeddings(batch.sparse)
        tokens = self.tokenizer(embeddings, batch.dense, batch.actions)
        representation = self.tower(tokens)
        return self.objective(representation, batch)

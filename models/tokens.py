# SPDX-License-Identifier: MIT
"""From embeddings and dense features to tokens: what stands between the tables and a tower.

Two tokenizers share their parts. `FieldTokenizer` makes (B, T, D) tokens for towers without a
sequence of their own (SpecFormer, RankElastor, DLRM): one token a field, as SpecFormer's reading A
(token width a multiple of the number of fields, one token a field), or T equal slices of the
concatenated embeddings (SpecFormer equation 2); a history becomes extra tokens by pooling.
`StreamTokenizer` makes TokenFormer's stream: static fields, jagged events and target items.

Shapes: B examples, F fields (sparse features that are no sequence, then dense columns), C dense
columns, N events of all histories, L events of one, D token width, E width of a field's embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from embeddings.collection import Embeddings
from embeddings.schema.plain import suggest
from embeddings.schema.schema import Schema, SparseFeature
from models.fields import (
    DenseExpansion,
    FieldColumns,
    FieldDropout,
    FieldProjection,
    ProjectionConfig,
)
from models.stream import Stream


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How features become tokens.

    Args:
        token_dim: D.
        num_tokens: 0 for one token a field, else the T slices that all fields' embeddings are cut
            into.
        dense_dim: width that a dense column is expanded to before projection.
        history_pooling: the tokens a history adds for towers that read no stream, in order: `mean`,
            `last` (newest event), `attention` (events weighted by their match with the item).
        target_fields: what a stream's target token is made of: the `item`'s fields, or `all` fields
            of the example. No effect on towers that read no stream.
        stream_fields: names of the context fields that are tokens of a stream; empty: all of them.
        projection: how fields or slices become tokens. No effect on streams.
        field_dropout: probability that the whole vector of a sparse field is zero for an example of
            training; events of histories are kept. It helps with ids that training has not seen.
        field_dropout_rates: own probabilities of single fields, by name, in place of field_dropout.
    """

    token_dim: int = 32
    num_tokens: int = 0
    dense_dim: int = 8
    history_pooling: tuple[Literal["mean", "last", "attention"], ...] = (
        "mean",
        "last",
        "attention",
    )
    target_fields: Literal["item", "all"] = "item"
    stream_fields: tuple[str, ...] = ()
    projection: ProjectionConfig = field(default_factory=ProjectionConfig)
    field_dropout: float = 0.0
    field_dropout_rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the tokenizer's own fields."""
        rates = {"field_dropout": self.field_dropout}
        rates |= {f"field_dropout_rates {key}": v for key, v in self.field_dropout_rates.items()}
        for name, rate in rates.items():
            if not 0 <= rate < 1:
                raise ValueError(f"model.tokenizer.{name}: must be in [0, 1), got {rate}")
        if self.token_dim < 1 or self.num_tokens < 0 or self.dense_dim < 1:
            raise ValueError(
                "model.tokenizer: token_dim and dense_dim must be positive and num_tokens not "
                f"negative, got token_dim={self.token_dim}, dense_dim={self.dense_dim}, "
                f"num_tokens={self.num_tokens}"
            )


class Events(nn.Module):
    """Turn the aligned sequences of one history into one D-wide vector an event.

    Args:
        num_actions: classes of the action on each event, whose vector is added; 0 for a history
            without.
    """

    def __init__(
        self,
        features: tuple[SparseFeature, ...],
        widths: list[int],
        token_dim: int,
        num_actions: int = 0,
    ) -> None:
        super().__init__()
        self.names = [feature.name for feature in features]
        self.max_length = max(feature.max_length for feature in features)
        self.project = nn.Linear(sum(widths), token_dim)
        self.action = nn.Embedding(num_actions, token_dim) if num_actions else None
        if self.action is not None:
            nn.init.normal_(self.action.weight, std=0.1)

    def forward(self, sequences: dict[str, JaggedTensor], actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return events (N, D), oldest first in each example, and offsets (B + 1,).

        Raises:
            ValueError: the history's sequences, or its actions, differ in length.
        """
        counts = {name: len(sequences[name].values()) for name in self.names}
        if self.action is not None:
            counts["actions"] = len(actions)
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"model.tokenizer: sequences of one history have one value an event each, got "
                f"{counts} values; give columns of other lengths a history of their own"
            )
        # (N, sum of widths)
        values = torch.cat([sequences[name].values() for name in self.names], dim=1)
        events = self.project(values)
        if self.action is not None:
            events = events + self.action(actions)
        return events, sequences[self.names[0]].offsets()


class HistoryPooling(nn.Module):
    """Summarise a history in one token a pooling kind. An empty history gives zeros.

    `attention` scores every event by a scaled dot product with a query made from the item's fields
    (with a learned query where a schema has no item), so that the summary depends on what is
    ranked.
    """

    def __init__(self, config: TokenizerConfig, query_dim: int) -> None:
        super().__init__()
        self.kinds = config.history_pooling
        width = config.token_dim
        if "attention" in self.kinds:
            self.query = nn.Linear(query_dim, width) if query_dim else None
            self.default_query = None if query_dim else nn.Parameter(torch.zeros(1, width))
            self.key = nn.Linear(width, width, bias=False)

    def forward(self, events: Tensor, offsets: Tensor, item: Tensor, max_length: int) -> Tensor:
        """Map events (N, D) of B histories and item fields (B, Q) to (B, kinds, D)."""
        # (B, L, D)
        padded = torch.ops.fbgemm.jagged_to_padded_dense(events, [offsets], [max_length], 0.0)
        lengths = (offsets[1:] - offsets[:-1]).clamp(max=max_length)
        present = torch.arange(max_length, device=events.device) < lengths[:, None]  # (B, L)
        summaries = []
        for kind in self.kinds:
            if kind == "mean":
                summaries.append(padded.sum(1) / lengths.clamp(min=1)[:, None])
            elif kind == "last":
                newest = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, padded.shape[2])
                summaries.append(padded.gather(1, newest).squeeze(1))
            else:
                query = self.default_query if self.query is None else self.query(item)
                assert query is not None
                scores = (self.key(padded) * query[:, None]).sum(-1) * padded.shape[2] ** -0.5
                # (B, L)
                scores = scores.float().masked_fill(~present, -1e9).softmax(1)
                weights = (scores * present).to(padded.dtype)
                summaries.append((weights[..., None] * padded).sum(1))
        return torch.stack(summaries, 1)  # (B, kinds, D)


class FieldTokenizer(nn.Module):
    """Make (B, T, D) tokens: fields (or slices of them), then the summaries of each history.

    Attributes: num_tokens (T), token_dim (D), token_names (one name a token, for diagnostics).
    """

    def __init__(self, schema: Schema, config: TokenizerConfig) -> None:
        super().__init__()
        names, widths, item_columns = _fields(schema, config, item=None)
        self.token_dim = config.token_dim
        self.dense = _dense(schema, config)
        self.dropout = _dropout(schema, config)
        self.columns = FieldColumns(widths, config.num_tokens, config.projection.field_dim)
        if config.num_tokens:
            names = [f"slice_{index}" for index in range(config.num_tokens)]
        self.fields = config.projection.build(self.columns.widths, config.token_dim)
        self.events, self.pooling = nn.ModuleList(), nn.ModuleList()
        acted = next((name for name in schema.histories if name in schema.history_actions), "")
        if config.history_pooling:
            for history, features in schema.histories.items():
                dims = [schema.table(feature.table).embedding_dim for feature in features]
                # A batch holds the actions of the first history that has them.
                classes = 2 ** len(schema.labels) if history == acted else 0
                self.events.append(Events(features, dims, config.token_dim, classes))
                self.pooling.append(HistoryPooling(config, len(item_columns)))
                names = [*names, *(f"{history}_{kind}" for kind in config.history_pooling)]
        self.item_columns: Tensor
        self.register_buffer(
            "item_columns", torch.tensor(item_columns, dtype=torch.int64), persistent=False
        )
        self.token_names = tuple(names)
        self.num_tokens = len(names)

    def forward(self, embeddings: Embeddings, dense: Tensor, actions: Tensor) -> Tensor:
        """Map pooled embeddings, jagged sequences and dense (B, C) to tokens (B, T, D)."""
        pooled = self.dropout(embeddings.pooled)
        item = pooled.index_select(1, self.item_columns)
        if self.dense is not None:
            pooled = torch.cat([pooled, self.dense(dense).flatten(1).to(pooled.dtype)], 1)
        tokens = [self.fields(self.columns(pooled))]
        for events, pooling in zip(self.events, self.pooling, strict=True):
            values, offsets = events(embeddings.sequences, actions)
            tokens.append(pooling(values, offsets, item, events.max_length))
        return torch.cat(tokens, 1)


class StreamTokenizer(nn.Module):
    """Make TokenFormer's stream: context fields, one history's events, the item as one target.

    Attributes: num_fields (F), token_dim (D), token_names (the fields' names).
    """

    def __init__(self, schema: Schema, config: TokenizerConfig) -> None:
        super().__init__()
        if len(schema.histories) > 1:
            raise ValueError(
                "model.tower: a stream holds one history, the schema has "
                f"{sorted(schema.histories)}; keep one, or rank with a tower that reads fields"
            )
        names, widths, item_columns = _fields(schema, config, item=False)
        unknown = sorted(set(config.stream_fields) - set(names))
        if unknown:
            raise ValueError(
                f"model.tokenizer.stream_fields: {unknown[0]!r} is no context field"
                f"{suggest(unknown[0], names)}; context fields: {names}"
            )
        self.token_dim = config.token_dim
        self.dense = _dense(schema, config)
        self.dropout = _dropout(schema, config)
        kept = [i for i, name in enumerate(names) if name in (config.stream_fields or names)]
        self.fields = FieldProjection([widths[i] for i in kept], config.token_dim)
        starts = [sum(widths[:i]) for i in range(len(widths))]
        stream_columns = [starts[i] + column for i in kept for column in range(widths[i])]
        self.token_names = tuple(names[i] for i in kept)
        self.num_fields = len(kept)
        self.events: Events | None = None
        for features in schema.histories.values():
            dims = [schema.table(feature.table).embedding_dim for feature in features]
            self.events = Events(features, dims, config.token_dim)
        self.has_actions = bool(schema.history_actions)
        self.all_fields = config.target_fields == "all"
        target_width = len(item_columns) + (sum(widths) if self.all_fields else 0)
        self.target = nn.Linear(target_width, config.token_dim) if target_width else None
        self.default_target = (
            None if target_width else nn.Parameter(torch.randn(1, 1, config.token_dim) * 0.1)
        )
        pooled_width = sum(_width(schema, f) for f in schema.sparse if f.kind != "sequence")
        context = [column for column in range(pooled_width) if column not in set(item_columns)]
        self.item_columns: Tensor
        self.context_columns: Tensor
        self.stream_columns: Tensor
        columns = {"item": item_columns, "context": context, "stream": stream_columns}
        for name, values in columns.items():
            tensor = torch.tensor(values, dtype=torch.int64)
            self.register_buffer(f"{name}_columns", tensor, persistent=False)

    def forward(self, embeddings: Embeddings, dense: Tensor, actions: Tensor) -> Stream:
        """Map pooled embeddings, jagged sequences, dense (B, C) and actions (N,) to a Stream."""
        pooled = self.dropout(embeddings.pooled)
        batch_size = pooled.shape[0]
        fields = pooled.index_select(1, self.context_columns)
        if self.dense is not None:
            fields = torch.cat([fields, self.dense(dense).flatten(1).to(fields.dtype)], 1)
        if self.target is None:
            assert self.default_target is not None
            targets = self.default_target.expand(batch_size, -1, -1)
        else:
            item = pooled.index_select(1, self.item_columns)
            targets = self.target(torch.cat([item, fields], 1) if self.all_fields else item)
            targets = targets[:, None]
        if self.events is None:
            events = pooled.new_zeros(0, self.token_dim)
            offsets = torch.zeros(batch_size + 1, dtype=torch.int64, device=pooled.device)
        else:
            events, offsets = self.events(embeddings.sequences, actions)
        fields = self.fields(fields.index_select(1, self.stream_columns))
        return Stream(fields, events, offsets, actions if self.has_actions else None, targets)


def _dense(schema: Schema, config: TokenizerConfig) -> DenseExpansion | None:
    """Return what expands the schema's dense columns, or None where it has none."""
    standardized = [feature.standardize for feature in schema.dense]
    return DenseExpansion(standardized, config.dense_dim) if standardized else None


def _dropout(schema: Schema, config: TokenizerConfig) -> FieldDropout:
    """Return what drops the vectors of the schema's sparse fields."""
    pooled = [feature for feature in schema.sparse if feature.kind != "sequence"]
    names, widths = [one.name for one in pooled], [_width(schema, one) for one in pooled]
    for name in config.field_dropout_rates:
        if name not in names:
            raise ValueError(
                f"model.tokenizer.field_dropout_rates: no sparse field {name!r}"
                f"{suggest(name, names)}; fields: {names}"
            )
    return FieldDropout(names, widths, config.field_dropout, config.field_dropout_rates)


def _width(schema: Schema, feature: SparseFeature) -> int:
    return schema.table(feature.table).embedding_dim


def _fields(
    schema: Schema, config: TokenizerConfig, item: bool | None
) -> tuple[list[str], list[int], list[int]]:
    """Return names and widths of the fields and the pooled columns of the item's features.

    item=False leaves the item's features out of the fields; None keeps them in.
    """
    names, widths, item_columns, start = [], [], [], 0
    for feature in schema.sparse:
        if feature.kind == "sequence":
            continue
        width = _width(schema, feature)
        if feature.side == "item":
            item_columns += range(start, start + width)
        if item is None or feature.side != "item":
            names.append(feature.name)
            widths.append(width)
        start += width
    names += [feature.name for feature in schema.dense]
    widths += [config.dense_dim] * len(schema.dense)
    if not widths:
        needed = "a stream needs at least one context field (a sparse feature with side 'context',"
        if item is None:
            needed = "a tower of fields needs at least one (a sparse feature that is no sequence,"
        raise ValueError(f"schema: {needed} or a dense column), got none")
    return names, widths, item_columns

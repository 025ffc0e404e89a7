# SPDX-License-Identifier: MIT
"""Field parts of tokenizers: numbers to vectors, vectors dropped, vectors to tokens.

Every field (or slice) has its own projection matrix, or all share the multi-layer perceptron that
RankElastor's released code puts before its blocks: one for all slices on Criteo, one from all
columns to all tokens on Avazu. Factorization machines and their kin read embeddings as they are.

Shapes: B examples, F fields, T tokens, C dense columns, E width of a field's vector, S sum of the
fields' widths, D token width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from models.layers import RMS_EPS, GainRMSNorm, PerTokenLinear, check_choices, xavier_linear


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig:
    """Projection of fields, or of slices of them, to tokens.

    Args:
        kind: `own`, one matrix per field; `shared_mlp`, one perceptron for all; `joint_mlp`, one
            perceptron from all columns to all tokens; `none`, fields are tokens as they are.
        hidden: hidden units of the perceptron.
        dropout: probability of dropout after the hidden units.
        field_dim: number of leading columns of every field that are read; 0 for all. It allows
            widths that lookup kernels do not support (not a multiple of 4).
    """

    kind: Literal["own", "shared_mlp", "joint_mlp", "none"] = "own"
    hidden: int = 0
    dropout: float = 0.0
    field_dim: int = 0

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        check_choices(self, "model.tokenizer.projection")
        own = self.kind in ("own", "none")
        if (self.hidden != 0 or self.dropout != 0) if own else self.hidden < 1:
            expected = "0 (no perceptron)" if own else "hidden of at least 1"
            raise ValueError(
                f"model.tokenizer.projection: kind {self.kind!r} takes {expected}, got "
                f"hidden={self.hidden} and dropout={self.dropout}"
            )
        if not 0 <= self.dropout < 1 or self.field_dim < 0:
            raise ValueError(
                "model.tokenizer.projection: dropout must be in [0, 1) and field_dim not negative, "
                f"got {self.dropout} and {self.field_dim}"
            )

    def build(self, widths: list[int], token_dim: int) -> nn.Module:
        """Return the module from fields or slices of these widths, concatenated, to (B, T, D).

        Raises:
            ValueError: `shared_mlp` is to read fields of different widths, or `none` fields whose
                widths are not that of a token.
        """
        if self.kind == "none":
            if set(widths) != {token_dim}:
                raise ValueError(
                    "model.tokenizer.projection: 'none' makes tokens of fields as they are, so "
                    f"every field needs token_dim = {token_dim} columns, the fields have "
                    f"{sorted(set(widths))}; change embedding_dim, dense_dim or token_dim, or read "
                    "the first columns alone (projection.field_dim)"
                )
            return nn.Unflatten(1, (len(widths), token_dim))
        if self.kind == "own":
            return FieldProjection(widths, token_dim)
        if self.kind == "joint_mlp":
            return JointProjection(self, sum(widths), len(widths), token_dim)
        if len(set(widths)) > 1:
            raise ValueError(
                "model.tokenizer.projection: 'shared_mlp' reads slices of one width, the fields "
                f"have widths {sorted(set(widths))}; set num_tokens, which cuts them into equal "
                "slices"
            )
        return SharedProjection(self, sum(widths), len(widths), token_dim)


class DenseExpansion(nn.Module):
    """Expand C numbers to vectors: x * w + b, or the column's own vector where x is missing.

    Args:
        standardized: per column, whether it is replaced by (x - mean) / std. `standardize` sets
            the statistics; until then the column is unchanged.
        dense_dim: width of a column's vector.
    """

    def __init__(self, standardized: Sequence[bool], dense_dim: int) -> None:
        super().__init__()
        num_columns = len(standardized)
        self.weight = nn.Parameter(torch.empty(num_columns, dense_dim).normal_(std=0.1))
        self.bias = nn.Parameter(torch.zeros(num_columns, dense_dim))
        self.missing = nn.Parameter(torch.zeros(num_columns, dense_dim))
        self.standardized = tuple(standardized)
        self.mean: Tensor | None
        self.std: Tensor | None
        statistics = any(standardized)
        self.register_buffer("mean", torch.zeros(num_columns) if statistics else None)
        self.register_buffer("std", torch.ones(num_columns) if statistics else None)

    def standardize(self, mean: Tensor, std: Tensor) -> None:
        """Set the statistics of the standardized columns.

        A column without values (its mean is NaN) or with deviation 0 keeps the scale 1.

        Args:
            mean: (C,).
            std: (C,).
        """
        if self.mean is None or self.std is None:
            return
        chosen = torch.tensor(self.standardized, device=mean.device)
        mean, std = mean.nan_to_num(), torch.where(std > 0, std, torch.ones_like(std))
        self.mean.copy_(torch.where(chosen, mean, torch.zeros_like(mean)))
        self.std.copy_(torch.where(chosen, std, torch.ones_like(std)))

    def forward(self, dense: Tensor) -> Tensor:
        """Map (B, C) numbers, NaN where missing, to (B, C, dense_dim)."""
        if self.mean is not None and self.std is not None:
            dense = (dense - self.mean) / self.std
        absent = dense.isnan()
        values = torch.where(absent, 0.0, dense)[..., None] * self.weight + self.bias
        return torch.where(absent[..., None], self.missing, values)


class FieldDropout(nn.Module):
    """Set the whole vector of a field to zero at random while training. Nothing is rescaled.

    An id of tomorrow that training has not seen reads a row near its initial value, which is close
    to zero. A tower that never meets a missing field relies on every id, and is wrong for new ones.
    With dropped fields it learns to rank with what is left. Events of histories are untouched.

    Args:
        names: names of the F fields.
        widths: widths of their vectors; their sum is P.
        rate: probability of every field.
        rates: own probabilities of single fields by name.
    """

    rates: Tensor
    field_of_column: Tensor

    def __init__(
        self, names: Sequence[str], widths: Sequence[int], rate: float, rates: Mapping[str, float]
    ) -> None:
        super().__init__()
        chosen = [rates.get(name, rate) for name in names]
        self.active = any(chosen)
        columns = [field for field, width in enumerate(widths) for _ in range(width)]
        self.register_buffer("rates", torch.tensor(chosen), persistent=False)
        self.register_buffer(
            "field_of_column", torch.tensor(columns, dtype=torch.int64), persistent=False
        )

    def forward(self, pooled: Tensor) -> Tensor:
        """Map (B, P) to (B, P); in evaluation, and without rates, unchanged."""
        if not (self.training and self.active):
            return pooled
        batch_size, num_fields = pooled.shape[0], self.rates.shape[0]
        kept = torch.rand(batch_size, num_fields, device=pooled.device) >= self.rates  # (B, F)
        return pooled * kept.to(pooled.dtype).index_select(1, self.field_of_column)


class FieldColumns(nn.Module):
    """Choose and pad the columns that become tokens: (B, sum of widths) to (B, S).

    Attributes:
        widths: widths of the fields, or of the slices if num_tokens is not 0; their sum is S.

    Args:
        widths: widths of the fields.
        num_tokens: number of equal slices; 0 for one token per field.
        field_dim: number of leading columns of every field that are read; 0 for all.

    Raises:
        ValueError: there are fewer columns than slices.
    """

    def __init__(self, widths: list[int], num_tokens: int, field_dim: int) -> None:
        super().__init__()
        kept = [min(width, field_dim or width) for width in widths]
        starts = [sum(widths[:field]) for field in range(len(widths))]
        columns = [a + c for a, width in zip(starts, kept, strict=True) for c in range(width)]
        chosen = torch.tensor(columns, dtype=torch.int64) if kept != widths else None
        self.chosen: Tensor | None
        self.register_buffer("chosen", chosen, persistent=False)
        self.widths, self.padding = kept, 0
        if num_tokens:
            if num_tokens > sum(kept):
                raise ValueError(
                    f"model.tokenizer.num_tokens: {num_tokens} slices need as many columns, the "
                    f"fields' embeddings have {sum(kept)}; lower num_tokens or widen the tables"
                )
            self.padding = -sum(kept) % num_tokens
            self.widths = [(sum(kept) + self.padding) // num_tokens] * num_tokens

    def forward(self, concatenated: Tensor) -> Tensor:
        """Map (B, sum of widths) to (B, S)."""
        if self.chosen is not None:
            concatenated = concatenated.index_select(1, self.chosen)
        return nn.functional.pad(concatenated, (0, self.padding)) if self.padding else concatenated


class FieldProjection(nn.Module):
    """Project F fields of differing widths to D, each by its own matrix, in one batched product.

    One gather pads the fields with zeros to the width E of the widest: (B, F, E).
    """

    columns: Tensor

    def __init__(self, widths: list[int], token_dim: int) -> None:
        super().__init__()
        total, widest = sum(widths), max(widths)
        columns = torch.full((len(widths), widest), total, dtype=torch.int64)
        start = 0
        for field, width in enumerate(widths):
            columns[field, :width] = torch.arange(start, start + width)
            start += width
        self.uniform = len(set(widths)) == 1
        self.widest = widest
        self.register_buffer("columns", columns.flatten(), persistent=False)
        self.project = PerTokenLinear(len(widths), widest, token_dim)

    def forward(self, concatenated: Tensor) -> Tensor:
        """Map (B, sum of widths) to (B, F, D)."""
        if not self.uniform:
            concatenated = nn.functional.pad(concatenated, (0, 1)).index_select(1, self.columns)
        fields_BFE = concatenated.view(concatenated.shape[0], -1, self.widest)
        return self.project(fields_BFE.transpose(0, 1)).transpose(0, 1)


class SharedProjection(nn.Module):
    """Project slices of equal width to D by one perceptron for all: (B, S) to (B, T, D).

    RMSNorm of the S columns, T slices, linear, RMSNorm, ReLU, dropout, linear.
    """

    def __init__(
        self, config: ProjectionConfig, total: int, num_tokens: int, token_dim: int
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.norm = GainRMSNorm(total, eps=RMS_EPS)
        self.mlp = _perceptron(config, total // num_tokens, token_dim)

    def forward(self, concatenated: Tensor) -> Tensor:
        """Map (B, S) to (B, T, D)."""
        return self.mlp(self.norm(concatenated).unflatten(1, (self.num_tokens, -1)))


class JointProjection(nn.Module):
    """Map all columns to all tokens by one perceptron: (B, S) to (B, T, D).

    RMSNorm of the S columns, linear, RMSNorm, ReLU, dropout, linear, cut into T tokens.
    """

    def __init__(
        self, config: ProjectionConfig, total: int, num_tokens: int, token_dim: int
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.norm = GainRMSNorm(total, eps=RMS_EPS)
        self.mlp = _perceptron(config, total, num_tokens * token_dim)

    def forward(self, concatenated: Tensor) -> Tensor:
        """Map (B, S) to (B, T, D)."""
        return self.mlp(self.norm(concatenated)).unflatten(1, (self.num_tokens, -1))


def _perceptron(config: ProjectionConfig, inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        xavier_linear(inputs, config.hidden),
        GainRMSNorm(config.hidden, eps=RMS_EPS),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        xavier_linear(config.hidden, outputs),
    )

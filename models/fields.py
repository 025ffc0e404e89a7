# SPDX-License-Identifier: MIT
"""The parts of tokenizers that deal with fields: numbers to vectors, vectors to tokens.

Shapes: B examples, F fields, C dense columns, E width of a field's vector, D token width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import PerTokenLinear


class DenseExpansion(nn.Module):
    """Expand C numbers to vectors: x * w + b, or the column's own vector where x is missing."""

    def __init__(self, num_columns: int, dense_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_columns, dense_dim).normal_(std=0.1))
        self.bias = nn.Parameter(torch.zeros(num_columns, dense_dim))
        self.missing = nn.Parameter(torch.zeros(num_columns, dense_dim))

    def forward(self, dense: Tensor) -> Tensor:
        """Map (B, C) numbers, NaN where missing, to (B, C, dense_dim)."""
        absent = dense.isnan()
        values = torch.where(absent, 0.0, dense)[..., None] * self.weight + self.bias
        return torch.where(absent[..., None], self.missing, values)


class FieldProjection(nn.Module):
    """Project F fields of differing widths to D, each by its own matrix, in one batched product.

    Fields are laid into a (B, F, E) tensor of the widest field's width by one gather; the columns
    beyond a field's own width read a zero.
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

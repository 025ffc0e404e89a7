# SPDX-License-Identifier: MIT
"""Factorization machine of degree 2: weights of ids and dot products of all pairs of their vectors.

Source: Rendle, Factorization Machines, ICDM 2010, equation 1 (lemma 3.1 makes it linear in T):

    ŷ = w_0 + Σ_i w_i x_i + Σ_{i<j} ⟨v_i, v_j⟩ x_i x_j.

The tower returns the two sums, added; the head without hidden layers adds w_0. Where w_i and v_i
lie is said in `first_order.py`. The head's factor on the sum is one number more than the paper has.

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.baselines.fields.first_order import check_width, pairs, split
from models.layers import read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class FMConfig(TowerConfig):
    """A factorization machine has no settings; `model.head.hidden_units` must be ()."""

    def build(self, num_tokens: int, token_dim: int) -> FM:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return FM(num_tokens, token_dim)


class FM(Tower):
    """First and second order, added: (B, T, D) to (B, 1)."""

    def __init__(self, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        check_width(token_dim, "fm")
        self.num_tokens, self.token_dim, self.output_dim = num_tokens, token_dim, 1

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, 1) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "fm")
        first, vectors = split(tokens_BTD)
        return first + pairs(vectors)

# SPDX-License-Identifier: MIT
"""Logistic regression: a sum of weights, one an id, and nothing else.

Source: Richardson et al., Predicting Clicks, WWW 2007, section 4.1. With a head without hidden
layers

    logit = b + Σ_f w_f,

where w_f is the weight of the id that field f has, or x times the weight of a number. The tower
returns Σ_f of the fields' tokens; the head's linear map gives the logits. Tokens of width 1 are the
weights of one task; several tasks need as many columns, to have weights of their own.

The paper's regularization (a Gaussian prior on the weights) is not part of the tower. The head's
factor on the sum is one number more than the paper has; it changes no prediction that can be
reached.

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.layers import read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class LRConfig(TowerConfig):
    """Logistic regression has no settings; `model.head.hidden_units` must be ()."""

    def build(self, num_tokens: int, token_dim: int) -> LR:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return LR(num_tokens, token_dim)


class LR(Tower):
    """The sum of all tokens: (B, T, D) to (B, D)."""

    def __init__(self, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.output_dim = num_tokens, token_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, D) of (B, T, D)."""
        return read_tokens(tokens_BTD, self.num_tokens, self.output_dim, "lr").sum(1)

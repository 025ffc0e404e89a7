# SPDX-License-Identifier: MIT
"""Wide & Deep: a linear model and a deep network, whose logits are added and trained together.

Source: Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016, equation 3:

    P(y = 1 | x) = σ(w_wideᵀ [x, φ(x)] + w_deepᵀ a^(l) + b).

The tower returns [Σ_f w_f, a^(l)]; the head without hidden layers is w_deep and b. φ(x) are
products of columns that the log's owner chooses: they are features of the schema and add their
weights like any other. Where w_f lies is said in `first_order.py`; the head's factor on the sum is
one number more than the paper has. The paper trains the wide part by FTRL with L1; here all tables
have one optimizer.

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.baselines.fields.first_order import check_width, split
from models.layers import MLP, read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class WideDeepConfig(TowerConfig):
    """Wide & Deep's settings.

    Args:
        hidden_units: widths of the deep network.
        dropout: probability, in the deep network.
    """

    hidden_units: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.hidden_units:
            raise ValueError(
                "wide_deep: hidden_units needs at least one width, got (); the wide part alone is "
                "the tower 'lr'"
            )

    def build(self, num_tokens: int, token_dim: int) -> WideDeep:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return WideDeep(self, num_tokens, token_dim)


class WideDeep(Tower):
    """The sum of weights and a deep network: (B, T, D) to (B, 1 + hidden_units[-1])."""

    def __init__(self, config: WideDeepConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        check_width(token_dim, "wide_deep")
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.deep = MLP(num_tokens * (token_dim - 1), config.hidden_units, dropout=config.dropout)
        self.output_dim = 1 + self.deep.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "wide_deep")
        wide, vectors = split(tokens_BTD)
        deep = self.deep(vectors.flatten(1))
        return torch.cat([wide, deep.to(wide.dtype)], dim=1)

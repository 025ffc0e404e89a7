# SPDX-License-Identifier: MIT
"""DNN: a multi-layer perceptron over all fields' embeddings beside each other.

Source: the deep part of Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys
2016, section 4, as CTR benchmarks use it (ReLU layers, then one linear map, the head without
hidden layers). Left open: dropout (after each layer here).

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.layers import MLP, read_tokens
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class DNNConfig(TowerConfig):
    """DNN's settings.

    Args:
        hidden_units: widths of the layers.
        dropout: probability, after each layer.
    """

    hidden_units: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.hidden_units:
            raise ValueError("dnn: hidden_units needs at least one width, got ()")

    def build(self, num_tokens: int, token_dim: int) -> DNN:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        return DNN(self, num_tokens, token_dim)


class DNN(Tower):
    """A perceptron of all tokens: (B, T, D) to (B, hidden_units[-1])."""

    def __init__(self, config: DNNConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim = num_tokens, token_dim
        self.deep = MLP(num_tokens * token_dim, config.hidden_units, dropout=config.dropout)
        self.output_dim = self.deep.output_dim

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "dnn")
        return self.deep(tokens_BTD.flatten(1))

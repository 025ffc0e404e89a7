# SPDX-License-Identifier: MIT
"""Prediction heads: a tower's output to one logit a task (or a class).

Shapes: D input width, K tasks; "..." is any number of leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from models.layers import MLP, Activation, check_choices, xavier_linear


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """hidden_units: widths of the layers before the logits. dropout: probability after each."""

    hidden_units: tuple[int, ...] = (128,)
    activation: Activation = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "head")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"head: dropout must be in [0, 1), got {self.dropout}")

    def build(self, input_dim: int, num_logits: int) -> Head:
        """Return the head from (..., input_dim) to (..., num_logits)."""
        return Head(self, input_dim, num_logits)


class Head(nn.Module):
    """MLP and a linear map to the logits: (..., D) to (..., K) logits."""

    def __init__(self, config: HeadConfig, input_dim: int, num_logits: int) -> None:
        super().__init__()
        self.hidden = MLP(input_dim, config.hidden_units, config.activation, config.dropout)
        self.logits = xavier_linear(self.hidden.output_dim, num_logits)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., K) logits of (..., D)."""
        return self.logits(self.hidden(inputs))

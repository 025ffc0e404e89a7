# SPDX-License-Identifier: MIT
"""Prediction heads: a tower's output to one logit a task (or a class).

Where positives are rare, a bias that starts at 0 predicts one half for every row, and the first
steps push the whole model, tables included, towards the base rate before they tell rows apart.
`prior` starts the bias there instead.

Source: of the prior, Lin et al., Focal Loss for Dense Object Detection, 2017, section 3.3.
Shapes: D input width, K tasks; "..." is any number of leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.layers import MLP, Activation, check_choices, xavier_linear


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What stands between a tower and its logits.

    Args:
        hidden_units: widths of the layers before the logits.
        activation: after each of them.
        dropout: probability after each of them.
        prior: share of positives p whose logit the biases start at, one number a task or one for
            all; () starts them at 0.
    """

    hidden_units: tuple[int, ...] = (128,)
    activation: Activation = "relu"
    dropout: float = 0.0
    prior: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "head")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"head: dropout must be in [0, 1), got {self.dropout}")
        if not all(0 < share < 1 for share in self.prior):
            raise ValueError(
                "head: prior is a share of positives between 0 and 1 (both excluded) for each task "
                f"or for all, got {self.prior}"
            )

    def build(self, input_dim: int, num_logits: int) -> Head:
        """Return the head from (..., input_dim) to (..., num_logits).

        Raises:
            ValueError: prior has neither one number nor one for each logit.
        """
        if len(self.prior) not in (0, 1, num_logits):
            raise ValueError(
                f"head: prior needs one number, or one for each of {num_logits} logits, got "
                f"{self.prior}"
            )
        return Head(self, input_dim, num_logits)


class Head(nn.Module):
    """MLP and a linear map to the logits: (..., D) to (..., K) logits."""

    def __init__(self, config: HeadConfig, input_dim: int, num_logits: int) -> None:
        super().__init__()
        self.hidden = MLP(input_dim, config.hidden_units, config.activation, config.dropout)
        self.logits = xavier_linear(self.hidden.output_dim, num_logits)
        if config.prior:
            start = torch.tensor(config.prior).logit().expand(num_logits)
            self.logits.bias = nn.Parameter(start.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., K) logits of (..., D)."""
        return self.logits(self.hidden(inputs))

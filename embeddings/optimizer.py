# SPDX-License-Identifier: MIT
"""Row-wise optimizers of the tables, fused in backward.

A fused optimizer updates the touched rows inside backward and never holds a table's gradient. It
therefore applies whatever gradient reaches it: scaling, clipping and the decision to skip a step
have to happen before, at the boundary between tables and model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerConfig:
    """The optimizer of the tables.

    kind: `rowwise_adagrad` keeps one number a row, the running sum of the mean squared gradient (g
      the row's gradient: s += mean(g^2), row -= learning_rate * g / (sqrt(s) + eps)); `adagrad`
      keeps one a weight; `sgd` keeps none.
    eps: added to the root; without effect on `sgd`, where it must stay at its default.
    table_learning_rates: rates of single tables, by name, in place of learning_rate.
    """

    kind: Literal["rowwise_adagrad", "adagrad", "sgd"] = "rowwise_adagrad"
    learning_rate: float = 0.02
    eps: float = 1e-8
    table_learning_rates: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.kind not in _CLASSES:
            raise ValueError(f"kind: expected one of {list(_CLASSES)}, got {self.kind!r}")
        for rate in (self.learning_rate, *self.table_learning_rates.values()):
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"learning_rate: expected a number > 0, got {rate}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps: expected a number > 0, got {self.eps}")
        if self.kind == "sgd" and self.eps != type(self).eps:
            raise ValueError(
                f"eps: has no effect on kind 'sgd', got {self.eps}; remove it, or choose an Adagrad"
            )


def fuse_optimizer(layer: nn.Module, config: SparseOptimizerConfig) -> None:
    """Attach the optimizer to every weight of `layer`: from now on its backward updates them.

    Call it before the layer is sharded. Unsharded, the same optimizer runs on dense gradients.

    Args:
        layer: an EmbeddingLayer, or any module that holds only tables.
        config: which optimizer.
    """
    for name, weight in layer.named_parameters():
        table = name.split(".")[-2]
        rate = config.table_learning_rates.get(table, config.learning_rate)
        options: dict[str, Any] = {"lr": rate}
        if config.kind != "sgd":
            options["eps"] = config.eps
        _apply_optimizer_in_backward(_CLASSES[config.kind], [weight], options)

# SPDX-License-Identifier: MIT
"""Row-wise optimizers of the tables, fused in backward, and the number format of the tables.

A fused optimizer updates the touched rows inside backward and never holds a table's gradient. It
therefore applies whatever gradient reaches it: scaling, clipping and the decision to skip a step
have to come before, at the boundary between tables and model.

Tables that differ in a setting here get a kernel each; they still share one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import Adam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embeddings.lookups import lookup_modules

# Of dense weights and tables alike: torch's own defaults differ (Adagrad 1e-10, AdamW 1e-8).
DEFAULT_EPS = 1e-8

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": Adam,
}
WeightFormat = Literal["fp32", "fp16"]
_FORMATS = {"fp32": DataType.FP32, "fp16": DataType.FP16}
# Devices for which fbgemm has a fused kernel, where not for all.
_DEVICES = {"adam": ("cuda",)}


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerConfig:
    """The optimizer of the tables.

    Args:
        kind: `rowwise_adagrad` keeps one number a row, the running sum of the mean squared gradient
          (g the row's gradient: s += mean(g^2), row -= learning_rate * g / (sqrt(s) + eps));
          `adagrad` keeps one a weight; `sgd` keeps none; `adam` keeps two a weight, moves the rows
          of a batch only, and runs on GPUs only.
        learning_rate: of all tables that have none of their own.
        eps: added to the root; has no effect on `sgd`, where it must stay at its default.
        beta1: of `adam`; must stay at its default for other kinds.
        beta2: of `adam`; must stay at its default for other kinds.
        table_learning_rates: of single tables, as pairs (on a command line NAME VALUE NAME VALUE).
          Given pairs replace all pairs of the recipe.
        table_eps: of single tables, as pairs.
        weights: number format in which tables are kept; vectors leave them in fp32. GPU kernels
          round to fp16 stochastically, so that steps below its resolution count on average; CPU
          kernels round to the nearest and lose such steps. States stay fp32.
        table_weights: of single tables, as pairs.
    """

    kind: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = "rowwise_adagrad"
    learning_rate: float = 0.02
    eps: float = DEFAULT_EPS
    beta1: float = 0.9
    beta2: float = 0.999
    table_learning_rates: dict[str, float] = field(default_factory=dict)
    table_eps: dict[str, float] = field(default_factory=dict)
    weights: WeightFormat = "fp32"
    table_weights: dict[str, WeightFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.kind not in _CLASSES:
            raise ValueError(f"kind: expected one of {list(_CLASSES)}, got {self.kind!r}")
        for name, single, by_table in (
            ("learning_rate", self.learning_rate, self.table_learning_rates),
            ("eps", self.eps, self.table_eps),
        ):
            places = {f" of table {table!r}": value for table, value in by_table.items()}
            for place, value in {"": single, **places}.items():
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name}{place}: expected a number > 0, got {value}")
        for name in {self.weights, *self.table_weights.values()}:
            if name not in _FORMATS:
                raise ValueError(
                    f"weights: expected one of {list(_FORMATS)} (on CPUs no kernel looks a bf16 "
                    f"table up), got {name!r}"
                )
        betas = (self.beta1, self.beta2)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"beta1 and beta2: expected numbers in [0, 1), got {betas}")
        if self.kind == "sgd" and (self.eps != type(self).eps or self.table_eps):
            got = self.table_eps or self.eps
            raise ValueError(
                f"eps: has no effect on kind 'sgd', got {got}; remove it, or choose an Adagrad"
            )
        if self.kind != "adam" and betas != (type(self).beta1, type(self).beta2):
            raise ValueError(
                f"beta1 and beta2: have no effect on kind {self.kind!r}, got {betas}; remove them, "
                "or choose 'adam'"
            )

    def check_device(self, device_type: str) -> None:
        """Refuse an optimizer that has no fused kernel on `device_type`.

        Raises:
            ValueError: it has none.
        """
        devices = _DEVICES.get(self.kind, (device_type,))
        if device_type not in devices:
            others = [kind for kind in _CLASSES if kind not in _DEVICES]
            raise ValueError(
                f"sparse.kind: {self.kind!r} has no fused kernel on {device_type}, only on "
                f"{' and '.join(devices)}; use one of {others}, or train there"
            )

    def describe(self) -> str:
        """Return the optimizer and its numbers as one line, for a run's log."""
        parts = [f"{self.kind}, learning rate {self.learning_rate:g}"]
        if self.kind != "sgd":
            parts.append(f"eps {self.eps:g}")
        if self.kind == "adam":
            parts.append(f"betas {self.beta1:g} and {self.beta2:g}")
        if self.weights != "fp32":
            parts.append(f"{self.weights} weights")
        for what, by_table in (
            ("learning rate", self.table_learning_rates),
            ("eps", self.table_eps),
        ):
            parts += [f"{what} {value:g} of {table!r}" for table, value in by_table.items()]
        parts += [f"{form} weights of {table!r}" for table, form in self.table_weights.items()]
        return ", ".join(parts)

    def weight_bytes(self, table: str) -> int:
        """Return the bytes of one weight of a table."""
        return 2 if self.table_weights.get(table, self.weights) == "fp16" else 4

    @property
    def zero_is_no_update(self) -> bool:
        """Whether a zero gradient leaves touched rows and their state unchanged, bit by bit.

        True of optimizers without momentum, decay or a count of steps: they add zero.
        """
        return self.kind in ("rowwise_adagrad", "adagrad", "sgd")


def fuse_optimizer(layer: nn.Module, config: SparseOptimizerConfig) -> None:
    """Attach the optimizer to every weight of `layer`; from then on backward updates them.

    Call it before the layer is sharded. Unsharded, the same optimizer runs on dense gradients
    (`adam` does not).

    Args:
        layer: an EmbeddingLayer, or any module that holds only tables.
        config: which optimizer.
    """
    _set_formats(layer, config)
    for name, weight in layer.named_parameters():
        table = name.split(".")[-2]
        rate = config.table_learning_rates.get(table, config.learning_rate)
        options: dict[str, Any] = {"lr": rate}
        if config.kind != "sgd":
            options["eps"] = config.table_eps.get(table, config.eps)
        if config.kind == "adam":
            options |= {"beta1": config.beta1, "beta2": config.beta2}
        _apply_optimizer_in_backward(_CLASSES[config.kind], [weight], options)


def _set_formats(layer: nn.Module, config: SparseOptimizerConfig) -> None:
    """Give every table of `layer` its number format."""
    for module in layer.modules():
        if isinstance(module, EmbeddingBagCollection):
            parts, tables = module.embedding_bags, module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollection):
            parts, tables = module.embeddings, module.embedding_configs()
        else:
            continue
        for table in tables:
            table.data_type = _FORMATS[config.table_weights.get(table.name, config.weights)]
            part = cast(nn.Module, parts[table.name])
            part.half() if table.data_type == DataType.FP16 else part.float()


def state_bytes(optimizer: type[torch.optim.Optimizer] | str, columns: int) -> int:
    """Return the bytes an optimizer (class or kind) keeps for a row of D = `columns` weights."""
    kind = _CLASSES[optimizer] if isinstance(optimizer, str) else optimizer
    numbers = {RowWiseAdagrad: 1, torch.optim.SGD: 0, torch.optim.Adagrad: columns}
    return 4 * numbers.get(kind, 2 * columns)


def table_updates(model: nn.Module) -> int:
    """Return how often the kernels of `model`'s tables have run, in training and evaluation.

    Adam corrects its running means by it, so a resumed run has to restore it.
    """
    counts = [cast(Tensor, kernel.iter) for kernel in _kernels(model)]
    return max((int(count.item()) for count in counts), default=0)


def set_table_updates(model: nn.Module, updates: int) -> None:
    """Set the number of runs of the kernels of `model`'s tables (`table_updates`)."""
    for kernel in _kernels(model):
        kernel.set_optimizer_step(updates)
        kernel.iter_cpu.fill_(updates)


def _kernels(model: nn.Module) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for part in lookup_modules(module):
                if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen):
                    yield part

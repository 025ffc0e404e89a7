# SPDX-License-Identifier: MIT
"""The weights outside the tables: what a training step asks of them, however they are distributed.

`Precision` decides once for tables and dense weights together. So whatever holds the dense weights
(replicas, shards, an engine) first measures the gradient, and steps only after `Precision` has
decided. This file holds that interface and its simplest implementation.

Shapes: R ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from embeddings.collection import EmbeddingLayer
from trainer.distributed.optimizer import optimizer_tensors


class Dense(Protocol):
    """Dense weights and their optimizer.

    Attributes:
        parameters: the weights by name.
        optimizer: its groups' learning rates are those of the next step.
        decides_on_host: whether `step` reads its decision, which waits for the device.
        group: all ranks.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    decides_on_host: bool
    group: dist.ProcessGroup

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Return what `module` returns for `batch`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients, averaged over ranks, of the 0-d `loss`."""
        ...

    def square(self) -> Tensor:
        """Return this rank's share of the squared norm of all gradients (0-d float64).

        Shares of all ranks add up to the square; one that is not finite says that a gradient is
        not.
        """
        ...

    def step(self, factor: Tensor, skip: Tensor) -> None:
        """Multiply gradients by `factor` (0-d) and step; change nothing where `skip` (0-d bool)."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def unused(self) -> list[str]:
        """Return the names of weights that the last backward gave no gradient, where known."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return weights to be written or filled in place of the model's own state. Collective."""
        ...

    def whole(self) -> dict[str, Tensor] | None:
        """Return every weight whole, by name; None where the model itself has them. Collective."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return optimizer states by weight, to be written or filled. Collective."""
        ...

    def put(
        self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]
    ) -> set[str]:
        """Take over what shares no memory with where it came from; return names of such weights."""
        ...


class Replicated:
    """Dense weights that every rank holds whole, their gradients averaged by DDP.

    Args:
        parameters: the dense weights by name.
        optimizer: a fused AdamW over those that need a gradient.
        group: all ranks.
    """

    decides_on_host = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
    ) -> None:
        if not all(part.get("fused") for part in optimizer.param_groups):
            raise RuntimeError(
                "dense: expected an optimizer built with fused=True, which can leave a step out "
                f"without asking the host, got {type(optimizer).__name__}"
            )
        self.parameters, self.optimizer, self.group = parameters, optimizer, group

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Return what `module` returns for `batch`."""
        return module(batch)

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients, averaged over ranks."""
        loss.backward()

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients."""
        weights = (p for part in self.optimizer.param_groups for p in part["params"])
        return [p.grad for p in weights if p.grad is not None]

    def square(self) -> Tensor:
        """Return one R-th of the square, which all ranks hold whole."""
        return get_total_norm(self.gradients()).double() ** 2 / self.group.size()

    def step(self, factor: Tensor, skip: Tensor) -> None:
        """Step, unless `skip`: the fused kernel looks at it where it lies."""
        apply_step(self.optimizer, self.gradients(), factor, skip)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def unused(self) -> list[str]:
        """Return the names of weights without a gradient."""
        return [n for n, p in self.parameters.items() if p.requires_grad and p.grad is None]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's states, sharing memory with it."""
        return optimizer_tensors(self.optimizer, self.parameters)

    def weights(self) -> dict[str, Tensor]:
        """Return nothing: the model's state has them."""
        return {}

    def whole(self) -> dict[str, Tensor] | None:
        """Return None: the model has its weights."""
        return None

    def put(
        self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]
    ) -> set[str]:
        """Return no name: the state of model and optimizer shares memory with them."""
        return set()


def apply_step(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], factor: Tensor, skip: Tensor
) -> None:
    """Multiply `gradients` in place and let a fused optimizer step, or not, on the device."""
    if gradients:
        scalar = factor.to(gradients[0].dtype)
        torch._foreach_mul_(gradients, scalar)  # pyright: ignore[reportPrivateImportUsage]
    cast(Any, optimizer).found_inf = skip.float()
    optimizer.step()


def dense_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of `model` that are no tables, by name."""
    return {
        name: child
        for name, child in model.named_children()
        if not isinstance(child, EmbeddingLayer)
    }


def align(part: nn.Module, device: torch.device) -> None:
    """Move `part` to `device` and give all ranks the first one's weights. Collective."""
    part.to(device)
    for tensor in (*part.parameters(), *part.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def copy_parts(model: nn.Module) -> nn.ModuleDict:
    """Return copies of the dense parts of `model`, without their weights (`fill_copy`)."""
    parts = nn.ModuleDict(copy.deepcopy(dense_parts(model)))
    for module in parts.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.to("meta"), weight.requires_grad)
    return parts


def fill_copy(parts: nn.ModuleDict, model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Give a copy of `model`'s dense parts its `weights`, buffers and switches, and return it.

    It is single-device code again, which one rank may run alone.
    """
    parts.load_state_dict(dict(weights), strict=False, assign=True)
    for name, module in parts.named_modules():
        live = model.get_submodule(name) if name else nn.Module()
        module._buffers.update(live._buffers)
        switches = {k: v for k, v in vars(live).items() if isinstance(v, bool | int | float)}
        vars(module).update({k: v for k, v in switches.items() if k in vars(module)})
    return parts

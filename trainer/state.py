# SPDX-License-Identifier: MIT
"""What a run must keep to continue as if it had never stopped, as tensors by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer import checkpoint
from trainer.dense import Dense
from trainer.parallelize import Parallel
from trainer.runtime import Runtime


class TrainState:
    """Tables, dense weights, optimizer states and this rank's random numbers.

    Counters and the loss scale are plain numbers and travel in a checkpoint's manifest.
    """

    def __init__(
        self,
        parallel: Parallel,
        dense: Dense,
        runtime: Runtime,
    ) -> None:
        self._parallel = parallel
        self._dense = dense
        self._runtime = runtime

    @property
    def model(self) -> nn.Module:
        """The model whose state it is, without wrappers."""
        return self._parallel.model

    def tensors(self) -> dict[str, Any]:
        """Return all state as nested tensors that share memory with the run."""
        return {
            "model": self._parallel.module.state_dict(),
            **fused_tensors(self._parallel.fused_optimizer),
            "dense": self._dense.tensors(),
            "random": {self._random_name(): torch.get_rng_state()},
        }

    def load(self, path: Path) -> None:
        """Fill all state from the checkpoint at `path`, written at any world size.

        A rank that the checkpoint does not know keeps the random numbers it was started with.
        """
        tensors = self.tensors()
        random = tensors.pop("random")
        if f"random.{self._random_name()}" in checkpoint.tensor_names(path):
            tensors["random"] = random
        checkpoint.load(tensors, path)
        self.put(tensors)

    def put(self, tensors: dict[str, Any]) -> None:
        """Take over what `tensors`, from this object, has been filled with."""
        self._parallel.module.load_state_dict(tensors["model"])
        if "random" in tensors:
            torch.set_rng_state(tensors["random"][self._random_name()])

    def _random_name(self) -> str:
        return f"rank{self._runtime.rank}"


def fused_tensors(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states of the tables' optimizer under the key `fused`; no key if it has none.

    An empty group would be saved under a name that depends on which ranks hold tables.
    """
    states: dict[str, Any] = optimizer.state_dict()["state"]
    found = {name: parts for name, parts in states.items() if parts}
    return {"fused": found} if found else {}


def flatten(tensors: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield nested tensors under the names that a checkpoint gives them."""
    for key, value in tensors.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

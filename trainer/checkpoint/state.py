# SPDX-License-Identifier: MIT
"""The state from which a run continues bit by bit, as tensors by name."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint import dcp
from trainer.checkpoint.storage import Folder
from trainer.distributed.dense import Dense
from trainer.distributed.parallelize import Parallel
from trainer.runtime.atomic_files import parse_json
from trainer.runtime.runtime import Runtime

# Room for 625 numbers of ten digits and their separators.
_RANDOM_BYTES = 8192


class TrainState:
    """Tables, dense weights, optimizer states and this rank's random numbers.

    Counters and the loss scale are plain numbers and are in a checkpoint's manifest.

    Args:
        parallel: the distributed model.
        dense: its dense weights and their optimizer.
        runtime: this process among the ranks.
    """

    def __init__(
        self,
        parallel: Parallel,
        dense: Dense,
        runtime: Runtime,
    ) -> None:
        self._parallel = parallel
        self._dense = dense
        self._random = RandomState(runtime)
        self.runtime = runtime

    @property
    def model(self) -> nn.Module:
        """The model without wrappers."""
        return self._parallel.model

    def tensors(self) -> dict[str, Any]:
        """Return the state as nested tensors, to be written, or filled and `put`. Collective."""
        return {
            "model": {**self._parallel.module.state_dict(), **self._dense.weights()},
            **fused_tensors(self._parallel.fused_optimizer),
            "dense": self._dense.tensors(),
            "random": self._random.tensors(),
        }

    def load(self, path: Folder, more: Mapping[str, Any] | None = None) -> None:
        """Fill all state from the checkpoint at `path`, written at any world size. Collective.

        A rank that the checkpoint does not contain keeps its initial random numbers.

        Args:
            path: the checkpoint.
            more: other tensors of the checkpoint to fill, nested by name.
        """
        tensors = {**self.tensors(), **(more or {})}
        names = dcp.tensor_names(path)
        random_states = tensors.pop("random")
        known = {name: value for name, value in random_states.items() if f"random.{name}" in names}
        if known:
            tensors["random"] = known
        dcp.load(tensors, path, runtime=self.runtime)
        self.put(tensors)

    def put(self, tensors: dict[str, Any]) -> None:
        """Apply `tensors`, which this object returned and a caller has filled. Collective."""
        own = self._dense.put(tensors["model"], tensors["dense"])
        rest = {name: value for name, value in tensors["model"].items() if name not in own}
        self._parallel.module.load_state_dict(OrderedDict(rest), strict=not own)
        self._random.restore(tensors.get("random", {}))


class RandomState:
    """The random generators of this rank: those of torch, its GPU, NumPy and Python."""

    def __init__(self, runtime: Runtime) -> None:
        self._name = f"rank{runtime.rank}"
        self._device = runtime.device if runtime.device.type == "cuda" else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the generators' states by name."""
        found = {
            self._name: torch.get_rng_state(),
            f"{self._name}_numpy": _plain(tuple(np.random.get_state(legacy=True))[1:]),
            f"{self._name}_python": _plain(random.getstate()),
        }
        if self._device is not None:
            found[f"{self._name}_cuda"] = torch.cuda.get_rng_state(self._device)
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the generators whose states are in `tensors`."""
        if self._name in tensors:
            torch.set_rng_state(tensors[self._name])
        if f"{self._name}_numpy" in tensors:
            np.random.set_state(("MT19937", *_nested(tensors[f"{self._name}_numpy"])))
        if f"{self._name}_python" in tensors:
            random.setstate(_nested(tensors[f"{self._name}_python"]))
        if self._device is not None and f"{self._name}_cuda" in tensors:
            torch.cuda.set_rng_state(tensors[f"{self._name}_cuda"].cpu(), self._device)


def _plain(state: Any) -> Tensor:
    """Return a generator's state, plain numbers in tuples, as JSON bytes of a fixed length."""
    text = json.dumps(state, default=lambda array: array.tolist()).encode().ljust(_RANDOM_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _nested(state: Tensor) -> Any:
    """Return the state that `_plain` encoded, with arrays as tuples."""
    parts = parse_json(bytes(state.cpu().numpy()))
    return tuple(tuple(part) if isinstance(part, list) else part for part in parts)


def fused_tensors(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states of the tables' optimizer under the key `fused`; no key if it has none.

    An empty group would be saved under a name that depends on which ranks hold tables.
    """
    states: dict[str, Any] = optimizer.state_dict()["state"]
    found = {name: parts for name, parts in states.items() if parts}
    return {"fused": found} if found else {}

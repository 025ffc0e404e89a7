# SPDX-License-Identifier: MIT
"""The model of a checkpoint in one process, without a process group, and the parts of a prediction.

The configuration decides which of our classes are built; nothing that a folder holds is executed.

Shapes: B examples, K tasks, P width of all pooled features, D width of a representation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embeddings.sharding.coalesce import unpool
from models.batch import Batch
from models.ranking import RankingModel
from models.stream import UserOutputs
from trainer.checkpoint import dcp
from trainer.checkpoint.dcp_files import Reader
from trainer.checkpoint.storage import Folder
from trainer.config.config import TrainConfig
from trainer.distributed.precision import DTYPES
from trainer.runtime.memory import available_bytes

_MODEL = "model."


class Parts(NamedTuple):
    """What a model makes of B examples.

    Attributes:
        probabilities: (B, K) float32.
        representation: (B, D), what the tower gives to the head.
        pooled: (B, P), the looked-up vectors of single ids and bags.
    """

    probabilities: Tensor
    representation: Tensor
    pooled: Tensor


def model_version(manifest: Mapping[str, Any]) -> str:
    """Return a name of a checkpoint that changes with its content: its step and a hash."""
    text = json.dumps(manifest, sort_keys=True)
    return f"step-{manifest['step']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def empty_model(config: TrainConfig) -> RankingModel:
    """Return the model of a run with its tables on `meta`, ready to be given weights."""
    # TorchRec's first lookup makes torch warn of a function that it does not call.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    meta = torch.device("meta")
    model = RankingModel(config.schema, config.model, meta, config.runtime.seed)
    if config.parallel.sharding.unpool_ids:
        model.embeddings = unpool(model.embeddings)
    return model.eval()


def model_shapes(config: TrainConfig) -> dict[str, Tensor]:
    """Return the state of a run's model on `meta`: names and sizes, whatever it would take."""
    with torch.device("meta"):
        return dict(empty_model(config).state_dict())


def load_whole(path: Folder, config: TrainConfig) -> RankingModel:
    """Return the model of a checkpoint of any world size, its tables whole, on the CPU.

    Raises:
        ValueError: the checkpoint is damaged, of another model, or larger than the free memory.
    """
    state = model_shapes(config)
    check_sizes(path, state)
    needed = sum(one.numel() * one.element_size() for one in state.values())
    available = available_bytes(torch.device("cpu"))
    if needed > available:
        raise ValueError(
            f"{path}: its tables take {needed:,} bytes in one process, where {available:,} are "
            "available; score by several ranks (python -m trainer.score under torchrun), or export "
            "smaller tables (python -m trainer.export --tables int8)"
        )
    model = empty_model(config)
    model.embeddings.to_empty(device="cpu")
    read_into(path, model.state_dict())
    return model


def read_into(path: Folder, state: Mapping[str, Tensor]) -> None:
    """Fill tensors by name from a checkpoint, numbers of another format converted.

    Raises:
        ValueError: the checkpoint is damaged, or lacks a tensor or has it in another size.
    """
    check_sizes(path, state)
    held: dict[str, Any] = dict(Reader(path).read_metadata().state_dict_metadata)
    wanted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        entry = held[f"{_MODEL}{name}"]
        same = entry.properties.dtype == tensor.dtype
        wanted[name] = tensor if same else torch.empty(tensor.shape, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        # torch wants to be told that one process reads.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load({"model": wanted}, path)
    with torch.no_grad():
        for name, tensor in state.items():
            if wanted[name] is not tensor:
                tensor.copy_(wanted[name])


def check_sizes(path: Folder, state: Mapping[str, Tensor]) -> None:
    """Check, before anything is allocated, that a folder holds tensors of these names and sizes.

    Raises:
        ValueError: it does not.
    """
    sizes = dcp.tensor_sizes(path)
    for name, tensor in state.items():
        size = sizes.get(f"{_MODEL}{name}")
        if size != tuple(tensor.shape):
            found = "none" if size is None else f"one of size {size}"
            raise ValueError(
                f"{path}: expected a tensor {name!r} of size {tuple(tensor.shape)}, got {found}; "
                "the folder is of another model (compare its config)"
            )


def predict(model: RankingModel, batch: Batch) -> Parts:
    """Return what `model` makes of a batch, as its `forward` does, with the parts in between."""
    embeddings = model.embeddings(batch.sparse)
    tokens = model.tokenizer(embeddings, batch.dense, batch.actions)
    outputs = model.tower(tokens)
    _, predictions = model.objective(outputs, batch)
    return Parts(predictions.probabilities, representation_of(outputs), embeddings.pooled)


def representation_of(outputs: Tensor | UserOutputs) -> Tensor:
    """Return the (B, D) float32 representation in a tower's outputs; of targets the first."""
    found = outputs.targets if isinstance(outputs, UserOutputs) else outputs
    return (found[:, 0] if found.dim() == 3 else found).detach().float()


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that computes in the number format of the run."""
    dtype = DTYPES[config.precision.dtype]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def side_columns(config: TrainConfig) -> dict[str, list[int]]:
    """Return which columns of `Parts.pooled` describe the item, and which the user's side.

    Returns:
        `item` and `user`, each without entries where the schema has no such feature.
    """
    schema, start = config.schema, 0
    found: dict[str, list[int]] = {"item": [], "user": []}
    for feature in schema.sparse:
        if feature.kind == "sequence":
            continue
        width = schema.table(feature.table).embedding_dim
        side = "item" if feature.side == "item" else "user"
        found[side] += range(start, start + width)
        start += width
    return found

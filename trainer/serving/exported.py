# SPDX-License-Identifier: MIT
"""An exported model: one folder that a process serves without the run it came from.

  DIR/manifest.json  schema, model, hashing, format of the tables, checksums, scores of fixed rows
  DIR/index.json     which tensors there are, and where in which file
  DIR/rank-0.bin     dense weights, learnt moments, packed tables, maps of dynamic tables: raw bytes

The files are those of a checkpoint (`trainer/checkpoint/dcp_index.py`): nothing is unpickled, and
every claim of the index is checked against the files before anything is allocated. The dense part
is rebuilt from the configuration by our own classes, not read as a program: no file of the folder
is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.ranking import RankingModel
from trainer.checkpoint.layout import MANIFEST, SAVED, read_manifest
from trainer.checkpoint.storage import Folder, locate
from trainer.config.config import TrainConfig, config_from_dict
from trainer.runtime.memory import available_bytes
from trainer.serving.delta import apply_delta
from trainer.serving.model import check_sizes, empty_model, model_shapes, read_into
from trainer.serving.packed_tables import FORMATS, TableFormat, packed_width, serve_packed, table_of
from trainer.serving.proof import hash_proof

KIND = "export"
REQUIRED: dict[str, type | tuple[type, ...]] = {
    **SAVED,
    "kind": str,
    "config": dict,
    "families": dict,
    "schema": str,
    "tables": str,
    "seed": int,
    "hash": list,
    "model": str,
    "proof": dict,
}


class Exported(NamedTuple):
    """An exported model in memory, and what its manifest says."""

    model: RankingModel
    config: TrainConfig
    manifest: dict[str, Any]


def is_export(place: str | Path) -> bool:
    """Return whether `place` is the folder of an exported model."""
    folder = locate(place)
    if not (folder / MANIFEST).is_file():
        return False
    return read_manifest(folder, SAVED).get("kind") == KIND


def read_export(place: str | Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the configuration and the manifest of an exported model.

    Raises:
        ValueError: it is none, of another version, or its schema, seed or hashing is not what it
            was written with.
    """
    path = locate(place)
    manifest = read_manifest(path, REQUIRED)
    where = path / MANIFEST
    try:
        config = config_from_dict(manifest["config"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}; use the version that wrote it") from error
    facts = {
        "schema": (config.schema.fingerprint(), "the schema has been changed"),
        "seed": (config.runtime.seed, "the seed has been changed"),
        "hash": (hash_proof(), "this version hashes ids in another way"),
        "kind": (KIND, "it is no exported model"),
    }
    for name, (found, reason) in facts.items():
        if manifest[name] != found:
            raise ValueError(
                f"{where}: {name}: expected {found!r:.80}, got {manifest[name]!r:.80}: {reason}; "
                "export the model again"
            )
    if manifest["tables"] not in FORMATS:
        raise ValueError(
            f"{where}: tables: expected one of {FORMATS}, got {manifest['tables']!r:.40}"
        )
    return config, manifest


def load_export(place: str | Path, deltas: Sequence[str | Path] = ()) -> Exported:
    """Return an exported model, on the CPU.

    Args:
        place: its folder.
        deltas: what has changed since (`delta.py`), to be applied in order.

    Raises:
        ValueError: as `read_export`; a file is damaged, or the tensors are not those of its model,
            or they are larger than the free memory.
    """
    config, manifest = read_export(place)
    path = locate(place)
    state = read_state(path, config, manifest["tables"])
    for delta in deltas:
        newer = apply_delta(delta, manifest, state)
        manifest = {**manifest, **{key: newer[key] for key in ("model", "proof", "step")}}
    model = empty_model(config)
    put_state(model, state, manifest["tables"])
    return Exported(model, config, manifest)


def expected_shapes(config: TrainConfig, form: TableFormat) -> dict[str, Tensor]:
    """Return tensors on `meta` of the names, sizes and formats that an export of `config` holds."""
    found = {}
    for name, tensor in model_shapes(config).items():
        if table_of(name):
            width = packed_width(tensor.shape[1], form)
            tensor = torch.empty(len(tensor), width, dtype=torch.uint8, device="meta")
        found[name] = tensor
    return found


def read_state(path: Folder, config: TrainConfig, form: TableFormat) -> dict[str, Tensor]:
    """Return the tensors of an exported model by name, tables packed.

    Raises:
        ValueError: as `load_export`.
    """
    shapes = expected_shapes(config, form)
    check_sizes(path, shapes)
    needed = 2 * sum(one.numel() * one.element_size() for one in shapes.values())
    available = available_bytes(torch.device("cpu"))
    if needed > available:
        raise ValueError(
            f"{path}: expected {needed:,} bytes of free memory to load it, got {available:,}; "
            "export its tables in fewer bits (--tables int8 or int4)"
        )
    state = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in shapes.items()}
    read_into(path, state)
    return state


def put_state(model: RankingModel, state: Mapping[str, Tensor], form: TableFormat) -> None:
    """Give a model from `empty_model` its weights and packed tables."""
    tables = {table_of(name): one for name, one in state.items() if table_of(name)}
    serve_packed(model.embeddings, tables, form)
    rest = {name: one for name, one in state.items() if not table_of(name)}
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in rest.items():
            own[name].copy_(tensor)
    model.eval()

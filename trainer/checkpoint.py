# SPDX-License-Identifier: MIT
"""Sharded checkpoints that are complete or absent.

Every rank writes its shards through `torch.distributed.checkpoint` into a temporary folder; when
all are on disk, rank 0 adds `manifest.json` and renames the folder to `step-N`. A crash at any
moment leaves either a complete `step-N` or a temporary folder that nothing reads.

The manifest holds each shard file's size and checksum, which loading compares: a disk or a copy
that loses or changes bytes is named, and nothing is trained from garbage.

Only tensors go through torch.distributed.checkpoint; everything else is JSON in the manifest, so
that loading never unpickles values. The one pickle that the format has, its index, is read by an
unpickler that knows the index's own classes and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    filesystem,
    metadata,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from trainer.manifest import MANIFEST, commit, read_manifest


def save(tensors: Mapping[str, Any], directory: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Write a checkpoint of `step` on all ranks and return its folder, which exists once complete.

    tensors: nested mappings of tensors and sharded tensors; a rank adds its own under keys that
      name it.
    manifest: JSON data written by rank 0 beside the shards.
    """
    target, temporary = directory / f"step-{step}", directory / f".step-{step}.incomplete"
    if _rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    _barrier()
    writer = filesystem.FileSystemWriter(temporary, sync_files=True)
    state_dict_saver.save(dict(tensors), storage_writer=writer)
    own = {path.name: _checksum(path) for path in temporary.glob(f"__{_rank()}_*")}
    files = {name: value for part in _gather(own) for name, value in sorted(part.items())}
    if _rank() == 0:
        content = {**manifest, "step": step, "world_size": _world_size(), "versions": _versions()}
        content["files"] = files
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        commit(temporary, target)
        _sync_folder(directory)
    _barrier()
    return target


def load(tensors: Mapping[str, Any], path: Path, planner: LoadPlanner | None = None) -> None:
    """Fill `tensors` in place from the checkpoint at `path`, at any world size. Collective.

    planner: of what to read where, if not whole tensors by their names.

    Raises:
        ValueError: the checkpoint lacks a tensor that is asked for, its index is not one, or a file
            of it is missing or damaged; the same on all ranks.
    """
    reader = _Reader(path)
    held = reader.read_metadata().state_dict_metadata
    missing = sorted(set(_names(tensors)) - set(held))
    if missing:
        raise ValueError(
            f"{path}: lacks {len(missing)} of the tensors asked for, the first is {missing[0]!r}; "
            "the checkpoint is of another model or plan (compare its config.json)"
        )
    _verify(path)
    try:
        with warnings.catch_warnings():
            # torch asks each ShardedTensor, which TorchRec's tables are, for its device and size,
            # and warns of its own questions.
            warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
            state_dict_loader.load(dict(tensors), storage_reader=_Reader(path), planner=planner)
    except CheckpointException as error:
        raise ValueError(f"{path}: cannot be read ({error}); use an older checkpoint") from error


def tensor_names(path: Path) -> set[str]:
    """Return the names of all tensors in the checkpoint at `path`."""
    return set(_Reader(path).read_metadata().state_dict_metadata)


def tensor_sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the checkpoint at `path`."""
    held = _Reader(path).read_metadata().state_dict_metadata
    return {name: tuple(getattr(entry, "size", ())) for name, entry in held.items()}


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return a dense optimizer's state by parameter name, creating what a first step would create.

    Raises:
        RuntimeError: the optimizer keeps a state whose start is not zero.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        if not state:
            if not isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam):
                raise RuntimeError(
                    "checkpoint: expected Adam or AdamW as the dense optimizer, got "
                    f"{type(optimizer).__name__}"
                )
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        found[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def _memory_format(enum: Any, name: str) -> Any:
    """Return a member of the one enum in an index; in place of getattr, which reaches anything."""
    if enum is not metadata._MEM_FORMAT_ENCODING or name not in enum.__members__:
        raise ValueError(f"the index reads attribute {name!r} of {enum!r}, which no index does")
    return enum[name]


# Everything an index names, except the dtypes and layouts of torch.
_INDEX_OBJECTS: dict[tuple[str, str], Any] = {
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # Python 3.13
    ("builtins", "getattr"): _memory_format,  # enums up to Python 3.11.3
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (metadata.__name__, kind.__name__): kind
        for kind in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
}


class _IndexUnpickler(pickle.Unpickler):
    """Reads a checkpoint's index; refuses every name that an index does not hold."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _INDEX_OBJECTS:
            return _INDEX_OBJECTS[module_name, global_name]
        value = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        raise ValueError(
            f"the index names {module_name}.{global_name}, which no checkpoint index holds"
        )


class _Reader(filesystem.FileSystemReader):
    """FileSystemReader whose index is read by `_IndexUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                index = _IndexUnpickler(file).load()
        except FileNotFoundError:
            raise ValueError(
                f"{self.path}: not a checkpoint, its index .metadata is missing"
            ) from None
        except (pickle.UnpicklingError, EOFError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: damaged ({error}); use an older checkpoint") from error
        if index.storage_meta is None:
            index.storage_meta = metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def _verify(path: Path) -> None:
    """Compare the files at `path` with the manifest's checksums; each rank reads its share."""
    expected = read_manifest(path)["files"]
    damaged = []
    for name in sorted(expected)[_rank() :: _world_size()]:
        try:
            found = _checksum(path / name)
        except OSError as error:
            damaged.append(f"{path / name}: cannot be read ({error.strerror})")
            continue
        if found != expected[name]:
            damaged.append(
                f"{path / name}: damaged (expected {expected[name][0]} bytes with checksum "
                f"{expected[name][1]:08x}, got {found[0]} with {found[1]:08x})"
            )
    damaged = [message for part in _gather(damaged) for message in part]
    if damaged:
        raise ValueError(
            f"{'; '.join(damaged[:3])}; remove {path} to go on from an older checkpoint"
        )


def _checksum(path: Path) -> list[int]:
    """Return a file's number of bytes and their CRC-32."""
    size = checksum = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 22):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return [size, checksum]


def _gather(value: Any) -> list[Any]:
    """Return every rank's `value`, on all ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _names(tensors: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the flattened names that torch.distributed.checkpoint gives to nested tensors."""
    names: list[str] = []
    for key, value in tensors.items():
        if isinstance(value, Mapping):
            names += _names(value, f"{prefix}{key}.")
        else:
            names.append(f"{prefix}{key}")
    return names


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "torchrec")}


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

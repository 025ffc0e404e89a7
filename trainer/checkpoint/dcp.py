# SPDX-License-Identifier: MIT
"""Sharded checkpoints that are complete or absent.

Every rank writes its shards through `torch.distributed.checkpoint` into a place that no reader
looks at. When all are written, rank 0 adds `manifest.json`, and only then does the checkpoint
exist. On a disk it renames a temporary folder; behind a URL it writes that one object last. A crash
at any moment leaves either a complete `step-N` or files that nothing reads.

The manifest holds the size and checksum of each file, and its own checksum. Loading compares them.
So damage by a disk or a copy raises an error that names the file, and training never starts from
corrupt data.

Only tensors go through torch.distributed.checkpoint; everything else is JSON in the manifest. The
tensor files are raw bytes with a JSON index (`dcp_index.py`). Nothing in a checkpoint is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import socket
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner

from trainer.checkpoint.dcp_files import Planner, Reader, Writer, describe_damage
from trainer.checkpoint.dcp_index import INDEX
from trainer.checkpoint.layout import (
    commit,
    data_folder,
    discard,
    draft,
    read_manifest,
    step_name,
)
from trainer.checkpoint.storage import Folder, address, locate, told_if_slow
from trainer.runtime.credentials import without_credentials
from trainer.runtime.printable import printable
from trainer.runtime.runtime import RunError, Runtime

Value = TypeVar("Value")
Group = dist.ProcessGroup | None


def save(
    tensors: Mapping[str, Any],
    directory: Folder,
    step: int,
    manifest: dict[str, Any],
    group: Group = None,
    watched: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Folder:
    """Write a checkpoint of `step` and return its folder, which exists once complete. Collective.

    Args:
        tensors: nested mappings of tensors and sharded tensors. A rank adds its own tensors under
            keys that contain its name.
        directory: the folder of the run's checkpoints.
        step: the run's step.
        manifest: JSON data that rank 0 writes beside the shards.
        group: the process group of all ranks; None is the default one, which another thread may be
            using.
        watched: makes the context in which this rank writes its own part.

    Raises:
        RunError: a rank could not write. It is raised on all ranks, and the partial files are
            removed.
    """
    target = directory / step_name(step)
    place = locate(_on_first(lambda: address(draft(target)), target, group))
    writer = Writer(place, watched)
    try:
        index = state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        _on_first(lambda: discard(place), target, group)
        rank, cause = next(iter(error.failures.items()))
        raise RunError(_failed(target, f"rank {rank}: {cause[0]}")) from error
    parts = _gather(writer.written, group)
    content = {
        **manifest,
        "step": step,
        "world_size": _world_size(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "torchrec")},
        "dtypes": _dtypes(index) if _rank() == 0 else {},
        "files": {name: value for part in parts for name, value in sorted(part.items())},
    }
    _on_first(lambda: commit(place, target, content), target, group)
    return target


def load(
    tensors: Mapping[str, Any],
    path: Folder,
    planner: LoadPlanner | None = None,
    runtime: Runtime | None = None,
) -> None:
    """Fill `tensors` in place from the checkpoint at `path`, at any world size. Collective.

    Args:
        tensors: nested mappings of the tensors to fill.
        path: the checkpoint.
        planner: plans what is read where; None reads whole tensors by name.
        runtime: this process among the ranks, who then wait for one that reads slowly, which says
            so. None takes the default process group with its timeout.

    Raises:
        ValueError: the checkpoint lacks a requested tensor or has it in another dtype, its index is
            invalid, or a file is missing or damaged. It is raised on all ranks.
    """
    group, watched = None, contextlib.nullcontext
    if runtime is not None:
        group, watched = runtime.patient, functools.partial(_told_if_slow, path, runtime)
    reader = Reader(path, watched)
    with watched():
        held = reader.read_metadata().state_dict_metadata
    asked = dict(flatten(tensors))
    missing = sorted(set(asked) - set(held))
    if missing:
        raise ValueError(
            f"{path}: lacks {len(missing)} of the tensors asked for, the first is {missing[0]!r}; "
            "the checkpoint is of another model or plan (compare its config.json)"
        )
    for name, tensor in asked.items():
        entry: Any = held[name]
        if not isinstance(tensor, Tensor | ShardedTensor):
            raise TypeError(f"checkpoint: {name!r}: expected a tensor, got {type(tensor).__name__}")
        if entry.properties.dtype != _dtype(tensor):
            raise ValueError(
                f"{path}: tensor {name!r}: expected {_dtype(tensor)}, got "
                f"{entry.properties.dtype}; the checkpoint is of another number format"
            )
    _verify(path, group, watched)
    try:
        with warnings.catch_warnings():
            # TorchRec's tables are ShardedTensors. torch reads their device and size here, and
            # each read warns to use DTensor instead.
            warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
            planner = planner or Planner()
            state_dict_loader.load(
                dict(tensors), storage_reader=reader, planner=planner, process_group=group
            )
    except CheckpointException as error:
        raise ValueError(f"{path}: cannot be read ({error}); use an older checkpoint") from error


def tensor_names(path: Folder) -> set[str]:
    """Return the names of all tensors in the checkpoint at `path`."""
    return set(Reader(path).read_metadata().state_dict_metadata)


def tensor_sizes(path: Folder) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor in the checkpoint at `path`."""
    held = Reader(path).read_metadata().state_dict_metadata
    entries: list[tuple[str, Any]] = list(held.items())
    return {name: tuple(entry.size) for name, entry in entries}


def flatten(tensors: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested tensors under the names that a checkpoint gives them."""
    for key, value in tensors.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _told_if_slow(path: Folder, runtime: Runtime) -> AbstractContextManager[None]:
    """Return a context that reports this rank if it reads a file of a checkpoint for too long."""
    text = (
        f"{path}: rank {runtime.rank} has been reading a file of the checkpoint for "
        f"{runtime.timeout_seconds:g} s (runtime.timeout_seconds); the other ranks wait for it; "
        f"look at what the folder is on ({socket.gethostname()}), or kill the run"
    )
    tell = functools.partial(print, printable(f"[rank {runtime.rank}] {text}"), file=sys.stderr)
    return told_if_slow(runtime.timeout_seconds, functools.partial(tell, flush=True))


def _verify(
    path: Folder, group: Group, watched: Callable[[], AbstractContextManager[object]]
) -> None:
    """Compare the files at `path` with the manifest's checksums; each rank reads its share."""
    manifest = read_manifest(path)
    expected, place = manifest["files"], data_folder(path, manifest)
    damaged = []
    for name in sorted(set(expected) - {INDEX})[_rank() :: _world_size()]:
        try:
            with watched():
                found = _checksum(place / name)
        except OSError as error:
            damaged.append(f"{place / name}: cannot be read ({error.strerror or error})")
            continue
        if found != expected[name]:
            damaged.append(describe_damage(place / name, expected[name], found))
    damaged = [message for part in _gather(damaged, group) for message in part]
    if damaged:
        raise ValueError(
            f"{'; '.join(damaged[:3])}; remove {path} to go on from an older checkpoint"
        )


def _checksum(path: Folder) -> list[int]:
    """Return a file's number of bytes and their CRC-32."""
    size = checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return [size, checksum]


def _dtypes(index: Metadata) -> dict[str, int]:
    """Return the number of tensors of each dtype."""
    entries: list[Any] = list(index.state_dict_metadata.values())
    names = (str(entry.properties.dtype).removeprefix("torch.") for entry in entries)
    return dict(sorted(Counter(names).items()))


def _dtype(tensor: Any) -> torch.dtype:
    """Return the dtype of a tensor, sharded or not."""
    sharded = isinstance(tensor, ShardedTensor)
    return tensor.metadata().tensor_properties.dtype if sharded else tensor.dtype


def _on_first(work: Callable[[], Value], target: Folder, group: Group) -> Value:
    """Let rank 0 do `work`; return its result on all ranks, or raise a RunError on all."""
    answer: list[Any] = [None, ""]
    if _rank() == 0:
        try:
            answer[0] = work()
        except Exception as error:  # any file system's; the other ranks must not wait for ever
            answer[1] = str(error) or type(error).__name__
    if dist.is_initialized():
        dist.broadcast_object_list(answer, group=group, group_src=0)
    if answer[1]:
        raise RunError(_failed(target, answer[1]))
    return answer[0]


def _failed(target: Folder, cause: str) -> str:
    return f"{target}: the checkpoint cannot be written ({without_credentials(cause)})"


def _gather(value: Any, group: Group = None) -> list[Any]:
    """Return every rank's `value`, on all ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1

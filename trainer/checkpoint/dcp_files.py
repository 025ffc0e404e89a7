# SPDX-License-Identifier: MIT
"""Reads and writes the files of a checkpoint for torch.distributed.checkpoint.

Torch plans which rank reads or writes which block. This module moves the bytes of the blocks
between tensors and files, each file in one pass. Torch's own readers and writers
(`FileSystemReader`, `FsspecReader`) unpickle the index and every tensor, read every block whole and
give no checksum of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trainer.checkpoint.dcp_index import INDEX, INDEX_BYTES, Chunk, index_text, parse_index
from trainer.checkpoint.layout import data_folder, read_manifest
from trainer.checkpoint.storage import (
    Folder,
    RemotePath,
    check_regular,
    open_counted,
    read_bounded,
)

# Bytes held in memory beside the tensor that is read.
_PART_BYTES = 64 << 20


class TensorsOnly:
    """A planner that refuses values that are not tensors, because torch would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse."""
        raise ValueError(f"{read_item.storage_index.fqn!r:.200} is no tensor; nothing else is read")


class Planner(TensorsOnly, DefaultLoadPlanner):
    """Plans the reads of whole tensors by their names."""


class Reader(StorageReader):
    """Reads the checkpoint at `path`, on a disk or behind a URL.

    Args:
        path: the checkpoint.
        watched: makes the context in which this rank reads its own part.

    Raises:
        ValueError: `path` is no complete checkpoint, or its manifest is damaged.
    """

    def __init__(
        self,
        path: Folder,
        watched: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self._watched = watched
        self.checkpoint = path
        self.manifest = read_manifest(path)
        self.path = data_folder(path, self.manifest)
        self._chunks: dict[Any, Chunk] = {}
        self._index: metadata.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the index.

        Raises:
            ValueError: it, or a file that it names, is missing, damaged or not a plain file.
        """
        if self._index is not None:
            return self._index  # torch asks again
        path, files = self.path / INDEX, dict(self.manifest["files"])
        try:
            content = read_bounded(path, INDEX_BYTES)
        except FileNotFoundError:
            raise ValueError(
                f"{self.checkpoint}: not a checkpoint, its index {INDEX} is missing"
            ) from None
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read ({error}); use an older checkpoint"
            ) from error
        expected, found = files.pop(INDEX, None), [len(content), zlib.crc32(content)]
        if found != expected:
            expected = expected or [0, 0]
            raise ValueError(f"{describe_damage(path, expected, found)}; use an older checkpoint")
        for name in files:
            check_regular(self.path / name)
        try:
            index = parse_index(content, {name: size for name, (size, _) in files.items()})
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); use an older checkpoint") from error
        index.storage_meta = metadata.StorageMeta()
        self._index = index
        return index

    def set_up_storage_reader(
        self, metadata: metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the index's map from blocks to chunks."""
        self._chunks = metadata.storage_data

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader belongs to one checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: ranks read independently."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether this names a checkpoint; a reader is given a path instead."""
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the blocks of `plan` into the tensors that `planner` gives."""
        per_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise ValueError(f"{item.storage_index.fqn!r:.200}: expected a tensor")
            chunk = self._chunks[item.storage_index]
            per_file.setdefault(chunk.file, []).append((chunk, item))
        for name, items in per_file.items():
            with self._watched(), (self.path / name).open("rb") as stream:
                for chunk, item in sorted(items, key=lambda one: one[0].at):
                    target = planner.resolve_tensor(item).detach()
                    _read_block(stream, chunk, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_block(stream: Any, chunk: Chunk, item: ReadItem, target: Tensor) -> None:
    """Copy a block of a chunk into `target`, which has the block's size and any dtype and device.

    Only the rows of the block are read, a part at a time, so that memory stays bounded.
    """
    starts, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if tuple(target.shape) != lengths:
        raise ValueError(f"{item.storage_index.fqn!r:.200}: {lengths} into {tuple(target.shape)}")
    if not target.numel():
        return
    # A scalar is read as one row of one element.
    sizes = chunk.sizes or (1,)
    starts, lengths = starts or (0,), lengths or (1,)
    row_bytes = math.prod(sizes[1:]) * chunk.dtype.itemsize
    rows_at_once = max(1, _PART_BYTES // row_bytes)
    destination = target.view(1) if target.dim() == 0 else target
    stream.seek(chunk.at + starts[0] * row_bytes)
    for first in range(0, lengths[0], rows_at_once):
        rows = min(rows_at_once, lengths[0] - first)
        content = bytearray(rows * row_bytes)
        _fill(stream, memoryview(content), chunk.file)
        block = torch.frombuffer(content, dtype=chunk.dtype).view(rows, *sizes[1:])  # (rows, ...)
        for dim in range(1, block.dim()):
            block = block.narrow(dim, starts[dim], lengths[dim])
        destination[first : first + rows].copy_(block)


def _fill(stream: Any, content: memoryview, name: str) -> None:
    """Read until `content` is full."""
    filled = 0
    while filled < len(content):
        got = stream.readinto(content[filled:])
        if not got:
            raise ValueError(f"{name!r}: ends early")
        filled += got


def describe_damage(path: Folder, expected: list[int], found: list[int]) -> str:
    """Return how a file's bytes differ from the manifest's size and checksum."""
    return (
        f"{path}: damaged (expected {expected[0]} bytes with checksum {expected[1]:08x}, got "
        f"{found[0]} with {found[1]:08x})"
    )


class Writer(StorageWriter):
    """Writes the files of a checkpoint into `path`, on a disk or behind a URL.

    Args:
        path: the folder that `layout.draft` created.
        watched: makes the context in which this rank writes its own part.

    Attributes:
        written: size and checksum, by name, of each file that this rank has written.
    """

    def __init__(
        self,
        path: Folder,
        watched: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.path = path
        self._watched = watched
        self.written: dict[str, list[int]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer belongs to one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks write in the same way."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan; make the folder where a file system needs one."""
        if isinstance(self.path, RemotePath):
            self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the name of its file."""
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank}.bin")
            for rank, plan in enumerate(plans)
        ]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether this names a checkpoint; a writer is given a path instead."""
        return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks, one after the other."""
        if sys.byteorder != "little":
            raise RuntimeError("checkpoints are little-endian, and this machine is not")
        results = []
        with self._watched(), open_counted(self.path / plan.storage_data, self.written) as stream:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    raise TypeError(f"checkpoint: {item.index.fqn!r}: expected a tensor")
                at, tensor = stream.size, planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                stream.write(raw_bytes(tensor))
                place = plan.storage_data, at
                results.append(WriteResult(item.index, stream.size - at, place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index. On one rank."""
        places = {one.index: one.storage_data for part in results for one in part}
        content = index_text(metadata, places)
        with open_counted(self.path / INDEX, self.written) as stream:
            stream.write(content)

    def storage_meta(self) -> None:
        """Return nothing, so that the index depends only on the tensors."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in the order of its elements, without a copy where possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: Any = flat.view(torch.uint8).numpy()
    return memoryview(view)

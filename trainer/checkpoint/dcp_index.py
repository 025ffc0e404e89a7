# SPDX-License-Identifier: MIT
"""The files of a checkpoint: raw bytes of tensors, and a JSON index of where they are.

torch.distributed.checkpoint plans who writes and reads which part of which tensor, so that a
checkpoint loads at any world size. Its own files are pickles, of the index and of every tensor;
whoever can write such a file can run code in whoever reads it. So the files here hold no pickle:

  rank-R.bin   the tensors' parts that rank R wrote, one after the other, contiguous, little-endian
  index.json   {"tensors": {NAME: {"dtype", "size", "chunks": [[offsets, sizes, file, at], ...]}}}

A chunk is a block of a tensor: its first element, its size, its file and its first byte in there.
The chunks of a file lie side by side and fill it, and the chunks of a tensor have as many elements
as the tensor. So an index cannot claim more than the files hold, and what it claims is checked
before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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

from trainer.checkpoint.layout import data_folder, read_manifest
from trainer.checkpoint.storage import (
    Folder,
    RemotePath,
    check_regular,
    open_counted,
    read_bounded,
)
from trainer.runtime.atomic_files import parse_json

INDEX = "index.json"
# Room for 500,000 chunks; as Python objects they take twenty times as much.
INDEX_BYTES = 32 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_MAX_DIMS = 8
_MAX_NAME = 1024
_FILE = re.compile(r"rank-\d{1,7}\.bin")
# What is held in memory beside the tensor that is read.
_PART_BYTES = 64 << 20


class Chunk(NamedTuple):
    """A block of a tensor in a file: its size, and where its bytes begin."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    file: str
    at: int

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.sizes) * self.dtype.itemsize


def parse_index(content: bytes, file_bytes: Mapping[str, int]) -> metadata.Metadata:
    """Return the index that `content` holds, with a `Chunk` for every block.

    Args:
        content: the text of an index, written by anyone.
        file_bytes: the size of every file that it may name.

    Raises:
        ValueError: it is no index, or claims what the files do not hold.
    """
    found = parse_json(content)
    tensors = found.get("tensors") if isinstance(found, dict) else None
    if not isinstance(tensors, dict):
        raise ValueError("expected an object with 'tensors'")
    held: dict[str, Any] = {}
    places: dict[metadata.MetadataIndex, Chunk] = {}
    for name, entry in tensors.items():
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(f"tensor {name!r:.80}: expected a name of {_MAX_NAME} letters at most")
        try:
            held[name], own = _parse_tensor(entry)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"tensor {name!r:.200}: {str(error)!s:.200}") from error
        for offsets, chunk in own.items():
            places[metadata.MetadataIndex(name, offsets)] = chunk
    _check_files(places.values(), file_bytes)
    return metadata.Metadata(state_dict_metadata=held, storage_data=places)


def _parse_tensor(entry: Any) -> tuple[Any, dict[tuple[int, ...], Chunk]]:
    """Return one tensor's description and its chunks by their first element."""
    if not isinstance(entry, dict) or entry.get("dtype") not in _DTYPES:
        raise ValueError("expected a tensor of a dtype that checkpoints hold")
    dtype, size = _DTYPES[entry["dtype"]], _whole_numbers(entry["size"])
    places: dict[tuple[int, ...], Chunk] = {}
    blocks = []
    for parts in entry["chunks"]:
        offsets, sizes = _whole_numbers(parts[0]), _whole_numbers(parts[1])
        if not len(offsets) == len(sizes) == len(size) or any(
            start + length > limit
            for start, length, limit in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"a chunk of size {sizes} at {offsets} is outside of {size}")
        if not isinstance(parts[2], str) or not _FILE.fullmatch(parts[2]):
            raise ValueError(f"a chunk in a file called {parts[2]!r:.80}, expected rank-R.bin")
        (at,) = _whole_numbers(parts[3:4])
        if offsets in places:
            raise ValueError(f"two chunks at {offsets}")
        places[offsets] = Chunk(sizes=sizes, dtype=dtype, file=parts[2], at=at)
        blocks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    if sum(math.prod(chunk.sizes) for chunk in places.values()) != math.prod(size):
        raise ValueError(f"its chunks do not make up a tensor of size {size}")
    properties = metadata.TensorProperties(dtype=dtype)
    return metadata.TensorStorageMetadata(properties, torch.Size(size), blocks), places


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Return a list of sizes or offsets as a tuple."""
    if not isinstance(values, list) or len(values) > _MAX_DIMS:
        raise ValueError(f"expected a list of up to {_MAX_DIMS} whole numbers, got {values!r:.80}")
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"expected whole numbers >= 0, got {values!r:.80}")
    return tuple(values)


def _check_files(chunks: Any, file_bytes: Mapping[str, int]) -> None:
    """Check that chunks lie side by side in their files and fill them."""
    ends = dict.fromkeys(file_bytes, 0)
    for chunk in sorted(chunks, key=lambda one: (one.file, one.at, one.num_bytes)):
        if ends.get(chunk.file) != chunk.at:
            raise ValueError(f"byte {chunk.at} of {chunk.file!r}: no chunk begins there")
        ends[chunk.file] += chunk.num_bytes
    for name, end in ends.items():
        if end != file_bytes[name]:
            raise ValueError(f"{name!r}: expected {file_bytes[name]} bytes in chunks, got {end}")


class TensorsOnly:
    """A planner's refusal of whatever is no tensor, which torch would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse."""
        raise ValueError(f"{read_item.storage_index.fqn!r:.200} is no tensor; nothing else is read")


class Planner(TensorsOnly, DefaultLoadPlanner):
    """Plans the reads of whole tensors by their names."""


class Reader(StorageReader):
    """Reads the checkpoint at `path`, on a disk or behind a URL.

    Raises:
        ValueError: `path` is no complete checkpoint, or its manifest is damaged.
    """

    def __init__(self, path: Folder) -> None:
        super().__init__()
        self.checkpoint = path
        self.manifest = read_manifest(path)
        self.path = data_folder(path, self.manifest)
        self._chunks: dict[Any, Chunk] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the index.

        Raises:
            ValueError: it, or a file that it names, is missing, damaged or not a plain file.
        """
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
        return index

    def set_up_storage_reader(
        self, metadata: metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep where the chunks are."""
        self._chunks = metadata.storage_data

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader is of one checkpoint."""

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
            with (self.path / name).open("rb") as stream:
                for chunk, item in sorted(items, key=lambda one: one[0].at):
                    target = planner.resolve_tensor(item).detach()
                    _read_block(stream, chunk, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_block(stream: Any, chunk: Chunk, item: ReadItem, target: Tensor) -> None:
    """Copy a block of a chunk into `target`, which has the block's size and any dtype and device.

    Only the rows of the block are read, some at a time.
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
    """Say how the bytes of a file differ from what the manifest says of them."""
    return (
        f"{path}: damaged (expected {expected[0]} bytes with checksum {expected[1]:08x}, got "
        f"{found[0]} with {found[1]:08x})"
    )


class Writer(StorageWriter):
    """Writes the files of a checkpoint into `path`, on a disk or behind a URL.

    Attributes: written, the size and checksum of each file that this rank has written, by name.
    """

    def __init__(self, path: Folder) -> None:
        super().__init__()
        self.path = path
        self.written: dict[str, list[int]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is of one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks write alike."""

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
        with open_counted(self.path / plan.storage_data, self.written) as stream:
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
        entries: dict[str, Any] = dict(metadata.state_dict_metadata)
        tensors = {
            name: {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "size": list(entry.size),
                "chunks": list(_chunks(name, entry, places)),
            }
            for name, entry in entries.items()
        }
        content = json.dumps({"tensors": tensors}, separators=(",", ":")).encode()
        if len(content) > INDEX_BYTES:
            raise ValueError(
                f"checkpoint: expected an index of {INDEX_BYTES} bytes at most, got {len(content)}"
            )
        with open_counted(self.path / INDEX, self.written) as stream:
            stream.write(content)

    def storage_meta(self) -> None:
        """Return nothing: the same tensors have the same index, wherever and whenever written."""


def _chunks(name: str, entry: Any, places: Mapping[Any, tuple[str, int]]) -> Iterator[list[Any]]:
    """Yield the chunks of a tensor as the index holds them."""
    for chunk in entry.chunks:
        file, at = places[metadata.MetadataIndex(name, chunk.offsets)]
        yield [list(chunk.offsets), list(chunk.sizes), file, at]


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in the order of its elements, copied only where they must be."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: Any = flat.view(torch.uint8).numpy()
    return memoryview(view)

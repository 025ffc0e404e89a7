# SPDX-License-Identifier: MIT
"""The index of a checkpoint: which tensors it holds, and where in which file their bytes are.

torch.distributed.checkpoint plans who writes and reads which part of which tensor, so that a
checkpoint loads at any world size. Its own files are pickles, of the index and of every tensor;
whoever can write such a file can run code in whoever reads it. So the files here hold no pickle:

  rank-R.bin   the tensors' parts that rank R wrote, one after the other, contiguous, little-endian
  index.json   {"tensors": {NAME: {"dtype", "size", "chunks": [[offsets, sizes, file, at], ...]}}}

A chunk is a block of a tensor: its first element, its size, its file and its first byte in there.
The chunks of a file lie side by side and fill it, and the chunks of a tensor hold each of its
elements once. So an index cannot claim more than the files hold, and what it claims is checked
before anything is allocated.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata

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
# Tables are cut into rows and columns at most.
_MAX_CUT_DIMS = 3
_MAX_NAME = 1024
_FILE = re.compile(r"rank-\d{1,7}\.bin")


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
    with _without_collections():
        return _parse(parse_json(content), file_bytes)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Let Python not look for circles inside the block: the many objects of an index have none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parse(found: Any, file_bytes: Mapping[str, int]) -> metadata.Metadata:
    """Return the index that JSON holds."""
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
        fits = len(offsets) == len(sizes) == len(size)
        if fits and sizes != size:  # a block as large as the tensor can only begin where it does
            fits = all(
                start + length <= limit
                for start, length, limit in zip(offsets, sizes, size, strict=True)
            )
        elif fits:
            fits = not any(offsets)
        if not fits:
            raise ValueError(f"a chunk of size {sizes} at {offsets} is outside of {size}")
        if not isinstance(parts[2], str) or not _FILE.fullmatch(parts[2]):
            raise ValueError(f"a chunk in a file called {parts[2]!r:.80}, expected rank-R.bin")
        (at,) = _whole_numbers(parts[3:4])
        if offsets in places:
            raise ValueError(f"two chunks at {offsets}")
        places[offsets] = Chunk(sizes=sizes, dtype=dtype, file=parts[2], at=at)
        blocks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    _check_cover(size, {offsets: chunk.sizes for offsets, chunk in places.items()})
    properties = metadata.TensorProperties(dtype=dtype)
    return metadata.TensorStorageMetadata(properties, torch.Size(size), blocks), places


def _check_cover(size: tuple[int, ...], blocks: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
    """Check that blocks, size by first element, hold each element of a tensor once.

    The corners of a block, with alternating signs, say where its elements begin and end. Where two
    blocks meet they cancel, so the blocks make up the tensor if and only if what is left are the
    tensor's own corners. Unlike comparing the blocks with each other, this takes time in proportion
    to their number.
    """
    if len(blocks) == 1 and (0,) * len(size) in blocks and size in blocks.values():
        return  # as most tensors of most checkpoints are
    cut = [dim for dim in range(len(size)) if any(one[dim] != size[dim] for one in blocks.values())]
    if len(cut) > _MAX_CUT_DIMS:
        raise ValueError(
            f"expected chunks along {_MAX_CUT_DIMS} dimensions at most, got {len(cut)}"
        )
    left: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(size), size)
    for sign, (offsets, sizes) in [(-1, whole), *((1, block) for block in blocks.items())]:
        if not math.prod(sizes):
            continue
        edges = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in cut]
        for corner in itertools.product(*edges):
            left[tuple(at for at, _ in corner)] += sign * math.prod(turn for _, turn in corner)
    if any(left.values()):
        raise ValueError(f"its chunks do not make up a tensor of size {size}, each element once")


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Return a list of sizes or offsets as a tuple."""
    if not isinstance(values, list) or len(values) > _MAX_DIMS:
        raise ValueError(f"expected a list of up to {_MAX_DIMS} whole numbers, got {values!r:.80}")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 62:
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


def index_text(held: metadata.Metadata, places: Mapping[Any, tuple[str, int]]) -> bytes:
    """Return the text of an index.

    Args:
        held: the tensors and their chunks.
        places: of every chunk its file and its first byte in there.

    Raises:
        ValueError: it would be larger than what is read.
    """
    entries: dict[str, Any] = dict(held.state_dict_metadata)
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
    return content


def _chunks(name: str, entry: Any, places: Mapping[Any, tuple[str, int]]) -> Iterator[list[Any]]:
    """Yield the chunks of a tensor as the index holds them."""
    for chunk in entry.chunks:
        file, at = places[metadata.MetadataIndex(name, chunk.offsets)]
        yield [list(chunk.offsets), list(chunk.sizes), file, at]

# SPDX-License-Identifier: MIT
"""The index of a checkpoint: which tensors it has and where in which file their bytes are.

torch.distributed.checkpoint keeps it as a pickle. It is read by an unpickler that knows the index's
own classes and nothing else, after its bytes were compared with the manifest's checksum.
"""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils import serialization

from trainer.checkpoint.layout import data_folder, read_manifest
from trainer.checkpoint.storage import Files, Folder, RemotePath

INDEX = ".metadata"
_SAVING: Any = serialization.config


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


class IndexUnpickler(pickle.Unpickler):
    """Reads a checkpoint's index; refuses every name that an index does not hold."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what an index may name."""
        if (module_name, global_name) in _INDEX_OBJECTS:
            return _INDEX_OBJECTS[module_name, global_name]
        value = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        raise ValueError(
            f"the index names {module_name}.{global_name}, which no checkpoint index holds"
        )


class Reader(filesystem.FileSystemReader):
    """Reads the checkpoint at `path`, on a disk or behind a URL.

    Raises:
        ValueError: `path` is no complete checkpoint, or its manifest is damaged.
    """

    def __init__(self, path: Folder) -> None:
        super().__init__(".")
        self.checkpoint = path
        self.manifest = read_manifest(path)
        self.fs: Any = Files()
        self.path: Any = data_folder(path, self.manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the index.

        Raises:
            ValueError: it is missing, damaged, or names what no index does.
        """
        path = self.path / INDEX
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ValueError(
                f"{self.checkpoint}: not a checkpoint, its index {INDEX} is missing"
            ) from None
        expected = self.manifest["files"].get(INDEX)
        found = [len(content), zlib.crc32(content)]
        if expected is not None and found != expected:
            raise ValueError(f"{describe_damage(path, expected, found)}; use an older checkpoint")
        try:
            index = IndexUnpickler(io.BytesIO(content)).load()
        except (pickle.UnpicklingError, EOFError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: damaged ({error}); use an older checkpoint") from error
        if index.storage_meta is None:
            index.storage_meta = metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def describe_damage(path: Folder, expected: list[int], found: list[int]) -> str:
    """Say how the bytes of a file differ from what the manifest says of them."""
    return (
        f"{path}: damaged (expected {expected[0]} bytes with checksum {expected[1]:08x}, got "
        f"{found[0]} with {found[1]:08x})"
    )


class _Open(io.RawIOBase):
    """A stream that one tensor of many is written to: closing it leaves the file open."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def close(self) -> None:
        pass


class _Plain:
    """How tensors get into a file: as they are. torch would define a class for each of them."""

    def transform_save_stream(self, _: Any, raw_stream: Any) -> tuple[Any, list[str]]:
        return _Open(raw_stream), []


class Writer(filesystem.FileSystemWriter):
    """Writes the files of a checkpoint into `path`, on a disk or behind a URL.

    `fs.written` holds the size and checksum of what this rank has written.
    """

    def __init__(self, path: Folder) -> None:
        # Where there is no descriptor to sync, torch would sync every disk of the machine instead.
        super().__init__(".", sync_files=not isinstance(path, RemotePath))
        self.fs: Any = Files()
        self.path: Any = path
        self.transforms: Any = _Plain()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, each with one checksum, that of the manifest.

        torch's own, of every tensor, takes ten times as long as writing it into memory.
        """
        with _SAVING.patch("save.compute_crc32", False):
            return super().write_data(plan, planner)

    def storage_meta(self) -> None:
        """Return nothing: the same tensors have the same index, wherever and whenever written."""

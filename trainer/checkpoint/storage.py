# SPDX-License-Identifier: MIT
"""Folders of checkpoints, on a disk or behind a URL that fsspec understands (s3://, memory://).

A local folder is a `pathlib.Path`. A `RemotePath` answers the same questions for an object store,
where a folder is no more than a common beginning of names: nothing can be renamed in one step, but
one object is replaced in one step, which is what committing a checkpoint there rests on.

fsspec is a dependency of torch.distributed.checkpoint's own remote files; the file system of a URL
(s3fs for s3://) is installed by whoever uses it.
"""

from __future__ import annotations

import contextlib
import io
import os
import uuid
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from torch.distributed.checkpoint.filesystem import FileSystemBase


class RemotePath:
    """A name below a URL: the part of `pathlib.Path` that checkpoints need.

    Raises:
        ValueError: no file system is known, or installed, for the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.protocol, _, self._inside = self.url.partition("://")
        try:
            self._files = fsspec.filesystem(self.protocol)
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"{url}: no file system for {self.protocol}:// ({error}); install the package that "
                "fsspec names for it"
            ) from error

    def __str__(self) -> str:
        """Return the URL."""
        return self.url

    def __repr__(self) -> str:
        """Return the URL, as it would be written."""
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has the same URL."""
        return isinstance(other, RemotePath) and self.url == other.url

    def __lt__(self, other: RemotePath) -> bool:
        """Order by URL."""
        return self.url < other.url

    def __hash__(self) -> int:
        """Hash the URL."""
        return hash(self.url)

    def __truediv__(self, name: str) -> RemotePath:
        """Return the name inside this one."""
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self._inside).name

    @property
    def parent(self) -> RemotePath:
        """All but the last part."""
        return RemotePath(f"{self.protocol}://{PurePosixPath(self._inside).parent}")

    def with_name(self, name: str) -> RemotePath:
        """Return the same with another last part."""
        return self.parent / name

    def exists(self) -> bool:
        """Return whether there is such an object, or one below it."""
        self._files.invalidate_cache()
        return self._files.exists(self.url)

    def is_file(self) -> bool:
        """Return whether there is such an object."""
        self._files.invalidate_cache()
        return self._files.isfile(self.url)

    def is_dir(self) -> bool:
        """Return whether there are objects below it."""
        self._files.invalidate_cache()
        return self._files.isdir(self.url)

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is directly below it."""
        self._files.invalidate_cache()
        names = self._files.ls(self.url, detail=False)
        yield from (self / PurePosixPath(name).name for name in names)

    def open(self, mode: str = "rb") -> Any:
        """Open the object."""
        return self._files.open(self.url, mode)

    def read_bytes(self) -> bytes:
        """Return the object's content."""
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the object's content as text."""
        return self.read_bytes().decode(encoding)

    def create(self, content: bytes) -> None:
        """Write the object unless there is one."""
        try:
            self._files.pipe_file(self.url, content, mode="create")
        except (OSError, NotImplementedError, TypeError, ValueError):
            # There is one, or the file system cannot ask for that.
            if not self.exists():
                self._files.pipe_file(self.url, content)

    def unlink(self) -> None:
        """Remove the object."""
        self._files.rm_file(self.url)

    def rename(self, target: RemotePath) -> RemotePath:
        """Copy the object to `target` and remove it; not in one step."""
        self._files.mv(self.url, target.url)
        return target

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do what a file system with folders needs before objects can be written."""
        self._files.makedirs(self.url, exist_ok=exist_ok or not parents)

    def remove_all(self) -> None:
        """Remove everything below it."""
        self._files.rm(self.url, recursive=True)


Folder = Path | RemotePath


def locate(text: str | Path) -> Folder:
    """Return the folder that `text` names: a URL has '://' in it."""
    return RemotePath(text) if isinstance(text, str) and "://" in text else Path(text)


def sync_folder(path: Folder) -> None:
    """Wait until the names in a local folder are on its disk."""
    if isinstance(path, RemotePath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Folder, content: bytes) -> None:
    """Write a whole file; on a disk, wait until it is there."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        if isinstance(path, Path):
            os.fsync(file.fileno())


def create_once(path: Folder, content: bytes) -> None:
    """Write a small file unless there is one; of several who try at once, one succeeds.

    Who succeeded is seen by reading it: object stores differ in how they say that they refuse. One
    that cannot refuse keeps the last.
    """
    if isinstance(path, RemotePath):
        path.create(content)
        return
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        write_durably(draft, content)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except PermissionError:  # a file system without links
        if not path.exists():
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


class Files(FileSystemBase):
    """The file system of torch.distributed.checkpoint over either kind of folder.

    written: bytes and CRC-32 of every file written, by name, taken from the bytes on their way, so
    that nothing has to be read (or, from an object store, fetched) again.
    """

    def __init__(self) -> None:
        self.written: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """Open `path`, counting what is written."""
        with path.open(mode) as stream:
            if "w" not in mode:
                yield stream
                return
            counted = _Counted(stream)
            try:
                yield counted
            except RuntimeError as error:
                # torch.save says only where its file stopped, not that the disk is full.
                raise counted.error or error from None
            self.written[path.name] = [counted.size, counted.checksum]

    def concat_path(self, path: Any, suffix: str) -> Any:
        """Return the name inside `path`."""
        return path / suffix

    def init_path(self, path: Any) -> Any:
        """Return `path` as it is."""
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file."""
        path.rename(new_path)
        self.written[new_path.name] = self.written.pop(path.name)

    def mkdir(self, path: Any) -> None:
        """Make a folder."""
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether this is a folder of one of the two kinds."""
        return isinstance(checkpoint_id, Path | RemotePath)

    def exists(self, path: Any) -> bool:
        """Return whether there is a file."""
        return path.exists()

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        path.unlink()


class _Counted(io.RawIOBase):
    """A stream that is written once, with the number and the CRC-32 of its bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.checksum = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        try:
            self._stream.write(part)
        except OSError as error:
            self.error = error
            raise
        self.size, self.checksum = self.size + len(part), zlib.crc32(part, self.checksum)
        return len(part)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()
        super().close()

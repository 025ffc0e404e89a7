# SPDX-License-Identifier: MIT
"""Folders of checkpoints, on a disk or behind a URL that fsspec understands (s3://, memory://).

A local folder is a `pathlib.Path`. A `RemotePath` has the same methods for an object store, where a
folder is only a common prefix of names. Nothing there can be renamed in one step. One object can be
replaced in one step, and committing a checkpoint relies on that.

fsspec is a dependency of torch.distributed.checkpoint's own remote files. The user installs the
file system of a URL (s3fs for s3://).
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec

from trainer.runtime.atomic_files import (
    create,
    partial_name,
    read_bytes,
    sync_folder,
    write_bytes,
)
from trainer.runtime.credentials import without_credentials

# Bytes that are written and added to the checksum at a time.
_PART_BYTES = 16 << 20


@contextlib.contextmanager
def told_if_slow(seconds: float, tell: Callable[[], object]) -> Iterator[None]:
    """Call `tell`, from another thread, if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RemotePath:
    """A name below a URL, with the methods of `pathlib.Path` that checkpoints need.

    Args:
        url: the URL.

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
                f"{self}: no file system for {self.protocol}:// ({error}); install the package "
                "that fsspec names for it"
            ) from error

    def __str__(self) -> str:
        """Return the URL without user and password; `address` has them."""
        return without_credentials(self.url)

    def __repr__(self) -> str:
        """Return the URL without user and password."""
        return f"RemotePath({str(self)!r})"

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
        """Return the same path with another last part."""
        return self.parent / name

    def exists(self) -> bool:
        """Return whether there is an object of this name, or one below it."""
        self._files.invalidate_cache()
        return self._files.exists(self.url)

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        self._files.invalidate_cache()
        return self._files.isfile(self.url)

    def is_dir(self) -> bool:
        """Return whether there are objects below it."""
        self._files.invalidate_cache()
        return self._files.isdir(self.url)

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the entries directly below it."""
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
        """Write the object unless it exists."""
        try:
            self._files.pipe_file(self.url, content, mode="create")
        except (OSError, NotImplementedError, TypeError, ValueError):
            # The object exists, or the file system does not support exclusive creation.
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
        """Create the folder on file systems that need one before objects are written."""
        self._files.makedirs(self.url, exist_ok=exist_ok or not parents)

    def remove_all(self) -> None:
        """Remove everything below it."""
        self._files.rm(self.url, recursive=True)


Folder = Path | RemotePath


def address(folder: Folder) -> str:
    """Return the text from which `locate` restores `folder`; unlike `str`, with any password."""
    return folder.url if isinstance(folder, RemotePath) else str(folder)


def locate(text: str | Path) -> Folder:
    """Return the folder that `text` names; a text with '://' is a URL."""
    return RemotePath(text) if isinstance(text, str) and "://" in text else Path(text)


def write_durably(path: Folder, content: bytes) -> None:
    """Write a whole file or nothing; on a disk, wait until the content is stored."""
    if isinstance(path, Path):
        write_bytes(path, content)
        return
    with path.open("wb") as file:
        file.write(content)


def read_bounded(path: Folder, limit: int) -> bytes:
    """Return the content of a file of a checkpoint.

    Raises:
        OSError: it cannot be read, or is a symbolic link, a pipe or a device.
        ValueError: it has more than `limit` bytes.
    """
    if isinstance(path, Path):
        return read_bytes(path, limit, follow=False)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path}: larger than {limit:,} bytes")
    return content


def check_regular(path: Folder) -> None:
    """Check that a file of a checkpoint, if it exists, is a regular file.

    Raises:
        ValueError: it is a symbolic link, which may lead anywhere, or a pipe, which may never end.
    """
    if isinstance(path, Path) and os.path.lexists(path):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a pipe, a device or a folder"
            raise ValueError(f"{path}: expected a file, got {kind}; put the file itself there")


def create_once(path: Folder, content: bytes) -> None:
    """Write a small file unless it exists; of several concurrent writers, one succeeds.

    The caller reads the file to see who succeeded, because object stores report a refusal in
    different ways. A store that cannot refuse keeps the last writer's file.
    """
    if isinstance(path, RemotePath):
        path.create(content)
        return
    draft = path.with_name(partial_name(path.name))
    try:
        write_bytes(draft, content)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except PermissionError:  # a file system without links
        if not path.exists():
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def open_counted(path: Folder, written: dict[str, list[int]]) -> Generator[Counted, None, None]:
    """Open a new file; on a disk, wait at the end until the content is stored.

    Args:
        path: the file, in a folder that exists.
        written: receives the number of bytes and their CRC-32 under the file's name. They are
            computed while writing, so nothing is read or fetched again.
    """
    with create(path) if isinstance(path, Path) else path.open("wb") as stream:
        counted = Counted(stream)
        yield counted
        stream.flush()
        if isinstance(path, Path):
            os.fsync(stream.fileno())
    written[path.name] = [counted.size, counted.checksum]


class Counted:
    """Writes into a stream and tracks the number of bytes and their CRC-32."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = self.checksum = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes in parts, because a remote file copies what it receives."""
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            self._stream.write(part)
            self.size, self.checksum = self.size + len(part), zlib.crc32(part, self.checksum)

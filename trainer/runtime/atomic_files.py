# SPDX-License-Identifier: MIT
"""Files that are whole or absent, and JSON from folders that anyone may have written.

Writing: a file is written beside its place under a new name, waits for the disk, and is renamed. A
reader sees the old file or the new one, also after a crash, and a symbolic link at its place is
replaced instead of followed. Every command writes its results through here.

Reading: only plain files (a pipe or a device would hang or never end), only up to a number of
bytes, and JSON only as deep as the interpreter can follow.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

# Larger than any file of settings or results; as Python objects it takes up to twenty times that.
MAX_JSON_BYTES = 32 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def json_ready(value: Any) -> Any:
    """Return `value` with every NaN and infinity replaced by None, which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> bytes:
    """Return `value` as indented JSON that any reader accepts: NaN and infinity become null."""
    return f"{json.dumps(json_ready(value), indent=2, allow_nan=False)}\n".encode()


@contextlib.contextmanager
def open_atomic(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that takes its place at `path` when the block ends, and not if it raises.

    Args:
        path: the place; its folder exists.
        mode: `wb`, or `w` for UTF-8 text.
    """
    partial = path.with_name(partial_name(path.name))
    file = create(partial, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def partial_name(name: str) -> str:
    """Return a new name for a file that is not whole yet."""
    return f".{name}.{secrets.token_hex(6)}.partial"


def is_partial(name: str) -> bool:
    """Return whether `name` is one that a process which died may have left."""
    return name.startswith(".") and name.endswith(".partial")


def create(path: Path, mode: str = "wb") -> IO[Any]:
    """Open a new file.

    Raises:
        FileExistsError: there is one, or a link, even one that leads nowhere.
    """
    descriptor = os.open(path, _NEW, 0o666)
    return os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with open_atomic(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as `to_json` gives it, whole or not at all."""
    write_bytes(path, to_json(value))


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES, follow: bool = True) -> bytes:
    """Return the content of a plain file.

    Args:
        path: the file.
        limit: of its bytes.
        follow: whether it may be a symbolic link.

    Raises:
        OSError: it cannot be read, or is a pipe, a device, a folder or (unless `follow`) a link.
        ValueError: it is larger than `limit`.
    """
    descriptor = os.open(path, _READ | (0 if follow else os.O_NOFOLLOW))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"larger than {limit:,} bytes")
    return content


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES, follow: bool = True) -> Any:
    """Return the value in a JSON file; arguments and failures as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, limit, follow))

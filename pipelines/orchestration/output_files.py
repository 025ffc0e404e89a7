# SPDX-License-Identifier: MIT
"""Writing into folders that others may write into, too: links that were planted are not followed.

Files that are written whole go through `trainer/runtime/atomic_files.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TextIO

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: Path) -> None:
    """Remove a folder or a file, as far as that is possible; of a symbolic link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fresh_folder(path: Path) -> Path:
    """Make an empty folder in the place of whatever is there, and return it."""
    remove(path)
    path.mkdir(parents=True)
    return path


def open_log(path: Path) -> TextIO:
    """Open a file to add lines to. A symbolic link in its place is replaced by a file."""
    try:
        file = os.open(path, _APPEND, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        path.unlink()
        file = os.open(path, _APPEND, 0o666)
    return open(file, "a", encoding="utf-8")

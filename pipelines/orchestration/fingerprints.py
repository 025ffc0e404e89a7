# SPDX-License-Identifier: MIT
"""Short names for content: what a stage was made from, and whether that is still the same.

Large files are known by their size, their first and their last 64 KiB. The last holds a Parquet
file's footer, with the place and the statistics of every column, and a zip archive's directory; a
change that leaves all of it as it was is not seen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_PART = 1 << 16


def of_values(values: Any) -> str:
    """Return a fingerprint of JSON data; mappings with the same entries have the same."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_path(path: Path) -> str:
    """Return a fingerprint of a file, or of all files below a folder; empty if there is nothing."""
    if path.is_file():
        return of_values(_of_file(path))
    if path.is_dir():
        return of_values({name: _of_file(path / name) for name in files_below(path)})
    return ""


def files_below(folder: Path) -> dict[str, int]:
    """Return the bytes of each file below `folder` by its relative name, in order."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        # Hidden files are locks, and what has not been finished.
        if path.is_file() and not any(part.startswith(".") for part in name.parts[:-1]):
            found[str(name)] = path.stat().st_size
    return found


def _of_file(path: Path) -> list[Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_PART))
        if size > _PART:
            file.seek(max(_PART, size - _PART))
            digest.update(file.read(_PART))
    return [size, digest.hexdigest()[:16]]

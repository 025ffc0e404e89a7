# SPDX-License-Identifier: MIT
"""Files with one JSON object a line, which survive a crash and a resume."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.runtime.atomic_files import json_ready, parse_json, read_bytes, write_text

# A run of ten million steps that writes every hundredth one.
_MAX_BYTES = 256 << 20
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line of JSON. A symbolic link in the place of the file is replaced."""
    try:
        descriptor = os.open(path, _APPEND, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        path.unlink()
        descriptor = os.open(path, _APPEND, 0o666)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(json.dumps(json_ready(record), allow_nan=False) + "\n")


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of lines, in order; none if there is no such file."""
    return [record for _, record in _records(path)]


def last_step(path: Path) -> int:
    """Return the largest step of a file of lines; 0 if there is none."""
    return max((record["step"] for _, record in _records(path)), default=0)


def truncate(path: Path, step: int) -> dict[str, Any]:
    """Remove lines beyond `step` or damaged by a crash; return the last that stays, or {}."""
    if not path.exists():
        return {}
    kept, latest = [], {}
    for line, record in _records(path):
        if record["step"] <= step:
            kept.append(line + "\n")
            latest = record
    write_text(path, "".join(kept))
    return latest


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is a record of a step, and the record.

    A crash cuts the last line short, and one of the machine leaves any bytes where lines were.
    """
    if not path.exists():
        return
    for line in read_bytes(path, _MAX_BYTES).decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield line, record

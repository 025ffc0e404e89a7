# SPDX-License-Identifier: MIT
"""Files of numbers: JSON that any reader accepts, JSON lines that survive a crash and a resume."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def json_ready(value: Any) -> Any:
    """Return `value` with every NaN and infinity replaced by None, which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, NaN as null, atomically: a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(
        json.dumps(json_ready(value), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    os.replace(partial, path)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(json_ready(record), allow_nan=False) + "\n")


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
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
    return latest


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is a record of a step, and the record.

    A crash cuts the last line short, and one of the machine leaves any bytes where lines were.
    """
    if not path.exists():
        return
    for line in path.read_bytes().decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield line, record

# SPDX-License-Identifier: MIT
"""Files of numbers: JSON that any reader accepts, JSON lines that survive a crash and a resume."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
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
    step = 0
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut short by a crash
                step = max(step, json.loads(line)["step"])
    return step


def truncate(path: Path, step: int) -> dict[str, Any]:
    """Remove lines beyond `step` or cut short by a crash; return the last that stays, or {}."""
    latest: dict[str, Any] = {}
    if not path.exists():
        return latest
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if record["step"] <= step:
                kept.append(line + "\n")
                latest = record
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
    return latest

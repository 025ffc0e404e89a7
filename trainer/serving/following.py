# SPDX-License-Identifier: MIT
"""Which model serves: a folder of a model, or a store of published models and its `serving.json`.

A store is what nights keep (`DIR/models/DATE/checkpoint`, `DIR/serving.json`). The pointer is read
again and again. A model that cannot be loaded leaves the one before in its place.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from trainer.runtime.atomic_files import read_json

POINTER = "serving.json"


def is_store(place: Path) -> bool:
    """Return whether `place` is a store of published models."""
    return (place / POINTER).is_file()


def model_place(place: Path) -> Path:
    """Return the folder of the model that serves.

    Raises:
        ValueError: the pointer is damaged, or names no date.
    """
    if not is_store(place):
        return place
    try:
        found = read_json(place / POINTER)
        date = found["model"]
        if datetime.date.fromisoformat(date).isoformat() != date:
            raise ValueError(f"got {date!r:.40}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place / POINTER}: expected the date of a model ({error})") from error
    return place / "models" / date / "checkpoint"

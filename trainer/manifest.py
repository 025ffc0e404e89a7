# SPDX-License-Identifier: MIT
"""The folder of a run's checkpoints: which are complete, what they say of themselves, which go.

A checkpoint is a folder `step-N` with a manifest in it. Everything else carries a name that begins
with a dot and is nobody's checkpoint, with one exception: `.step-N.replaced` stands in for a step
that was being written again when the process died, so that there is a complete checkpoint at every
moment, also where only one is kept.

  .step-N.incomplete  being written       .step-N.replaced  the earlier step-N, until the new one is
  .step-N.removed     being removed                         in its place
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# What `checkpoint.save` adds to every manifest, and what a run needs to go on from it.
SAVED: dict[str, type | tuple[type, ...]] = {"step": int, "world_size": int, "files": dict}
RUN: dict[str, type | tuple[type, ...]] = {
    **SAVED,
    "rows": int,
    "epoch": int,
    "position": (dict, type(None)),
    "train_seconds": (int, float),
    "wait_seconds": (int, float),
    "precision": dict,
    "ranks": list,
    "config": dict,
    "families": dict,
}
_NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.replaced")
_SHOWN = 5


def complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints below `directory`, oldest first."""
    found: dict[int, Path] = {}
    # Sorted, so that `step-N` comes after `.step-N.replaced` and takes its place.
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match[1] or match[2])] = path
    return [found[step] for step in sorted(found)]


def commit(temporary: Path, target: Path) -> None:
    """Rename the finished `temporary` to `target`, replacing an earlier one. On one rank."""
    replaced = target.with_name(f".{target.name}.replaced")
    if (target / MANIFEST).is_file():
        _remove(replaced)
        target.rename(replaced)
    _remove(target)
    temporary.rename(target)
    _remove(replaced)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest complete checkpoints. On one rank."""
    for path in complete(directory)[:-keep]:
        # Renamed first: half a checkpoint must not look like one.
        removed = path.with_name(f".{path.name.lstrip('.')}.removed")
        _remove(removed)
        path.rename(removed)
        _remove(removed)


def recover(directory: Path) -> None:
    """Put back or remove what a process that died has left. Only for who holds the run's lock."""
    if not directory.is_dir():
        return
    for path in complete(directory):
        if path.name.startswith("."):
            target = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
            _remove(target)
            path.rename(target)
    for ending in ("incomplete", "replaced", "removed"):
        for path in directory.glob(f".step-*.{ending}"):
            _remove(path)


def read_manifest(
    path: Path, required: Mapping[str, type | tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`.

    required: the keys, and the type of each, that it must have; None: `SAVED`.

    Raises:
        ValueError: not a complete checkpoint, or its manifest is damaged or lacks something.
    """
    place = path / MANIFEST
    try:
        manifest = json.loads(place.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(_describe(path)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{place}: damaged ({error}); use an older checkpoint") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{place}: damaged (not a mapping); use an older checkpoint")
    for key, kind in (SAVED if required is None else required).items():
        value = manifest.get(key)
        if key not in manifest or not isinstance(value, kind) or isinstance(value, bool):
            found = f"got {value!r:.40}" if key in manifest else "it is missing"
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(
                f"{place}: damaged (key {key!r}: expected {names}, {found}); remove {path} to go "
                "on from an older checkpoint"
            )
    return manifest


def _describe(path: Path) -> str:
    """Say that `path` is no checkpoint, what is there instead, and where one is."""
    expected = f"{path}: expected a checkpoint (a folder step-N that holds {MANIFEST}) or a run's"
    if not path.exists():
        return f"{expected} folder, there is nothing; check the path"
    if not path.is_dir():
        return f"{expected} folder, got a file; name its folder"
    near = complete(path) or complete(path / "checkpoints") or complete(path.parent)
    if near:
        return f"{expected} folder, got neither; did you mean {near[-1]}?"
    if (path / "config.json").is_file():
        return (
            f"{expected} folder, got a run without a complete checkpoint; run its training again, "
            "it goes on where it can"
        )
    names = sorted(item.name for item in path.iterdir() if not item.name.startswith("."))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    inside = f"a folder with {', '.join(names[:_SHOWN])}{more}" if names else "an empty folder"
    return f"{expected} folder, got {inside}; pass the --output of a training run"


def _remove(path: Path) -> None:
    """Remove a folder, if it is there."""
    if path.exists():
        shutil.rmtree(path)

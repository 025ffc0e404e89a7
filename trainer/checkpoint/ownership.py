# SPDX-License-Identifier: MIT
"""A folder of checkpoints outside a run's own belongs to that run, before it holds any.

Two runs that were given the same folder would write, and remove, each other's checkpoints. So a run
leaves its name there before it trains, in one step that only one of several can win: a link on a
disk, an object created only if it is absent behind a URL. The name is a random one that the run
keeps in its own folder, so that it may be moved, and goes on after a crash at any moment.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from trainer.checkpoint.storage import Folder, create_once, read_bounded, write_durably
from trainer.runtime.atomic_files import parse_json

OWNER = ".owner.json"
RUN = ".run.json"
_MAX_BYTES = 1 << 16


def check_free(folder: Folder, output: Path) -> None:
    """Check that no other run than the one in `output` has `folder` for its checkpoints.

    Raises:
        ValueError: another one has; the message names it.
    """
    home = folder.parent
    if isinstance(home, Path) and home.resolve() != output.resolve() and _is_default(folder):
        raise ValueError(
            f"checkpoint.folder: {folder} is that of the run in {home}; choose another, or inherit "
            "from that run (--inherit.path)"
        )
    owner = _read(folder / OWNER)
    if owner is not None and (not owner.get("run") or owner["run"] != _name_of(output, owner)):
        other = owner.get("output", "(unknown)")
        raise ValueError(
            f"checkpoint.folder: {folder} belongs to the run in {other}; "
            f"choose another, or remove {folder / OWNER} if that run is no more"
        )


def take(folder: Folder, output: Path) -> None:
    """Make `folder` that of the run in `output`, which exists, for its checkpoints.

    Raises:
        ValueError: another run has it.
    """
    owner = _read(folder / OWNER)
    run = _name_of(output, owner) or uuid.uuid4().hex
    if not (_read(output / RUN) or {}).get("run"):
        write_durably(output / RUN, json.dumps({"run": run}).encode())
    if owner is None:
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"run": run, "output": str(output.resolve())}, indent=2)
        create_once(folder / OWNER, content.encode())
    check_free(folder, output)


def release(folder: Folder, output: Path) -> None:
    """Let others have `folder`, if it was that of the run in `output`."""
    owner = _read(folder / OWNER)
    if owner and owner.get("run") == _name_of(output, owner):
        (folder / OWNER).unlink()


def _is_default(folder: Folder) -> bool:
    """Return whether `folder` is where the run in the folder around it keeps its checkpoints."""
    return folder.name == "checkpoints" and (folder.parent / "config.json").is_file()


def _name_of(output: Path, owner: dict[str, Any] | None) -> str | None:
    """Return the name of the run in `output`, if it has one.

    A run whose file was lost, as by a copy without hidden files, is known by where it is.
    """
    own = (_read(output / RUN) or {}).get("run")
    if own is None and owner and owner.get("output") == str(output.resolve()):
        return owner.get("run")
    return own


def _read(path: Folder) -> dict[str, Any] | None:
    """Return a file of this module; None if there is none, {} if it is damaged."""
    if not path.is_file():
        return None
    try:
        found = parse_json(read_bounded(path, _MAX_BYTES))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}

# SPDX-License-Identifier: MIT
"""A checkpoint folder outside a run's own folder belongs to one run, even before it holds any.

Two runs with the same folder would overwrite and remove each other's checkpoints. So a run
registers its name there before it trains, in one atomic step that only one run can win. On a disk
that step is a hard link; behind a URL it is an object that is created only if it is absent. The
name is random and kept in the run's own folder. So the run's folder may be moved, and a run
continues after a crash at any moment.
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
    """Check that no run other than the one in `output` owns `folder`.

    Raises:
        ValueError: another run owns it; the message names that run.
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
    """Register the run in `output`, which exists, as the owner of `folder`.

    Raises:
        ValueError: another run owns it.
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
    """Remove the registration of `folder` if the run in `output` owns it."""
    owner = _read(folder / OWNER)
    if owner and owner.get("run") == _name_of(output, owner):
        (folder / OWNER).unlink()


def _is_default(folder: Folder) -> bool:
    """Return whether `folder` is the default checkpoint folder of the run in its parent folder."""
    return folder.name == "checkpoints" and (folder.parent / "config.json").is_file()


def _name_of(output: Path, owner: dict[str, Any] | None) -> str | None:
    """Return the name of the run in `output`, if it has one.

    A run whose name file is lost, as by a copy without hidden files, is identified by its path.
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

# SPDX-License-Identifier: MIT
"""The folder of a run's checkpoints: which are complete, and what their manifests hold.

A checkpoint is a folder `step-N` with a manifest in it. On a disk, all other folders have names
that begin with a dot and are no checkpoints. The exception is `.step-N.replaced`: it stands in for
a step that was being written again when the process died. So there is a complete checkpoint at
every moment, even if only one is kept.

  .step-N.incomplete  being written       .step-N.replaced  the earlier step-N, until the new one is
  .step-N.removed     being removed                         in its place

Behind a URL nothing can be renamed in one step. There the files are in `step-N/data-TOKEN/`. The
manifest names that folder and is written last, in one step. Writing a step again replaces only the
manifest.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.storage import (
    Folder,
    RemotePath,
    locate,
    read_bounded,
    write_durably,
)
from trainer.runtime.atomic_files import MAX_JSON_BYTES, parse_json, sync_folder

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
# Format of a checkpoint's files; other formats are refused.
FORMAT = 2
# Required keys: those that `dcp.save` adds to every manifest, and those that a run resumes from.
SAVED: dict[str, type | tuple[type, ...]] = {"step": int, "world_size": int, "files": dict}
RUN: dict[str, type | tuple[type, ...]] = {
    **SAVED,
    "rows": int,
    "epoch": int,
    "position": (dict, type(None)),
    "train_seconds": (int, float),
    "wait_seconds": (int, float),
    "padded_rows": int,
    "out_of_range": dict,
    "precision": dict,
    "ranks": list,
    "config": dict,
    "families": dict,
    "schema_fingerprint": str,
    "config_fingerprint": str,
    "routing_fingerprint": str,
    "telemetry": dict,
    "weights": dict,
    "dynamic_tables": dict,
}
_NAME = re.compile(r"step-(\d{1,18})|\.step-(\d{1,18})\.replaced")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_DATA_NAME = re.compile(r"data-[0-9a-f]{12}")
_MAX_TEXT = 200
_SHOWN = 5
_DATA = "data-"
_SEAL = "checksum"


def step_name(step: int) -> str:
    """Return the name of the checkpoint of `step`."""
    return f"step-{step}"


def checkpoint_folder(run: Folder, setting: str) -> Folder:
    """Return the folder of the checkpoints of the run in the folder `run`.

    Args:
        run: the run's folder.
        setting: `checkpoint.folder`: a URL, a folder, or empty. A relative folder is below the
            run's folder, so it does not depend on the working directory.
    """
    if "://" in setting:
        return locate(setting)
    if setting and Path(setting).is_absolute():
        return Path(setting)
    return run / (setting or CHECKPOINTS)


def complete(directory: Folder) -> list[Any]:
    """Return the complete checkpoints below `directory`, oldest first, as the same kind of path."""
    found: dict[int, Folder] = {}
    # Sorted, so that `step-N` comes after `.step-N.replaced` and takes its place.
    for path in _entries(directory):
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match[1] or match[2])] = path
    return [found[step] for step in sorted(found)]


def draft(target: Folder) -> Folder:
    """Create the folder in which the files of the checkpoint `target` are written. On one rank."""
    if isinstance(target, RemotePath):
        return target / f"{_DATA}{uuid.uuid4().hex[:12]}"
    temporary = target.with_name(f".{target.name}.incomplete")
    _remove(temporary)
    temporary.mkdir(parents=True)
    return temporary


def commit(place: Folder, target: Folder, content: Mapping[str, Any]) -> None:
    """Write the manifest into the folder from `draft` and make it the checkpoint. On one rank.

    Args:
        place: the folder from `draft`, with the files in it.
        target: the checkpoint's final path.
        content: content of the manifest.

    Raises:
        OSError: writing failed; then `place` is removed.
    """
    if isinstance(target, RemotePath):
        write_durably(target / MANIFEST, _seal({**content, "data": place.name}))
        _remove_other_data(target, place.name)
        return
    assert isinstance(place, Path)
    try:
        write_durably(place / MANIFEST, _seal(content))
        sync_folder(place)
    except OSError:
        discard(place)
        raise
    replaced = target.with_name(f".{target.name}.replaced")
    if (target / MANIFEST).is_file():
        _remove(replaced)
        target.rename(replaced)
    _remove(target)
    place.rename(target)
    sync_folder(target.parent)
    _remove(replaced)


def discard(place: Folder) -> None:
    """Remove the folder from `draft`; errors of the file system are ignored. On one rank."""
    with contextlib.suppress(OSError):
        _remove(place)


def remove(path: Folder) -> None:
    """Remove a checkpoint so that a partial one never looks complete. On one rank."""
    if isinstance(path, RemotePath):
        (path / MANIFEST).unlink()
        _remove(path)
        return
    removed = path.with_name(f".{path.name.lstrip('.')}.removed")
    _remove(removed)
    path.rename(removed)
    _remove(removed)


def recover(directory: Folder) -> None:
    """Restore or remove what a dead process has left. Requires the run's lock."""
    if isinstance(directory, RemotePath):
        for path in _entries(directory):
            if _NAME.fullmatch(path.name) and path.is_dir():
                if not (path / MANIFEST).is_file():
                    _remove(path)
                else:
                    with contextlib.suppress(ValueError):  # raised again when it is opened
                        # A checkpoint copied from a disk names no folder: its files are beside it.
                        _remove_other_data(path, read_manifest(path).get("data", ""))
        return
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


def data_folder(path: Folder, manifest: Mapping[str, Any]) -> Folder:
    """Return where the files of the checkpoint at `path` are.

    Raises:
        ValueError: the manifest names a folder that is not below `path`.
    """
    data = manifest.get("data")
    if not data:
        return path
    if not isinstance(data, str) or not _DATA_NAME.fullmatch(data):
        raise ValueError(
            f"{path / MANIFEST}: damaged (key 'data': {data!r:.80} is no folder of it)"
        )
    return path / data


def read_manifest(
    path: Folder, required: Mapping[str, type | tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`.

    Args:
        path: the checkpoint.
        required: required keys and the type of each; None means `SAVED`.

    Raises:
        ValueError: there is no complete checkpoint, or its manifest is damaged or incomplete.
    """
    place = path / MANIFEST
    try:
        manifest = parse_json(read_bounded(place, MAX_JSON_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(_describe(path)) from None
    except OSError as error:
        raise ValueError(f"{place}: cannot be read ({error}); use an older checkpoint") from error
    except ValueError as error:
        raise ValueError(f"{place}: damaged ({error}); use an older checkpoint") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{place}: damaged (not a mapping); use an older checkpoint")
    seal, found = manifest.pop(_SEAL, None), _checksum(manifest)
    if seal not in (None, found):
        raise ValueError(
            f"{place}: damaged (its content has the checksum {found}, expected {seal!r:.40}); use "
            f"an older checkpoint, or remove the key {_SEAL!r} if you have edited it"
        )
    # Format 1 had no number in the manifest.
    number = manifest.get("format", 1 if SAVED.keys() <= manifest.keys() else FORMAT)
    if number != FORMAT:
        raise ValueError(
            f"{place}: a checkpoint of format {number!r:.40}, this version reads format {FORMAT}; "
            "use the version that wrote it"
        )
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
        if isinstance(value, str) and not (len(value) <= _MAX_TEXT and value.isprintable()):
            raise ValueError(f"{place}: damaged (key {key!r}: got {value!r:.80})")
    _check_files(place, manifest["files"])
    return manifest


def _check_files(place: Folder, files: Mapping[str, Any]) -> None:
    """Check that the manifest's `files` are names with a size and a checksum each."""
    for name, entry in files.items():
        if not _FILE.fullmatch(name) or not isinstance(entry, list) or len(entry) != 2:
            raise ValueError(f"{place}: damaged (key 'files': got {name!r:.80}: {entry!r:.80})")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in entry):
            raise ValueError(f"{place}: damaged (key 'files': {name!r}: got {entry!r:.80})")


def _seal(content: Mapping[str, Any]) -> bytes:
    """Return a manifest's text with the checksum of its content."""
    plain = json.loads(json.dumps({**content, "format": FORMAT}))  # as read back: keys are text
    return json.dumps({**plain, _SEAL: _checksum(plain)}, indent=2).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a manifest's content, independent of formatting."""
    try:
        text = json.dumps(content, sort_keys=True)
    except RecursionError:
        return "none, it is nested too deeply"
    return f"{zlib.crc32(text.encode()):08x}"


def _describe(path: Folder) -> str:
    """Return why `path` is no checkpoint, what is there instead, and the nearest checkpoint."""
    expected = f"{path}: expected a checkpoint (a folder step-N that holds {MANIFEST}) or a run's"
    if not path.exists():
        return f"{expected} folder, there is nothing; check the path"
    if not path.is_dir():
        return f"{expected} folder, got a file; name its folder"
    near = complete(path) or complete(path / CHECKPOINTS) or complete(path.parent)
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


def _entries(directory: Folder) -> list[Any]:
    """Return the entries of `directory`, sorted by name; empty if there is no such folder."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_other_data(path: RemotePath, kept: str) -> None:
    """Remove the data below a remote checkpoint that its manifest does not name."""
    for item in _entries(path):
        if item.name.startswith(_DATA) and item.name != kept:
            _remove(item)


def _remove(path: Folder) -> None:
    """Remove a folder if it exists."""
    if isinstance(path, RemotePath):
        with contextlib.suppress(FileNotFoundError):
            path.remove_all()
    elif path.exists():
        shutil.rmtree(path)

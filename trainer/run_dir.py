# SPDX-License-Identifier: MIT
"""The folder of a run: claimed once, resumed if it is unfinished, never overwritten."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint.layout import checkpoint_folder, complete, recover
from trainer.checkpoint.ownership import RUN, check_free, release, take
from trainer.checkpoint.storage import Folder, address, locate
from trainer.config.config import TrainConfig, config_from_dict, to_dict, write_config
from trainer.runtime.atomic_files import is_partial, read_json, write_json
from trainer.runtime.credentials import without_credentials
from trainer.runtime.dict_diff import differences
from trainer.runtime.runtime import Runtime

CONFIG = "config.json"
METRICS = "metrics.json"
CURVES = "curves.jsonl"
EVALUATIONS = "evaluations.jsonl"
EVALUATION = "evaluation.json"
RANKS = "ranks.json"
TABLES = "tables.jsonl"
INHERITED = "inherit.json"
RECIPE_CHANGES = "recipe_changes.json"
# Settings that may differ between a run and its continuation; they change no result.
_FREE = {
    *(
        "telemetry",
        "export",
        "checkpoint",
        "loader.num_workers",
        "loader.prefetch_windows",
        "loader.pin_memory",
    ),
    *("runtime.timeout_seconds", "runtime.hang_seconds"),
    # How dense weights are distributed; checkpoints hold them whole, by name.
    *("parallel.dense", "parallel.zero", "parallel.bucket_megabytes"),
    *("parallel.find_unused_parameters", "parallel.compile"),
}
_LOCK = ".lock"
# Locked folders of this process; the system releases a lock when its process ends.
_held: dict[Path, int] = {}


def checkpoints_of(output: Path, config: TrainConfig) -> Folder:
    """Return the folder of the checkpoints of the run in `output`."""
    return checkpoint_folder(output, config.checkpoint.folder)


def note_changes(output: Path, recipe: TrainConfig, config: TrainConfig) -> None:
    """Write how a run's settings differ from its recipe's, for the run's report.

    A report cannot load the recipe itself: its code may be absent or untrusted.

    Args:
        output: the run's folder, which exists.
        recipe: the recipe without overrides.
        config: the run's configuration.
    """
    found = differences(to_dict(recipe), to_dict(config))
    settings = [{"setting": one.path, "recipe": one.old, "run": one.new} for one in found]
    write_json(output / RECIPE_CHANGES, {"recipe": config.recipe, "settings": settings})


def claim(output: Path, config: TrainConfig, runtime: Runtime) -> Folder | None:
    """Claim `output` for this run, and return the checkpoint to resume from, if any. Collective.

    Rank 0 inspects the folder, writes config.json and broadcasts its decision, so that no two ranks
    see different states.

    Args:
        output: the run's folder; it may not exist yet.
        config: the run's configuration.
        runtime: this process among the ranks.

    Raises:
        ValueError: the folder holds a finished run, a run of another configuration or other files;
            another process trains in it; or it cannot be written.
    """
    answer: list[Any] = [None, None]
    if runtime.is_first:
        try:
            found = _claim(output, config)
            answer[0] = None if found is None else address(found)
        except ValueError as error:
            answer[1] = str(error)
        except Exception as error:  # any file system's; the other ranks must not wait for ever
            answer[1] = _unusable(output, config.checkpoint.folder, error)
    dist.broadcast_object_list(answer, src=0)
    checkpoint, error = answer
    if error:
        raise ValueError(error)
    return None if checkpoint is None else locate(checkpoint)


def _unusable(output: Path, folder: str, error: Exception) -> str:
    """Return the message that names which of a run's two folders cannot be used."""
    cause = f"({str(error) or type(error).__name__})"
    if folder and str(output) not in str(error):
        return (
            f"checkpoint.folder: {folder} cannot be used {cause}; choose another, or give what its "
            "file system asks for"
        )
    if not isinstance(error, OSError):
        raise error
    return f"{output}: cannot be used as the run's folder {cause}; choose another --output"


def _claim(output: Path, config: TrainConfig) -> Folder | None:
    """Inspect `output` and write config.json. See `claim`."""
    if output.exists() and not output.is_dir():
        raise ValueError(
            f"{output}: expected a folder for the run, got a file; choose another --output"
        )
    if (output / METRICS).exists():
        raise ValueError(
            f"{output}: holds a finished run, which is never overwritten; choose another --output, "
            f"or read it with `python -m trainer.evaluate {output} --data PATH`"
        )
    if (output / CONFIG).exists():
        old = _read_config(output / CONFIG)
        changed = [str(one) for one in differences(old, to_dict(config), _FREE)]
        changed += _moved(output, old, config)
        if changed:
            raise ValueError(
                f"{output}: holds an unfinished run of another configuration "
                f"({'; '.join(changed[:5])}); resume it with the same settings, or choose "
                "another --output"
            )
        folder = checkpoints_of(output, config)
        locked = _lock(output)
        if config.checkpoint.folder:
            take(folder, output)
        if locked:
            recover(folder)
        found = complete(folder)
        if old["checkpoint"] != to_dict(config)["checkpoint"]:
            _note(output, config)  # names the folder of checkpoints from now on
        _leave(output, old, config)
        return found[-1] if found else None
    # A process that died while writing its configuration may have left a partial file.
    names = [path.name for path in output.iterdir()] if output.exists() else []
    if any(name not in (_LOCK, RUN) and not is_partial(name) for name in names):
        raise ValueError(
            f"{output}: is not empty and holds no run ({CONFIG} is missing); choose another "
            "--output"
        )
    folder = checkpoints_of(output, config)
    others = complete(folder)
    if others:
        raise ValueError(
            f"checkpoint.folder: {folder} holds checkpoints of another run ({others[-1].name}); "
            "choose another, or inherit from it (--inherit.path)"
        )
    check_free(folder, output)
    output.mkdir(parents=True, exist_ok=True)
    _lock(output)
    if config.checkpoint.folder:
        take(folder, output)
    _note(output, config)
    return None


def _note(output: Path, config: TrainConfig) -> None:
    """Write the run's configuration."""
    write_config(config, output / CONFIG)


def _lock(output: Path) -> bool:
    """Lock `output` against other processes until this process ends.

    Returns:
        Whether the lock is held; some file systems have no locks.

    Raises:
        ValueError: another process trains in the folder.
    """
    path = output.resolve() / _LOCK
    held = _held.get(path)
    if held is not None and path.exists() and os.path.samestat(os.stat(path), os.fstat(held)):
        return True
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise ValueError(
            f"{output}: another process trains in this folder; wait for it or end it, or choose "
            "another --output"
        ) from None
    except OSError:
        os.close(handle)
        return False
    _held[path] = handle
    return True


def _moved(output: Path, old: Any, config: TrainConfig) -> list[str]:
    """Return why the checkpoint folder cannot change: the old or the new one holds checkpoints.

    The list is empty where it may change. A run without checkpoints may move, as after a full disk.
    """
    was, now = _folder_of(old), _folder_of(to_dict(config))
    if was == now:
        return []
    if "://" in was:  # only the folder names that address, so nobody looks what is there
        return [f"checkpoint.folder: {without_credentials(was)!r}, now {now!r}"]
    held = [folder for folder in (was, now) if complete(checkpoint_folder(output, folder))]
    return (
        [f"checkpoint.folder: {was!r}, now {now!r}, with checkpoints in {held[0]!r}"]
        if held
        else []
    )


def _leave(output: Path, old: Any, config: TrainConfig) -> None:
    """Release the old checkpoint folder if the run has moved to another one."""
    was = _folder_of(old)
    if was and "://" not in was and was != _folder_of(to_dict(config)):
        with contextlib.suppress(Exception):  # any file system's; a failure does not hurt this run
            release(checkpoint_folder(output, was), output)


def _folder_of(old: dict[str, Any]) -> str:
    """Return the checkpoint folder that a configuration sets; empty: inside the run's folder."""
    settings = old.get("checkpoint")
    folder = settings.get("folder") if isinstance(settings, dict) else ""
    return folder if isinstance(folder, str) else ""


def _read_config(path: Path) -> dict[str, Any]:
    """Return the configuration that a run left in its folder, newer settings at their defaults."""
    try:
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, got {values!r:.40}")
    except ValueError as error:
        raise ValueError(
            f"{path}: damaged ({error}); put back the config of the newest checkpoint's "
            "manifest.json, remove it if the folder holds nothing else, or choose another --output"
        ) from error
    try:
        return to_dict(config_from_dict(values))
    except (ValueError, TypeError):
        return values  # of another version; the differences will say in what

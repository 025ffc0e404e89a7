# SPDX-License-Identifier: MIT
"""Stages: functions named after what they make, each made once and committed whole.

A stage writes into a folder that nobody reads until it is finished: its manifest is written last,
then the folder is renamed. The manifest lists what the artifact was made from, so that running
the same pipeline again skips what is there, and makes again what has changed and everything after.

  OUTPUT/DATE/STAGE/manifest.json   what it was made from, metrics, seconds, versions, files
  OUTPUT/DATE/.STAGE.unfinished/    being made; kept after a failure, so that training can resume
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.orchestration.fingerprints import files_below, of_path, of_values
from pipelines.orchestration.lock import Lock
from pipelines.orchestration.output_files import remove
from trainer.runtime.atomic_files import read_json, write_json
from trainer.runtime.credentials import without_credentials_in
from trainer.runtime.dict_diff import differences

MANIFEST = "manifest.json"
_REQUEST = "request.json"
_PACKAGES = ("torch", "torchrec", "pyarrow", "numpy")


class StageError(RuntimeError):
    """A stage could not be made; the message gives the reason."""


class NotReadyError(RuntimeError):
    """There is nothing to do yet: the data is not there, or nothing is new."""


class RefusedError(RuntimeError):
    """A check refused the data or the candidate; what serves stays as it is."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage's function is given.

    Args:
        folder: To write into; it may hold what a failed attempt at the same request has left.
        inputs: Finished folders of the stages that it needs, by name.
        metrics: What those stages returned, by name.
        config: The stage's own.
        say: Prints a line.
    """

    folder: Path
    inputs: Mapping[str, Path]
    metrics: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Any]
    say: Callable[[str], None]


# Writes an artifact into the work's folder and returns its metrics.
Make = Callable[[Work], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One artifact and how it is made.

    Args:
        make: Writes it and returns its metrics, which are JSON data. `skipped` among them is the
            reason why there was nothing to make.
        name: Of the stage; the function's name if empty.
        inputs: Names of the earlier stages that it needs.
        sources: Files and folders from outside that it reads.
        config: JSON data; with another one the artifact is made again.
        lost: Given the metrics of the finished artifact, returns what of its effect outside its own
            folder is gone; unless that is empty, it is made again.
    """

    make: Make
    name: str = ""
    inputs: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    lost: Callable[[Mapping[str, Any]], str] | None = None

    def __post_init__(self) -> None:
        """Fill the name."""
        if not self.name:
            object.__setattr__(self, "name", self.make.__name__.replace("_", "-"))
        if "/" in self.name or self.name.startswith("."):
            raise ValueError(f"stage {self.name!r}: a name is that of a folder, without / or .")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A sequence of stages.

    Args:
        stages: In order.
        folder: Of their artifacts.
        conclude: Given the metrics of every stage by its name, prints a summary and returns the
            exit code.
    """

    stages: Sequence[Stage]
    folder: Path
    conclude: Callable[[Mapping[str, Mapping[str, Any]]], int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What will happen to a stage.

    Args:
        stage: The stage.
        will: `done`, `make` or `resume`.
        why: The reason.
    """

    stage: Stage
    will: str
    why: str


def plan(stages: Sequence[Stage], folder: Path, first: str = "") -> list[Step]:
    """Return what running would do to each stage, in order, without doing it.

    Args:
        first: make this stage, and all that need it, even where they are done.

    Raises:
        ValueError: no stage is called `first`, or the stages do not fit together.
    """
    _check(stages)
    names = [stage.name for stage in stages]
    if first and first not in names:
        raise ValueError(f"--from: no stage {first!r}; stages: {', '.join(names)}")
    steps: list[Step] = []
    anew: set[str] = set()
    for stage in stages:
        changed = [name for name in stage.inputs if name in anew]
        if stage.name == first:
            step = Step(stage=stage, will="make", why="asked for by --from")
        elif changed:
            step = Step(stage=stage, will="make", why=f"after {', '.join(changed)}")
        else:
            step = _look(stage, folder)
        if step.will != "done":
            anew.add(stage.name)
        steps.append(step)
    return steps


def make(
    stage: Stage, folder: Path, lock: Lock, say: Callable[[str], None], anew: bool = False
) -> tuple[bool, dict[str, Any]]:
    """Make `stage` in `folder` unless it is done; return whether it was made, and its manifest.

    Args:
        anew: make it even if it is done.

    Raises:
        LockedError: the folder was taken over by another process meanwhile.
        Exception: whatever the stage's function raises; the artifact is then as it was.
    """
    request = _request(stage, folder)
    if not anew and _look(stage, folder).will == "done":
        return False, read(folder / stage.name)
    work = _open(stage, folder, request, anew)
    started = time.time()
    metrics = stage.make(
        Work(
            folder=work,
            inputs={name: folder / name for name in stage.inputs},
            metrics={name: read(folder / name)["metrics"] for name in stage.inputs},
            config=stage.config,
            say=say,
        )
    )
    (work / _REQUEST).unlink()
    manifest = {
        "stage": stage.name,
        "request": request,
        "metrics": dict(metrics),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "versions": _versions(),
        "files": files_below(work),
    }
    manifest["output"] = of_values([manifest["metrics"], of_path(work)])
    with lock.committing():
        write_json(work / MANIFEST, manifest)
        _put_in_place(work, folder / stage.name)
    return True, manifest


def read(artifact: Path) -> dict[str, Any]:
    """Return an artifact's manifest.

    Raises:
        StageError: it has none, or one that cannot be read.
    """
    try:
        manifest = read_json(artifact / MANIFEST)
        kinds = {"request": dict, "metrics": dict, "files": dict, "started": str, "output": str}
        if not isinstance(manifest, dict) or not all(
            isinstance(manifest.get(name), kind) for name, kind in kinds.items()
        ):
            raise ValueError("it lacks what every manifest has")
    except (OSError, ValueError) as error:
        raise StageError(
            f"{artifact / MANIFEST}: cannot be read ({error}); run the stage again"
        ) from error
    return manifest


def recover(folder: Path, names: Collection[str]) -> None:
    """Finish or undo what a process that died while it committed has left. Needs the lock."""
    for name in names:
        old, target = folder / f".{name}.replaced", folder / name
        if old.exists():
            if (target / MANIFEST).is_file():
                remove(old)
            else:
                old.rename(target)


def _check(stages: Sequence[Stage]) -> None:
    """Raise a ValueError unless names are unique and every input comes before."""
    known: set[str] = set()
    for stage in stages:
        if stage.name in known:
            raise ValueError(f"stage {stage.name!r}: there are two of that name")
        for name in stage.inputs:
            if name not in known:
                why = f"needs {name!r}, which is no stage before it"
                raise ValueError(f"stage {stage.name!r}: {why}")
        known.add(stage.name)


def _look(stage: Stage, folder: Path) -> Step:
    """Say whether a stage is done, from what lies in `folder`."""
    artifact = folder / stage.name
    unfinished = folder / f".{stage.name}.unfinished" / _REQUEST
    if not (artifact / MANIFEST).is_file():
        if unfinished.is_file():
            return Step(stage=stage, will="resume", why="was begun and not finished")
        return Step(stage=stage, will="make", why="is not there")
    try:
        manifest = read(artifact)
        changed = differences(manifest["request"], _request(stage, folder))
    except StageError as error:
        return Step(stage=stage, will="make", why=str(error))
    if changed:
        return Step(stage=stage, will="make", why=f"changed: {'; '.join(map(str, changed[:3]))}")
    found = files_below(artifact)
    found.pop(MANIFEST)
    if found != manifest["files"]:
        lost = differences(manifest["files"], found)
        return Step(stage=stage, will="make", why=f"its files are not as made: {lost[0]}")
    gone = stage.lost(manifest["metrics"]) if stage.lost else ""
    if gone:
        return Step(stage=stage, will="make", why=gone)
    return Step(stage=stage, will="done", why=f"made {manifest['started']}")


def _request(stage: Stage, folder: Path) -> dict[str, Any]:
    """Return all that an artifact is made from, without passwords, since it is kept beside it."""
    made_from = {
        "inputs": {name: read(folder / name)["output"] for name in stage.inputs},
        "sources": {str(path): of_path(path) for path in stage.sources},
        "config": stage.config,
    }
    return without_credentials_in(json.loads(json.dumps(made_from, default=str)))


def _open(stage: Stage, folder: Path, request: dict[str, Any], anew: bool) -> Path:
    """Return the folder to work in: what an earlier attempt at the same request left, or empty."""
    work = folder / f".{stage.name}.unfinished"
    try:
        earlier = read_json(work / _REQUEST)
    except (OSError, ValueError):
        earlier = None
    if anew or earlier != request or work.is_symlink():
        remove(work)
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / _REQUEST, request)
    return work


def _put_in_place(work: Path, target: Path) -> None:
    """Rename a finished folder to `target`; an earlier one is there until it is."""
    old = target.with_name(f".{target.name}.replaced")
    remove(old)
    if target.exists():
        target.rename(old)
    work.rename(target)
    remove(old)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

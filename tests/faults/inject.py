# SPDX-License-Identifier: MIT
"""Faults that a job brings upon itself. Each leaves a file `fired-NAME`; without it, it was none.

A fault is plain data: {"name": ..., "kind": ..., "rank": ..., ...}. `install` arranges for it in
the process of that rank (None: of every rank).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from trainer.checkpoint import layout, storage


def install(fault: dict[str, Any], rank: int, folder: Path) -> Callable[[Any], None]:
    """Arrange for `fault`; return what is to be called with the Trainer once it is there.

    folder: where `fired-NAME` goes. A fault fires once, also over restarts, unless it has `again`.
    """
    mark = folder / f"fired-{fault['name']}"
    if fault.get("rank") not in (None, rank) or (mark.exists() and not fault.get("again")):
        return lambda trainer: None

    def fire() -> None:
        descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT, 0o644)
        os.close(descriptor)

    kind = fault["kind"]
    if kind == "write":
        _at_write(fault, fire)
    elif kind == "full":
        _full_disk(fault, fire)
    elif kind in ("slow", "stall"):
        _slow_disk(fault, fire)
    elif kind == "stall-read":
        _slow_read(fault, fire)
    elif kind != "step":
        raise ValueError(f"no fault of kind {kind!r}")
    return lambda trainer: _at_step(fault, fire, trainer) if kind == "step" else None


def die() -> None:
    """End as if the power had gone: no handler, no buffer, no file is closed."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _at_step(fault: dict[str, Any], fire: Callable[[], None], trainer: Any) -> None:
    """Do `fault["action"]` just before the step after `fault["step"]`."""
    train_step = trainer._train_step

    def stepped(batches: Any) -> None:
        if trainer.progress.step == fault["step"]:
            fire()
            ACTIONS[fault["action"]](fault)
        train_step(batches)

    trainer._train_step = stepped


def _clock(fault: dict[str, Any]) -> None:
    """Let all clocks that a program can ask for the date jump by `fault["seconds"]`."""
    real = time.time

    def jumped() -> float:
        return real() + fault["seconds"]

    time.time = jumped


def _wait(fault: dict[str, Any]) -> None:
    """Stand still, with all threads but this one going on, until `fault["until"]` is there."""
    deadline = time.monotonic() + 60
    while not Path(fault["until"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _worker(_: dict[str, Any]) -> None:
    """Kill a loader worker of this process."""
    found = [p for p in _descendants(os.getpid()) if b"forkserver" in _command(p)]
    # The server is the parent of the workers.
    workers = [p for p in found if any(p in _children(other) for other in found)]
    os.kill(workers[-1], signal.SIGKILL)


ACTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill": lambda _: die(),
    "terminate": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda _: time.sleep(600),
    "clock": _clock,
    "wait": _wait,
    "worker": _worker,
}


def _at_write(fault: dict[str, Any], fire: Callable[[], None]) -> None:
    """Die at the `fault["count"]`-th change of a file or folder of a checkpoint."""
    done = 0

    def counted(function: Callable[..., Any], half: bool = False) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == fault["count"]:
                fire()
                if half:  # a part of the bytes gets through
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                die()
            return function(*arguments, **options)

        return call

    storage.Counted.write = counted(storage.Counted.write, half=True)
    layout.write_durably = counted(layout.write_durably)
    layout.sync_folder = counted(layout.sync_folder)
    layout._remove = counted(layout._remove)
    Path.rename = counted(Path.rename)
    storage.RemotePath.unlink = counted(storage.RemotePath.unlink)
    storage.RemotePath.rename = counted(storage.RemotePath.rename)


def _full_disk(fault: dict[str, Any], fire: Callable[[], None]) -> None:
    """Let the checkpoints numbered `fault["saves"]`, from 1, run into a full disk."""
    saves = 0
    draft, write = layout.draft, storage.Counted.write

    def counted(target: Any) -> Any:
        nonlocal saves
        saves += 1
        return draft(target)

    def full(stream: Any, data: Any) -> None:
        if saves in fault["saves"]:
            fire()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(stream, data)

    from trainer.checkpoint import dcp

    dcp.draft = counted
    cast(Any, storage.Counted).write = full


def _slow_disk(fault: dict[str, Any], fire: Callable[[], None]) -> None:
    """Let every write of a checkpoint, or the first one, take `fault["seconds"]`."""
    stalled = False
    write = storage.Counted.write

    def slow(stream: Any, data: Any) -> None:
        nonlocal stalled
        if fault["kind"] == "slow" or not stalled:
            stalled = True
            fire()
            time.sleep(fault["seconds"])
        write(stream, data)

    cast(Any, storage.Counted).write = slow


def _slow_read(fault: dict[str, Any], fire: Callable[[], None]) -> None:
    """Let the first read of a tensor of a checkpoint take `fault["seconds"]`."""
    from trainer.checkpoint import dcp_files

    fill = dcp_files._fill

    def slow(*arguments: Any) -> None:
        dcp_files._fill = fill
        fire()
        time.sleep(fault["seconds"])
        fill(*arguments)

    dcp_files._fill = slow


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(found)


def _descendants(pid: int) -> list[int]:
    return [p for child in _children(pid) for p in (child, *_descendants(child))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

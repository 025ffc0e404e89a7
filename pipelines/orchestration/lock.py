# SPDX-License-Identifier: MIT
"""One owner of a folder at a time, also among machines and containers that share a file system.

Two files mark that a folder has an owner:

  .lock        a record of the owner, which the owner renews. Every machine that sees the file
               system can read it.
  .lock.held   a file that the owner keeps locked through the operating system (flock). The system
               releases it when the process ends, however it ends. Processes of one kernel see it,
               also from different containers; through NFS usually all machines do.

Somebody who wants the folder and finds a record has to know that its owner is gone:

  - .lock.held cannot be locked: the owner is alive.
  - Both run on one kernel and the owner held .lock.held: it is gone, since its lock is.
  - Both are in one space of process ids: the process of that id and start time runs or does not. A
    container of the same host name has another space of process ids, whose numbers mean nothing.
  - Otherwise only the record is left. One that was renewed not long ago, by the clock of the file
    system, has an owner. An older one may be old because a clock has jumped: it is watched, by a
    clock that only runs forward, until it is renewed or has missed a renewal.

An owner that was suspended for long may have lost its folder. It therefore writes its results in
`committing`, which first looks whether the folder is still its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.runtime.printable import printable

LOCK = ".lock"
EXPIRY_SECONDS = 300.0
# No record makes others wait longer, whatever it holds.
_LONGEST_EXPIRY_SECONDS = 3600.0
# By which two times of one file system may be the wrong way round.
_CLOCK_STEP_SECONDS = 1.0
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 4096


class LockedError(RuntimeError):
    """Another process owns the folder."""


class Lock:
    """The right to write into a folder, as a context manager.

    Args:
        folder: The folder, which is made if it is not there.
        expiry_seconds: How long an owner that others cannot see may go without renewing; it renews
            at a third of it.

    Raises:
        LockedError: on entering, another process owns the folder; the message names it.
    """

    def __init__(self, folder: Path, expiry_seconds: float = EXPIRY_SECONDS) -> None:
        if not (math.isfinite(expiry_seconds) and expiry_seconds > 0):
            raise ValueError(
                f"expiry_seconds (--lock-seconds): expected a number > 0, got {expiry_seconds}"
            )
        self.path = folder / LOCK
        self.expiry_seconds = expiry_seconds
        self.token = uuid.uuid4().hex
        self._held = -1
        self._ended = threading.Event()
        self._renewal = threading.Thread(target=self._renew_until_ended, daemon=True)

    def __enter__(self) -> Lock:
        """Become the owner and keep renewing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._held = os.open(self._beside("held"), _OPEN, 0o666)
        try:
            holds_flock = _flock(self._held)
            owner = self.owner()
            if holds_flock is False:
                raise LockedError(self._busy(owner))
            if owner is not None and not self._is_gone(owner, bool(holds_flock)):
                raise LockedError(self._busy(owner))
            with self._guard():
                first = _identity(self.owner()) == _identity(owner)
                if first:
                    self._write({"since": time.time(), "beat": 0, "flock": bool(holds_flock)})
            if not first:
                raise LockedError(self._busy(self.owner()))
        except BaseException:
            os.close(self._held)
            raise
        self._renewal.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop renewing and leave the folder to others."""
        self._ended.set()
        self._renewal.join()
        with self._guard():
            if self.holds():
                self.path.unlink()
        os.close(self._held)

    def holds(self) -> bool:
        """Return whether the folder is still this owner's."""
        owner = self.owner()
        return owner is not None and owner["token"] == self.token

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Let the block put results in place; nobody becomes the owner while it does.

        Raises:
            LockedError: the folder has another owner by now.
        """
        with self._guard():
            if not self.holds():
                raise LockedError(f"{self.path.parent}: taken over by another process")
            yield

    def owner(self) -> dict[str, Any] | None:
        """Return the record of the owner, or None where there is none that can be read."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(file, encoding="utf-8") as text:
                owner = json.loads(text.read(_MAX_BYTES))
            numbers = [float(owner[name]) for name in ("pid", "since", "expiry_seconds", "beat")]
            whole = all(map(math.isfinite, numbers)) and isinstance(owner["token"], str)
            return owner if whole else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # cut short by a crash, or no record of ours: nobody's
        except (OverflowError, RecursionError):
            return None

    def renew(self) -> bool:
        """Show that the owner is alive; return whether the folder was still this owner's."""
        with self._guard():
            owner = self.owner()
            if owner is None or owner["token"] != self.token:
                return False
            self._write({**owner, "beat": int(owner["beat"]) + 1})
        return True

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self.expiry_seconds / 3):
            with contextlib.suppress(OSError):  # a file system that is away for a moment
                if not self.renew():
                    return

    def _is_gone(self, owner: dict[str, Any], holds_flock: bool) -> bool:
        """Return whether an owner has died, or lets its record grow old."""
        here = _place(self._held)
        if here["kernel"] and all(owner.get(key) == here[key] for key in ("kernel", "device")):
            if owner.get("flock") and holds_flock:
                return True
            if owner.get("process_ids") == here["process_ids"]:
                return not _is_alive(int(owner["pid"]), str(owner.get("started", "")))
        return self._is_silent(owner)

    def _is_silent(self, owner: dict[str, Any]) -> bool:
        """Return whether a record is old and is not renewed while it is watched."""
        limit = _expiry(owner)
        if -_CLOCK_STEP_SECONDS <= self._age() < limit:
            return False
        seconds, seen = limit / 2, _identity(owner)
        name = printable(f"{self.path.parent}: {_described(owner)}")
        print(f"{name} seems to be gone; watching its lock for {seconds:.0f} s", file=sys.stderr)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, limit / 30))
            now = self.owner()
            if _identity(now) != seen:
                return now is None
        return True

    def _age(self) -> float:
        """Return the seconds since the record was written, by the clock of its file system."""
        guard = self._beside("guard")
        with self._guard():
            try:
                os.utime(guard)
                return guard.stat().st_mtime - self.path.lstat().st_mtime
            except OSError:
                return math.inf  # the record is gone: watching will see that

    def _write(self, changes: dict[str, Any]) -> None:
        owner = {
            "token": self.token,
            "pid": os.getpid(),
            "expiry_seconds": self.expiry_seconds,
            **_place(self._held),
            "started": _started(os.getpid()),
            **changes,
        }
        partial = self.path.with_name(f"{LOCK}.{self.token}")
        partial.unlink(missing_ok=True)
        file = os.open(partial, _OPEN | os.O_EXCL, 0o666)
        with open(file, "w", encoding="utf-8") as text:
            text.write(json.dumps(owner) + "\n")
        os.replace(partial, self.path)

    def _busy(self, owner: dict[str, Any] | None) -> str:
        if owner is None:
            return f"{self.path.parent}: another process works here; wait for it to end"
        seconds = max(0.0, _expiry(owner) - max(0.0, self._age()))
        return printable(
            f"{self.path.parent}: {_described(owner)} works here since "
            f"{_written(float(owner['since']))}; wait for it to end, or, if it is dead, for its "
            f"lock to run out in {seconds:.0f} s"
        )

    def _beside(self, name: str) -> Path:
        return self.path.with_name(f"{LOCK}.{name}")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Let one process at a time read and write the record.

        Where a file system has no locks, what remains is that every commit asks `holds`.
        """
        file = os.open(self._beside("guard"), _OPEN, 0o666)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _flock(file: int) -> bool | None:
    """Lock a file; return False if another process has it, None if the file system cannot."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _place(file: int) -> dict[str, Any]:
    """Return where this process runs: host, kernel (empty if unknown), space of process ids."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        process_ids = os.readlink("/proc/self/ns/pid")
    except OSError:
        kernel = process_ids = ""
    return {
        "host": socket.gethostname(),
        "kernel": kernel,
        "process_ids": process_ids,
        "device": os.fstat(file).st_dev,
    }


def _started(pid: int) -> str:
    """Return when a process began, in ticks since its kernel did; empty where it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return "ended" if state in ("Z", "X") else rest[18]


def _is_alive(pid: int, started: str) -> bool:
    """Return whether a process of this space of process ids runs that began at `started`."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return False
    return pid > 0 and _started(pid) in ("", started)


def _identity(owner: dict[str, Any] | None) -> tuple[Any, Any] | None:
    return None if owner is None else (owner["token"], owner["beat"])


def _expiry(owner: dict[str, Any]) -> float:
    return min(max(float(owner["expiry_seconds"]), 0.0), _LONGEST_EXPIRY_SECONDS)


def _described(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner.get('host', 'an unknown host')}"


def _written(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"

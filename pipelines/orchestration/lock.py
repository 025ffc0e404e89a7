# SPDX-License-Identifier: MIT
"""One owner of a folder at a time: a lock file that names its owner and runs out.

A file instead of an operating system's lock, because the next night may run on another machine that
sees the same file system. An owner renews its lock while it lives; one that has died is recognised
at once on its own machine, and by the lock's expiry from any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOCK = ".lock"
EXPIRY_SECONDS = 300.0


class LockedError(RuntimeError):
    """Another process owns the folder."""


class Lock:
    """The right to write into a folder, as a context manager.

    expiry_seconds: after which an owner that no longer renews has lost its right; renewed at a
      third of it.
    clock: seconds since the epoch.

    Raises:
        LockedError: on entering, another process owns the folder; the message names it.
    """

    def __init__(
        self,
        folder: Path,
        expiry_seconds: float = EXPIRY_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not (math.isfinite(expiry_seconds) and expiry_seconds > 0):
            raise ValueError(
                f"expiry_seconds (--lock-seconds): expected a number > 0, got {expiry_seconds}"
            )
        self.path = folder / LOCK
        self.expiry_seconds = expiry_seconds
        self.token = uuid.uuid4().hex
        self._clock = clock
        self._ended = threading.Event()
        self._renewal = threading.Thread(target=self._renew_until_ended, daemon=True)

    def __enter__(self) -> Lock:
        """Become the owner and keep renewing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._guard():
            owner = self.owner()
            if owner is not None and not self._is_gone(owner):
                seconds = max(0.0, float(owner["expires"]) - self._clock())
                raise LockedError(
                    f"{self.path.parent}: process {owner['pid']} on {owner['host']} works here "
                    f"since {_written(owner['since'])}; wait for it to end, or, if it is dead, for "
                    f"its lock to run out in {seconds:.0f} s"
                )
            self._write(since=self._clock())
        self._renewal.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop renewing and leave the folder to others."""
        self._ended.set()
        self._renewal.join()
        with self._guard():
            if self.holds():
                self.path.unlink()

    def holds(self) -> bool:
        """Return whether the folder is still this owner's."""
        owner = self.owner()
        return owner is not None and owner["token"] == self.token

    def owner(self) -> dict[str, Any] | None:
        """Return what the lock file says, or None where there is none that can be read."""
        try:
            owner = json.loads(self.path.read_text(encoding="utf-8"))
            numbers = [float(owner[name]) for name in ("pid", "since", "expires")]
            whole = all(map(math.isfinite, numbers)) and {"token", "host"} <= owner.keys()
            return owner if whole else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # cut short by a crash, or no lock of ours: nobody's

    def renew(self) -> bool:
        """Put off the expiry; return whether the folder was still this owner's."""
        with self._guard():
            owner = self.owner()
            if owner is None or owner["token"] != self.token:
                return False
            self._write(since=owner["since"])
        return True

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self.expiry_seconds / 3):
            with contextlib.suppress(OSError):  # a file system that is away for a moment
                if not self.renew():
                    return

    def _is_gone(self, owner: dict[str, Any]) -> bool:
        """Return whether an owner has let its lock run out, or is a process that has died."""
        if float(owner["expires"]) < self._clock():
            return True
        return owner["host"] == socket.gethostname() and not _is_alive(int(owner["pid"]))

    def _write(self, since: float) -> None:
        owner = {
            "token": self.token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": since,
            "expires": self._clock() + self.expiry_seconds,
        }
        partial = self.path.with_name(f"{LOCK}.{self.token}")
        partial.write_text(json.dumps(owner) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Let one process at a time read and write the lock file.

        Where a file system has no locks, what remains is that every commit asks `holds`.
        """
        with self.path.with_name(f"{LOCK}.guard").open("a") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _written(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))

# SPDX-License-Identifier: MIT
"""A run that does not move any more ends, and says where each rank stood.

A rank that hangs (storage that never answers, a deadlock in a library) lets all others wait for it
in a collective. Each rank therefore watches itself: without a step for so many seconds it prints
the stacks of all its threads and ends the process. As all stand still, all print.

Time counts only while the watching thread runs itself, so that a process that was stopped, or a
machine that slept, is not taken for one that hangs. Where even that thread cannot run, because
native code keeps the interpreter's lock, a timer of `faulthandler` does the same a little later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer.runtime.runtime import RunError

# How long the ranks that notice later have for their own stacks.
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


class Watchdog:
    """Ends this process if `beat` is not called for `seconds`; a context manager.

    Args:
        seconds: the limit; 0 sets none.
        rank: of this process, for the message.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self.seconds = seconds
        self._rank = rank
        self._idle = 0.0
        self._doing = "starting"
        self._paused = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, doing: str) -> None:
        """Say that the run moves, and what it does next."""
        self._idle, self._doing = 0.0, doing

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch inside the block: what it waits for may take any time."""
        self._paused = True
        try:
            yield
        finally:
            self._idle, self._paused = 0.0, False

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        if self.seconds:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """Look at the time until the run ends or stands still for too long."""
        stream: Any = sys.__stderr__
        look = min(_LOOK_SECONDS, self.seconds / 4)
        before = time.monotonic()
        while True:
            patience = self.seconds + _GRACE_SECONDS + 2 * look
            faulthandler.dump_traceback_later(patience, exit=True, file=stream)
            if self._end.wait(look):
                return
            now = time.monotonic()
            self._idle = 0.0 if self._paused else self._idle + min(now - before, 2 * look)
            before = now
            if self._idle >= self.seconds:
                self._give_up(stream)

    def _give_up(self, stream: Any) -> None:
        """Print the stacks and end the process."""
        message = (
            f"no step for {self.seconds:g} s (runtime.hang_seconds) on rank {self._rank}, which "
            f"was {self._doing}; the stacks of the ranks above say who waits for what; the same "
            "command goes on from the newest checkpoint"
        )
        header = f"\n[rank {self._rank}] no step for {self.seconds:g} s, stacks of all threads:\n"
        print(header, file=stream, flush=True)
        faulthandler.dump_traceback(file=stream, all_threads=True)
        print(f"[rank {self._rank}] error: {message}", file=stream, flush=True)
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(RunError(message))
        time.sleep(min(_GRACE_SECONDS, self.seconds))
        os._exit(1)

# SPDX-License-Identifier: MIT
"""SIGTERM and Ctrl-C in the middle of training: the ranks agree on a step, save, and end.

A signal reaches one rank or all, each at another moment. So a handler only takes note; the note
travels with the all-reduce of the next step, after which every rank knows, at the same step, that
the run is to be saved and to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

# A launcher passes on the Ctrl-C that its processes have had from the terminal already.
_SAME_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The run was asked to end, and has been saved. The text says what was saved.

    Attributes:
        number: of the signal; SIGTERM on a rank that had none itself.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class StopSignals:
    """Records the first SIGINT or SIGTERM.

    Args:
        speaks: whether this process reports it.

    Attributes:
        received: the signal's number, 0 if there was none.
    """

    def __init__(self, speaks: bool) -> None:
        self.received = 0
        self._speaks = speaks
        self._first = 0.0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of signals inside the block instead of ending; a second Ctrl-C ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are not ours to handle
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._first = number, now
            if self._speaks:
                name = signal.Signals(number).name
                os.write(2, f"{name}: saving after this step; Ctrl-C ends at once\n".encode())
        elif number == signal.SIGINT and now - self._first > _SAME_SECONDS:
            raise KeyboardInterrupt

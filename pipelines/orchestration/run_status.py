# SPDX-License-Identifier: MIT
"""The status of a run: the state of each stage while it runs, and in the end why it ended so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Exit codes.
DONE, FAILED, WRONG, REFUSED, NOT_READY, LOCKED = range(6)
# waiting: not begun. skipped: it was done, or there was nothing to do.
STATES = ("waiting", "running", "done", "skipped", "failed")


@dataclass(kw_only=True)
class RunStatus:
    """The status of a run.

    Args:
        tell: Is called whenever a stage has entered another state.
        states: Of each stage, by name in order: its state, and since when in seconds since 1970.
        metrics: Of each stage that ran or was done, by name.
        code: The exit code.
        reason: The message of the error that ended the run.
        seconds: How long the run took.
    """

    tell: Callable[[RunStatus], None] = lambda status: None
    states: dict[str, tuple[str, float]] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    code: int = DONE
    reason: str = ""
    seconds: float = 0.0

    def plan(self, names: list[str]) -> None:
        """Let the run have these stages, all of them waiting."""
        now = time.time()
        self.states = {name: ("waiting", now) for name in names}
        self.tell(self)

    def enter(self, name: str, state: str) -> None:
        """Let a stage enter another state."""
        self.states[name] = (state, time.time())
        self.tell(self)

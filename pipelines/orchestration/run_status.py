# SPDX-License-Identifier: MIT
"""How a run goes: the state of each stage while it runs, and in the end why it ended as it did."""

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
class Course:
    """What is known of a run.

    tell: is called whenever a stage has entered another state.
    states: of each stage by its name in order, and since when, in seconds since 1970.
    metrics: of each stage that it came to, by name.
    code, reason, seconds: the exit code, what was said of an error, and how long it took.
    """

    tell: Callable[[Course], None] = lambda course: None
    states: dict[str, tuple[str, float]] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    code: int = DONE
    reason: str = ""
    seconds: float = 0.0

    def plan(self, names: list[str]) -> None:
        """Say which stages there are."""
        now = time.time()
        self.states = {name: ("waiting", now) for name in names}
        self.tell(self)

    def enter(self, name: str, state: str) -> None:
        """Say that a stage is now in another state."""
        self.states[name] = (state, time.time())
        self.tell(self)

# SPDX-License-Identifier: MIT
"""A fault: what happens to a job, what must be left, and what was.

A fault is a function of a `Place`; its docstring is what is expected, what it returns is what was
got. It raises `Failed` where that is something else, or where the fault did not happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.harness import JOB_SECONDS, Place, expect

Check = Callable[[Place], str]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; `quick` ones are part of the tests, `check` is what happens."""

    name: str
    check: Check
    quick: bool

    @property
    def expected(self) -> str:
        """What must be left."""
        return " ".join((self.check.__doc__ or "").split()).rstrip(".")


FAULTS: list[Fault] = []


def fault(name: str, quick: bool = False) -> Callable[[Check], Check]:
    """Add a function to the list."""

    def add(check: Check) -> Check:
        FAULTS.append(Fault(name=name, check=check, quick=quick))
        return check

    return add


def at(step: int, action: str, rank: int | None, **more: Any) -> dict[str, Any]:
    """Return a fault before the step after `step`."""
    return {"name": action, "kind": "step", "step": step, "action": action, "rank": rank, **more}


def wait_for(ready: Callable[[], bool], text: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + JOB_SECONDS
    while not ready():
        expect(time.monotonic() < deadline, text)
        time.sleep(0.01)

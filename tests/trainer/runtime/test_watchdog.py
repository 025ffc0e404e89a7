# SPDX-License-Identifier: MIT
"""A process that stands still ends with its stacks, one that moves or waits on purpose does not."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.runtime.watchdog import Watchdog

ROOT = Path(__file__).parents[3]
HANG = """
import ctypes, sys, time
from trainer.runtime import watchdog

def stuck():
    if sys.argv[1] == "python":
        time.sleep(600)
    ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock

watchdog._GRACE_SECONDS = 0.2
with watchdog.Watchdog(0.4, rank=3) as dog:
    for step in range(5):
        dog.beat(f"training step {step}")
        time.sleep(0.1)
    stuck()
"""


@pytest.mark.parametrize("kind", ["python", "native"])
def test_a_process_that_hangs_prints_its_stacks_and_fails(kind):
    started = time.monotonic()
    command = [sys.executable, "-c", HANG, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "in stuck" in done.stderr
    if kind == "python":
        assert "[rank 3] no step for 0.4 s, stacks of all threads" in done.stderr
        assert "which was training step 4" in done.stderr
    assert time.monotonic() - started < 60


def test_steps_and_pauses_are_no_hang():
    with Watchdog(0.3, rank=0) as dog:
        for _ in range(4):
            time.sleep(0.15)
            dog.beat("training")
        with dog.paused():
            time.sleep(0.6)
        time.sleep(0.15)
    with Watchdog(0, rank=0):
        time.sleep(0.05)


def test_a_machine_that_slept_is_no_hang(monkeypatch):
    """The clock jumps by an hour, with the process stopped meanwhile."""
    jumps = iter([3600.0])
    clock = time.monotonic
    offset = 0.0

    def jumping() -> float:
        nonlocal offset
        offset += next(jumps, 0.0)
        return clock() + offset

    monkeypatch.setattr("trainer.runtime.watchdog.time.monotonic", jumping)
    with Watchdog(2.0, rank=0) as dog:
        time.sleep(0.7)
        dog.beat("training")

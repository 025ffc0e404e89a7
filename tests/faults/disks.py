# SPDX-License-Identifier: MIT
"""Faults of writing: full and slow disks, kills at any moment and at each write."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.faults import tiny
from tests.faults.fault import at, fault
from tests.faults.harness import Place, expect
from tests.support import s3
from trainer.checkpoint.layout import complete
from trainer.checkpoint.ownership import OWNER

KILLS = 50


# The disk.


@fault("disk full at one checkpoint", quick=True)
def disk_full_once(place: Place) -> str:
    """Training goes on and says so; the next checkpoint is written; the result is the same."""
    full = {"name": "full", "kind": "full", "rank": None, "saves": [2], "again": True}
    ranks = place.finish(faults=[full])
    expect(place.fired(full), "the fault did not fire")
    expect("step-4: the checkpoint cannot be written" in ranks[0].said, ranks[0].said)
    expect("No space left on device" in ranks[0].said, ranks[0].said)
    expect(place.steps == ["step-8", "step-10"], f"checkpoints: {place.steps}")
    return place.equals_reference()


@fault("disk full on rank 1 alone, to the end")
def disk_full_to_the_end(place: Place) -> str:
    """The run fails at its end and says that the model is not kept; with room, it is finished."""
    # Rank 1 makes no drafts, so that all of its writes are of "save 0".
    full = {"name": "full", "kind": "full", "rank": 1, "saves": [0], "again": True}
    ranks = place.fail(full)
    expect("trained but not kept: make room" in ranks[0].said, ranks[0].said)
    expect(not place.steps, f"checkpoints: {place.steps}")
    place.finish()
    return place.equals_reference()


@fault("a file system of 1 MB (tmpfs)")
def tiny_disk(place: Place) -> str:
    """As with any full disk: said, nothing half written stays, and the run goes on elsewhere."""
    disk = place.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        full = {"name": "full", "kind": "full", "rank": None, "saves": list(range(1, 9))}
        place.fail({**full, "again": True})
        place.finish()
        return f"mounting is not allowed here, so by injection; {place.equals_reference()}"
    try:
        folder = ("--checkpoint.folder", str(disk))
        ranks = place.run(*folder)
        expect([rank.code for rank in ranks] == [1, 1], place.tail(ranks))
        expect("No space left on device" in ranks[0].said, ranks[0].said)
        left = {path.name for path in disk.iterdir()}
        expect(left == {OWNER}, f"something stayed: {left}")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    place.finish()
    return f"real tmpfs; {place.equals_reference()}"


@fault("a slow file system")
def slow_disk(place: Place) -> str:
    """Training does not wait for the writes; the run is the undisturbed one."""
    slow = {"name": "slow", "kind": "slow", "rank": None, "seconds": 0.003, "again": True}
    place.finish(faults=[slow])
    expect(place.fired(slow), "the fault did not fire")
    return place.equals_reference()


@fault("one rank writes longer than a collective may take", quick=True)
def slow_rank(place: Place) -> str:
    """The rank and the setting are named; nothing fails; the run is the undisturbed one."""
    stall = {"name": "stall", "kind": "stall", "rank": 1, "seconds": 12.0}
    ranks = place.finish("--runtime.timeout-seconds", "10", faults=[stall])
    expect(place.fired(stall), "the fault did not fire")
    named = "rank 1 has been writing its part for 10 s (runtime.timeout_seconds)"
    expect(named in ranks[1].said, place.tail(ranks))
    expect(place.steps == ["step-8", "step-10"], f"checkpoints: {place.steps}")
    return place.equals_reference()


@fault("one rank reads a checkpoint longer than a collective may take")
def slow_reader(place: Place) -> str:
    """The rank and the setting are named; nothing fails; the run is the undisturbed one."""
    place.fail(at(7, "kill", 1))
    stall = {"name": "stall", "kind": "stall-read", "rank": 1, "seconds": 12.0}
    ranks = place.finish("--runtime.timeout-seconds", "10", faults=[stall])
    expect(place.fired(stall), "the fault did not fire")
    named = "rank 1 has been reading a file of the checkpoint for 10 s (runtime.timeout_seconds)"
    expect(named in ranks[1].said, place.tail(ranks))
    expect("resumed at step " in ranks[0].said, place.tail(ranks))
    return place.equals_reference()


# A saving run that is killed at any moment.


def _kept(place: Place) -> int:
    """Return the newest step that is certain to have been kept."""
    path = place.folder / "kept"
    return int(path.read_text() or 0) if path.exists() else 0


def _goes_on(place: Place, kept: int) -> None:
    """Check that there is a complete checkpoint that is not older than `kept`."""
    found = complete(place.folder / "checkpoints")
    newest = int(re.findall(r"\d+", found[-1].name)[0]) if found else 0
    expect(newest >= kept, f"expected a checkpoint of step {kept} or later, got {found}")


@fault(f"SIGKILL at {KILLS} random moments of a saving run")
def random_moments(place: Place) -> str:
    """There is a complete checkpoint at every moment; the final metrics are the same."""
    return _random_moments(place, KILLS)


@fault("SIGKILL at a few random moments of a saving run", quick=True)
def few_random_moments(place: Place) -> str:
    """There is a complete checkpoint at every moment; the final metrics are the same."""
    return _random_moments(place, 4)


def _random_moments(place: Place, kills: int) -> str:
    """Kill so many saving runs, each at some moment, and go on each time."""
    reference, draw, hits, steps = place.harness.tiny_reference(), random.Random(1), 0, set()
    duration = 0.0
    attempt = 0
    while hits < kills:
        attempt += 1
        expect(attempt < 4 * kills, f"only {hits} kills hit a run")
        one = place.harness.place(f"{place.folder.name}-{attempt}")
        started = time.monotonic()
        if not duration:
            one.tiny()
            duration = time.monotonic() - started
            continue
        rank = one.start_tiny()
        time.sleep(draw.uniform(0.0, duration))
        os.kill(rank.pid, signal.SIGKILL)
        one.wait([rank])
        if (one.folder / "metrics.json").exists():  # it was over: that was no kill of a saving run
            continue
        hits += 1
        steps.add(_kept(one))
        _goes_on(one, _kept(one))
        end = one.tiny()
        expect(end.code == 0, one.tail([end]))
        expect(tiny.metrics(one.folder) == reference, "other metrics")
    return f"{hits} kills after {len(steps)} different steps; every final metric equal"


def _each_write(place: Place, folder: Callable[[Place], str], counts: list[int], **env: str) -> str:
    """Kill a saving run at the writes numbered `counts` and go on each time."""
    reference = place.harness.tiny_reference()
    for count in counts:
        one = place.harness.place(f"{place.folder.name}-{count}")
        write = {"name": "write", "kind": "write", "rank": None, "count": count}
        first = one.tiny(write, folder=folder(one), **env)
        expect(one.fired(write), f"the kill at write {count} did not fire: {one.tail([first])}")
        expect(first.code == -signal.SIGKILL, one.tail([first]))
        if folder(one) == str(one.folder / "checkpoints"):
            _goes_on(one, _kept(one))
        end = one.tiny(folder=folder(one), **env)
        expect(end.code == 0, one.tail([end]))
        expect(tiny.metrics(one.folder) == reference, "other metrics")
    return f"{len(counts)} writes; every final metric equal"


@fault("SIGKILL at each write of the first checkpoints")
def each_write(place: Place) -> str:
    """There is a complete checkpoint at every moment; the final metrics are the same."""
    return _each_write(place, lambda one: str(one.folder / "checkpoints"), list(range(1, 50)))


@fault("SIGKILL at a write of a checkpoint", quick=True)
def some_writes(place: Place) -> str:
    """There is a complete checkpoint at every moment; the final metrics are the same."""
    return _each_write(place, lambda one: str(one.folder / "checkpoints"), [40, 44, 47, 50, 52])


@fault("SIGKILL of either of two ranks inside a save")
def inside_a_save(place: Place) -> str:
    """All ranks fail; resumed, the run is the undisturbed one."""
    for rank, count in ((1, 2), (0, 9)):
        write = {"name": f"write-{rank}", "kind": "write", "rank": rank, "count": count}
        place.fail(write)
    place.finish()
    return f"2 kills; {place.equals_reference()}"


@fault("SIGKILL at each write of checkpoints on S3")
def each_write_to_s3(place: Place) -> str:
    """The manifest is the commit: the final metrics are the undisturbed run's."""
    with s3.serving() as environment:
        make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
        subprocess.run([sys.executable, "-c", make], env=os.environ | environment, check=True)
        # From the third checkpoint on all make the same changes: one of them, and half of the next.
        counts = list(range(20, 34))
        return _each_write(
            place, lambda one: f"{s3.BUCKET}/{one.folder.name}", counts, **environment
        )

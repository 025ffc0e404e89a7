# SPDX-License-Identifier: MIT
"""Faults of processes: killed, stopped, asked to end, hanging, never there."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.faults import job
from tests.faults.fault import at, fault, wait_for
from tests.faults.harness import JOB_SECONDS, Place, expect

# Processes that die.


@fault("SIGKILL of rank 1", quick=True)
def rank_1_dies(place: Place) -> str:
    """A scrape shows it no more, and rank 0 still; then all ranks fail within seconds; resumed, the
    run is the undisturbed one.
    """
    gone = place.folder / "gone"
    stand_still = at(5, "wait", None, again=True, until=str(gone))
    ranks = place.start(faults=[stand_still])
    note = place.output / "exporter-0.json"

    def alive() -> set[str]:
        return _series(note).get("fullrank_rank_step", {}).keys()

    wait_for(lambda: place.fired(stand_still) and note.exists(), place.tail(ranks))
    wait_for(lambda: alive() == {"0", "1"}, f"expected two ranks in a scrape, got {alive()}")
    started = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGKILL)
    wait_for(lambda: alive() == {"0"}, f"expected rank 0 alone in a scrape, got {alive()}")
    seconds = time.monotonic() - started
    expect(seconds < 10, f"a killed rank was shown for {seconds:.1f} s")
    found = _series(note)
    numbers = [found[f"fullrank_{name}"][""] for name in ("ranks", "ranks_expected")]
    expect(numbers == [1, 2], f"expected 1 of 2 ranks, got {numbers}")
    shown = [name for name, values in found.items() if "1" in values]
    expect(not shown, f"series of the rank that is gone: {shown}")
    gone.touch()
    codes = place.wait(ranks)
    expect(0 not in codes, f"expected every rank to fail, got {codes}")
    expect(place.steps[-1] in ("step-4", "step-2"), f"newest checkpoint: {place.steps}")
    place.finish()
    return f"gone from a scrape after {seconds:.2f} s; {place.equals_reference()}"


def _series(note: Path) -> dict[str, dict[str, float]]:
    """Return what the exporter of a note says: by name, the value of each rank ('': of none)."""
    ((target,),) = (one["targets"] for one in json.loads(note.read_text("utf-8")))
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    found: dict[str, dict[str, float]] = {}
    for sample in samples:
        found.setdefault(sample.name, {})[sample.labels.get("rank", "")] = sample.value
    return found


@fault("SIGKILL of rank 0, which writes the manifests")
def rank_0_dies(place: Place) -> str:
    """All ranks fail; resumed, the run is the undisturbed one."""
    place.fail(at(7, "kill", 0))
    place.finish()
    return place.equals_reference()


@fault("SIGKILL of all ranks at once")
def all_die(place: Place) -> str:
    """Resumed, the run is the undisturbed one."""
    place.fail(at(9, "kill", None, again=True))
    place.finish()
    return place.equals_reference()


@fault("SIGKILL before the first checkpoint")
def dies_early(place: Place) -> str:
    """The run begins anew in the same folder, and is the undisturbed one."""
    place.fail(at(1, "kill", 1))
    expect(not place.steps, f"expected no checkpoint, got {place.steps}")
    place.finish()
    return place.equals_reference()


@fault("SIGKILL again and again, every few steps")
def dies_often(place: Place) -> str:
    """Each start gets further; at the end the run is the undisturbed one."""
    for number, step in enumerate((2, 4, 5, 7, 9)):
        place.fail({**at(step, "kill", step % 2), "name": f"kill-{number}"})
    place.finish()
    return f"5 kills; {place.equals_reference()}"


@fault("SIGKILL in the last evaluation")
def dies_evaluating(place: Place) -> str:
    """The trained model is kept: the next start evaluates it only."""
    ranks = place.start()
    newest = place.output / "checkpoints" / f"step-{2 * job.STEPS}" / "manifest.json"
    deadline = time.monotonic() + JOB_SECONDS
    while not newest.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    killed = not (place.output / "metrics.json").exists()
    place.kill(ranks)
    place.wait(ranks)
    expect(killed and not (place.output / "metrics.json").exists(), "the run was already over")
    again = place.finish()
    expect("resumed at step 10 of 10" in again[0].said, place.tail(again))
    return place.equals_reference()


def _other_ranks(place: Place, ranks: int, *words: str) -> str:
    """Go on after a kill with `ranks` ranks and check the rows of both epochs."""
    place.fail(at(4, "kill", 1))  # the save after step 4 has waited for that after step 2
    expect(place.steps and place.steps[-1] in ("step-2", "step-4"), f"steps: {place.steps}")
    kept = int(place.steps[-1].rpartition("-")[2])
    place.finish(*words, ranks=ranks)
    seen = job.rows_seen(place.output, [(kept, 2), (10**9, ranks)])
    expect(seen == place.harness.reference()["rows"], "some rows were lost or trained twice")
    return f"{sum(seen[0].values()):,} + {sum(seen[1].values()):,} rows, each once an epoch"


@fault("SIGKILL, then one rank in place of two")
def on_one_rank(place: Place) -> str:
    """Every row is trained exactly once an epoch."""
    return _other_ranks(place, 1)


@fault("SIGKILL, then three ranks in place of two", quick=True)
def on_three_ranks(place: Place) -> str:
    """Every row is trained exactly once an epoch."""
    return _other_ranks(place, 3)


@fault("SIGKILL of one rank, then of two in its place, then one again")
def one_two_one(place: Place) -> str:
    """Every row is trained exactly once an epoch."""
    groups = []
    for number, (step, ranks) in enumerate(((5, 1), (7, 2))):
        place.fail({**at(step, "kill", ranks - 1), "name": f"kill-{number}"}, ranks=ranks)
        groups.append((int(place.steps[-1].rpartition("-")[2]), ranks))
    expect(0 < groups[0][0] < groups[1][0], f"checkpoints after the kills: {groups}")
    place.finish(ranks=1)
    seen = job.rows_seen(place.output, [*groups, (10**9, 1)])
    expect(seen == place.harness.reference()["rows"], "some rows were lost or trained twice")
    return f"checkpoints of {groups[0][0]} and {groups[1][0]} steps; each row once an epoch"


@fault("SIGKILL, then three ranks with four loader workers each")
def on_three_ranks_with_workers(place: Place) -> str:
    """Every row is trained exactly once an epoch."""
    return _other_ranks(place, 3, "--loader.num-workers", "4")


@fault("SIGKILL of a loader's worker")
def worker_dies(place: Place) -> str:
    """All ranks fail, the message names the worker; resumed, the run is the undisturbed one."""
    words = ("--loader.num-workers", "2")
    ranks = place.fail(at(3, "worker", 1), *words)
    named = re.search(r"rank 1: loader worker \d+ \(pid \d+\) ended", ranks[1].said)
    expect(named, place.tail(ranks))
    place.finish(*words)
    return f"named; {place.equals_reference()}"


@fault("SIGSTOP of a rank for three seconds")
def rank_sleeps(place: Place) -> str:
    """The others wait; the run is the undisturbed one."""
    ranks = place.start(faults=[at(4, "stop", 1)])
    wait_for(lambda: place.fired(at(4, "stop", 1)), "the fault did not fire")
    time.sleep(3)
    os.kill(ranks[1].pid, signal.SIGCONT)
    expect(place.wait(ranks) == [0, 0], place.tail(ranks))
    return place.equals_reference()


# Being asked to end, hanging, not meeting.


@fault("SIGTERM on all ranks (preemption)", quick=True)
def preempted(place: Place) -> str:
    """All ranks end at one step, saved, with code 143; resumed, the run is the undisturbed one."""
    ranks = place.fail(at(5, "terminate", None, again=True))
    codes = [rank.code for rank in ranks]
    expect(codes == [143, 143], f"codes {codes}: {place.tail(ranks)}")
    expect(place.steps[-1] == "step-7", f"newest checkpoint: {place.steps}")
    place.finish()
    return f"saved at step 7; {place.equals_reference()}"


@fault("Ctrl-C on one rank")
def interrupted(place: Place) -> str:
    """All ranks end at one step, saved; resumed, the run is the undisturbed one."""
    ranks = place.fail(at(6, "interrupt", 1))
    expect("SIGTERM at step 8 of 10; saved" in ranks[0].said, place.tail(ranks))
    expect([rank.code for rank in ranks] == [143, 130], place.tail(ranks))
    place.finish()
    return place.equals_reference()


@fault("a rank that hangs")
def hangs(place: Place) -> str:
    """Both ranks print their stacks and fail; resumed, the run is the undisturbed one."""
    ranks = place.fail(at(5, "hang", 1), "--runtime.hang-seconds", "8")
    for number, rank in enumerate(ranks):
        expect(f"[rank {number}] no step for 8 s, stacks of all threads" in rank.said, rank.said)
        expect(rank.code == 1, f"code {rank.code}")
    expect("in stepped" in ranks[1].said, "the stack does not show where rank 1 hangs")
    place.finish()
    return f"2 stacks; {place.equals_reference()}"


@fault("a rank that never comes (lost rendezvous)")
def never_comes(place: Place) -> str:
    """The other fails in time and says whom it could not meet; nothing is touched."""
    ranks = place.start("--runtime.timeout-seconds", "5", only=[0])
    expect(place.wait(ranks) == [1], place.tail(ranks))
    expect("could not meet the others at MASTER_ADDR" in ranks[0].said, place.tail(ranks))
    expect(not place.output.exists(), "the run's folder was made")
    return "named, exit code 1"

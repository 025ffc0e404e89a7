# SPDX-License-Identifier: MIT
"""The faults: what happens to a job, what must be left, and what was.

A fault is a function of a `Place`; its docstring is what is expected, what it returns is what was
got. It raises `Failed` where that is something else, or where the fault did not happen.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.faults import job, tiny
from tests.faults.harness import JOB_SECONDS, ROOT, Place, expect
from tests.support import s3
from tests.support.runs import DAYS
from trainer.manifest import complete

Check = Callable[[Place], str]
KILLS = 50


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


# Processes that die.


@fault("SIGKILL of rank 1", quick=True)
def rank_1_dies(place: Place) -> str:
    """All ranks fail within seconds; resumed, the run is the undisturbed one."""
    started = time.monotonic()
    place.fail(at(5, "kill", 1))
    seconds = time.monotonic() - started
    expect(place.steps[-1] in ("step-4", "step-2"), f"newest checkpoint: {place.steps}")
    place.finish()
    return f"failed after {seconds:.0f} s; {place.equals_reference()}"


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
    _wait_for(lambda: place.fired(at(4, "stop", 1)), "the fault did not fire")
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
        expect(not [p for p in disk.iterdir() if p.name != ".lock"], "something stayed")
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


def _wait_for(ready: Callable[[], bool], text: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + JOB_SECONDS
    while not ready():
        expect(time.monotonic() < deadline, text)
        time.sleep(0.01)


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
    reference, draw, hits, steps = place.harness.tiny_reference(), random.Random(1), 0, set()
    duration = 0.0
    attempt = 0
    while hits < KILLS:
        attempt += 1
        expect(attempt < 4 * KILLS, f"only {hits} kills hit a run")
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
    return _each_write(place, lambda one: str(one.folder / "checkpoints"), list(range(1, 60)))


@fault("SIGKILL at a write of a checkpoint", quick=True)
def some_writes(place: Place) -> str:
    """There is a complete checkpoint at every moment; the final metrics are the same."""
    return _each_write(place, lambda one: str(one.folder / "checkpoints"), [40, 44, 47, 50, 52])


@fault("SIGKILL at each write of checkpoints on S3")
def each_write_to_s3(place: Place) -> str:
    """The manifest is the commit: the final metrics are the undisturbed run's."""
    with s3.serving() as environment:
        make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
        subprocess.run([sys.executable, "-c", make], env=os.environ | environment, check=True)
        counts = list(range(20, 40))
        return _each_write(
            place, lambda one: f"{s3.BUCKET}/{one.folder.name}", counts, **environment
        )


# Data that changes between save and resume.


def _cut(place: Place) -> Path:
    """Kill a run on a copy of the log in the middle of its first epoch; return the copy."""
    logs = place.folder / "logs"
    shutil.copytree(place.harness.logs, logs)
    day = logs / f"dt={DAYS[0]}"
    (whole,) = day.glob("*.parquet")
    table = pq.ParquetFile(whole).read()
    whole.unlink()
    half = table.num_rows // 2
    for number, part in enumerate((table.slice(0, half), table.slice(half))):
        pq.write_table(part, day / f"part-{number}.parquet")
    place.fail(at(4, "kill", 1), logs=logs)
    expect(place.steps, "expected a checkpoint in the middle of the epoch")
    return day


def _refused(place: Place, day: Path, change: Callable[[], object], *names: str) -> str:
    """Change the log, see it refused by name, put it back, and go on."""
    before = place.folder / "before"
    shutil.copytree(day, before)
    change()
    ranks = place.run(logs=day.parent)
    expect([rank.code for rank in ranks] == [2, 2], place.tail(ranks))
    for name in names:
        expect(name in ranks[0].said, f"{name!r} is not named: {place.tail(ranks)}")
    shutil.rmtree(day)
    before.rename(day)
    place.finish(logs=day.parent)
    rows = job.rows_seen(place.output, [(10**9, 2)])
    counts = [sum(epoch.values()) for epoch in rows]
    expect(rows == place.harness.reference()["rows"], f"rows lost or trained twice: {counts}")
    return "refused by name; put back: every row once an epoch"


@fault("a Parquet file is cut short between save and resume")
def truncated(place: Place) -> str:
    """The file is named before training; put back, every row is trained once an epoch."""
    day = _cut(place)
    path = day / "part-1.parquet"
    return _refused(
        place, day, lambda: os.truncate(path, path.stat().st_size - 200), str(path), "truncated"
    )


@fault("a Parquet file is deleted between save and resume")
def deleted(place: Place) -> str:
    """The position is refused, as the log is another; put back, every row once an epoch."""
    day = _cut(place)
    return _refused(place, day, (day / "part-1.parquet").unlink, "expected log")


@fault("a Parquet file is added between save and resume")
def appended(place: Place) -> str:
    """The position is refused, as the log is another; taken away, every row once an epoch."""
    day = _cut(place)
    return _refused(
        place,
        day,
        lambda: shutil.copy(day / "part-1.parquet", day / "part-2.parquet"),
        "expected log",
    )


@fault("two Parquet files change places between save and resume", quick=True)
def swapped(place: Place) -> str:
    """The position is refused although all sizes are equal; put back, every row once an epoch."""
    day = _cut(place)

    def swap() -> None:
        (day / "part-0.parquet").rename(day / "x")
        (day / "part-1.parquet").rename(day / "part-0.parquet")
        (day / "x").rename(day / "part-1.parquet")

    return _refused(place, day, swap, "expected log")


@fault("rows of a Parquet file are rewritten between save and resume")
def rewritten(place: Place) -> str:
    """The position is refused although all counts are equal; put back, every row once an epoch."""
    day = _cut(place)
    path = day / "part-0.parquet"

    def rewrite() -> None:
        table = pq.ParquetFile(path).read()
        pq.write_table(table.take(list(range(table.num_rows - 1, -1, -1))), path)

    return _refused(place, day, rewrite, "expected log")


# Checkpoints that are damaged.


def _damaged(place: Place, damage: Callable[[Path], object], *names: str) -> str:
    """Kill a run, damage its newest checkpoint, see it named, remove it, go on from the older."""
    place.fail(at(7, "kill", 1))
    newest = complete(place.output / "checkpoints")[-1]
    damage(newest)
    ranks = place.run()
    expect([rank.code for rank in ranks] == [2, 2], place.tail(ranks))
    for name in (newest.name, *names):
        expect(name in ranks[0].said, f"{name!r} is not named: {place.tail(ranks)}")
    shutil.rmtree(newest)
    again = place.finish()
    expect("resumed at step " in again[0].said, place.tail(again))
    return f"named; from the older one {place.equals_reference()}"


@fault("a manifest is cut short")
def manifest_cut(place: Place) -> str:
    """It is named; the older checkpoint gives the undisturbed run."""
    return _damaged(
        place, lambda path: os.truncate(path / "manifest.json", 500), "manifest.json: damaged"
    )


@fault("a manifest is lost")
def manifest_lost(place: Place) -> str:
    """Without its manifest it is no checkpoint: the older one gives the undisturbed run."""
    place.fail(at(7, "kill", 1))
    (complete(place.output / "checkpoints")[-1] / "manifest.json").unlink()
    ranks = place.finish()
    expect("resumed at step " in ranks[0].said, place.tail(ranks))
    return place.equals_reference()


@fault("one bit of a shard flips")
def bit_flipped(place: Place) -> str:
    """The file is named before anything is loaded; the older one gives the undisturbed run."""

    def flip(path: Path) -> None:
        shard = path / "__0_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)

    return _damaged(place, flip, "__0_0.distcp: damaged")


@fault("a shard is lost")
def shard_lost(place: Place) -> str:
    """The file is named; the older one gives the undisturbed run."""
    return _damaged(
        place, lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp: cannot be read"
    )


@fault("the index of a checkpoint is cut short")
def index_cut(place: Place) -> str:
    """The file is named; the older one gives the undisturbed run."""
    return _damaged(place, lambda path: os.truncate(path / ".metadata", 300), ".metadata: damaged")


@fault("ids are hashed in another way than when the checkpoint was written")
def other_routing(place: Place) -> str:
    """The checkpoint is refused by name instead of read at the wrong rows."""

    def change(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        own = json.loads(text)["routing_fingerprint"]
        (path / "manifest.json").write_text(text.replace(own, "0" * len(own)))

    return _damaged(place, change, "routing of ids to table rows")


@fault("the curve file is cut short by a crash")
def curves_cut(place: Place) -> str:
    """The half line is dropped; the run is the undisturbed one."""
    place.fail(at(7, "kill", 0))
    with (place.output / "curves.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    place.finish()
    return place.equals_reference()


@fault("strange files among the checkpoints")
def strange_files(place: Place) -> str:
    """They are left alone; the run is the undisturbed one."""
    place.fail(at(7, "kill", 0))
    for name in ("step-notes", "step-99", "step-4.old"):
        (place.output / "checkpoints" / name).mkdir()
    place.finish()
    left = {path.name for path in (place.output / "checkpoints").iterdir()}
    expect({"step-notes", "step-99", "step-4.old"} <= left, f"left: {left}")
    return place.equals_reference()


# Clocks, neighbours, launchers.


@fault("the clock jumps by a day, back and forth")
def clock_jumps(place: Place) -> str:
    """Checkpoints are written and kept by step; the run is the undisturbed one."""
    back = {**at(3, "clock", None, seconds=-86_400.0, again=True), "name": "back"}
    forth = {**at(7, "clock", None, seconds=2 * 86_400.0, again=True), "name": "forth"}
    place.finish(faults=[back, forth])
    expect(place.fired(back) and place.fired(forth), "the clock did not jump")
    expect(place.steps == ["step-8", "step-10"], f"checkpoints: {place.steps}")
    return place.equals_reference()


@fault("two jobs on one output folder")
def two_jobs(place: Place) -> str:
    """The second is refused by name; the first is the undisturbed run."""
    stop = at(4, "stop", 0)
    first = place.start(faults=[stop])
    _wait_for(lambda: place.fired(stop), "the first job did not get far")
    second = place.run()
    expect([rank.code for rank in second] == [2, 2], place.tail(second))
    expect("another process trains in this folder" in second[0].said, place.tail(second))
    os.kill(first[0].pid, signal.SIGCONT)
    expect(place.wait(first) == [0, 0], place.tail(first))
    return f"refused; {place.equals_reference()}"


def _launched(place: Place, command: list[str]) -> str:
    """Run the job under a launcher that restarts it once."""
    kill = at(5, "kill", 1)
    arguments = [str(place.harness.logs), str(place.output), [], [kill]]
    script = place.folder / "job.py"
    script.write_text(
        f"import sys\nfrom tests.faults.job import main\nsys.exit(main(*{arguments!r}))\n"
    )
    return _restarted(place, [*command, str(script)], kill)


def _restarted(place: Place, command: list[str], kill: dict[str, Any]) -> str:
    """Run a launcher's command, in which a rank is killed once, and check what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if "torchx.cli.main" not in command:
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command,
        cwd=place.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * JOB_SECONDS,
    )
    said = done.stdout + done.stderr
    expect(place.fired(kill), f"the fault did not fire: {said[-1500:]}")
    expect(done.returncode == 0, f"code {done.returncode}: {said[-1500:]}")
    found = re.search(r"restart 1: resumed at step (\d) of 10; (\d) steps that were lost", said)
    expect(found, f"the restart does not say where it goes on: {said[-1500:]}")
    assert found is not None
    expect(int(found[2]) <= 4, f"lost {found[2]} steps")
    return f"{found[0]}; {place.equals_reference()}"


@fault("SIGKILL of a rank under torchrun --max-restarts 1")
def under_torchrun(place: Place) -> str:
    """The job restarts by itself from the newest checkpoint and says so; the result is the same."""
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    return _launched(place, [sys.executable, "-m", "torch.distributed.run", *words])


@fault("SIGKILL of a rank under torchx run, two nodes")
def under_torchx(place: Place) -> str:
    """The job restarts by itself from the newest checkpoint and says so; the result is the same."""
    # torchx starts local nodes in the current folder: there the trainer is this job, which then
    # takes the true one in its place.
    (place.folder / "trainer").mkdir()
    (place.folder / "trainer" / "__init__.py").touch()
    kill = at(5, "kill", 1)
    arguments = [str(place.harness.logs), str(place.output), [], [kill]]
    lines = [
        "import sys",
        "sys.path[0] = " + repr(str(ROOT)),
        "del sys.modules['trainer']",
        "from tests.faults.job import main",
        f"sys.exit(main(*{arguments!r}))",
    ]
    (place.folder / "trainer" / "train.py").write_text("\n".join(lines) + "\n")
    component = f"{ROOT / 'deploy' / 'components.py'}:train"
    words = ["--recipe", "job", "-j", "2x1", "--max_retries", "1", "--output", "run"]
    command = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_cwd", component, *words]
    return _restarted(place, command, kill)

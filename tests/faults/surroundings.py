# SPDX-License-Identifier: MIT
"""Faults from outside: clocks, other jobs, launchers that start ranks again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

from tests.faults.fault import at, fault, wait_for
from tests.faults.harness import JOB_SECONDS, ROOT, Place, expect

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
    wait_for(lambda: place.fired(stop), "the first job did not get far")
    second = place.run()
    expect([rank.code for rank in second] == [2, 2], place.tail(second))
    expect("another process trains in this folder" in second[0].said, place.tail(second))
    os.kill(first[0].pid, signal.SIGCONT)
    expect(place.wait(first) == [0, 0], place.tail(first))
    return f"refused; {place.equals_reference()}"


@fault("two fresh runs on one folder for checkpoints")
def one_folder(place: Place) -> str:
    """The second is refused by name before a checkpoint is there; the first is undisturbed."""
    words = ("--checkpoint.folder", str(place.folder / "checkpoints"))
    stop = at(1, "stop", 0)
    first = place.start(*words, faults=[stop])
    wait_for(lambda: place.fired(stop), "the first job did not get far")
    other = place.harness.place(f"{place.folder.name}-other")
    second = other.run(*words)
    expect([rank.code for rank in second] == [2, 2], other.tail(second))
    expect(f"belongs to the run in {place.output}" in second[0].said, other.tail(second))
    os.kill(first[0].pid, signal.SIGCONT)
    expect(place.wait(first) == [0, 0], place.tail(first))
    return f"refused; {place.equals_reference()}"


@fault("a relative folder for checkpoints, and another working folder")
def other_folder(place: Place) -> str:
    """The same command goes on from the checkpoint; the run is the undisturbed one."""
    words = ("--checkpoint.folder", "kept")
    place.fail(at(7, "kill", 0), *words)
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    ranks = place.finish(*words, cwd=elsewhere)
    expect("resumed at step " in ranks[0].said, place.tail(ranks))
    expect(not list(elsewhere.iterdir()), "something was written into the working folder")
    return place.equals_reference()


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
    (place.folder / ".torchxconfig").touch()
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

# SPDX-License-Identifier: MIT
"""A Slurm cluster of two nodes on this machine, as long as a test needs it.

The daemons are those of the distribution (`apt-get install slurm-wlm munge`), with a configuration,
a key and ports of their own, so that a cluster this machine belongs to is left alone.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.components import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = (socket.gethostname(), f"{socket.gethostname()}-2")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName={first} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cores} Weight=1
NodeName={second} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} Weight=2
PartitionName=all Nodes={first},{second} Default=YES MaxTime=10 State=UP
"""


def missing() -> str:
    """Return which program of Slurm this machine lacks, or nothing."""
    return next((name for name in PROGRAMS if not shutil.which(name, path=PATH)), "")


class Slurm:
    """A running cluster. Attribute: environment, with which its commands find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm and return what it printed."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def run(self, script: Path, *words: str, options: Sequence[str] = (), cwd: Path) -> str:
        """Submit a script from `cwd`, wait for the job's end, and return its state."""
        number = self.command("sbatch", "--parsable", *options, str(script), *words, cwd=cwd)
        return self.state(number.strip())

    def state(self, number: str) -> str:
        """Wait for a job's end and return the states of all its parts.

        Raises:
            TimeoutError: the job has not ended after four minutes.
        """
        shown, deadline = "", time.monotonic() + 240
        while time.monotonic() < deadline:
            shown = self.command("scontrol", "--oneliner", "show", "job", number)
            states = set(re.findall(r"\bJobState=(\w+)", shown))
            if states <= ENDED:
                return "+".join(sorted(states))
            time.sleep(0.2)
        raise TimeoutError(f"job {number}: {shown}\n{self.logs()}")

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        texts = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")]
        return "\n".join(texts)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster with its files in `folder`; stop every daemon of it at the end."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    text = CONFIG.format(
        folder=folder,
        user=getpass.getuser(),
        controller=free_port(),
        ports=(free_port(), free_port()),
        first=NODES[0],
        second=NODES[1],
        cores=os.cpu_count(),
    )
    (folder / "slurm.conf").write_text(text)
    made = Slurm(folder)
    files = [("--socket", "munge.socket"), ("--key-file", "munge.key"), ("--pid-file", "munge.pid")]
    files += [("--log-file", "munge.log"), ("--seed-file", "munge.seed")]
    munge = ["munged", "--foreground", "--force", *(f"{name}={folder / to}" for name, to in files)]
    daemons = [munge, ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, daemon in enumerate(daemons):
            with (folder / f"daemon-{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(daemon, env=made.environment, stdout=log, stderr=log)
                )
            if number == 0:
                _wait_for(made, "munge", (folder / "munge.socket").exists)
        _wait_for(made, "two idle nodes", lambda: _idle(made) == len(NODES))
        yield made
    finally:
        # Nodes first: they end what still runs of their jobs.
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle(made: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=made.environment, capture_output=True, text=True
    )
    return done.stdout.split().count("idle")


def _wait_for(made: Slurm, what: str, there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after 30 s:\n{made.logs()}")
        time.sleep(0.1)

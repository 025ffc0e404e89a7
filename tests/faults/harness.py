# SPDX-License-Identifier: MIT
"""Starts jobs, lets faults happen to them, and compares what is left with an undisturbed run.

Each fault has a folder of its own, ports are the system's to choose, and every wait has an end: so
several harnesses may run side by side, and none runs for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import job, tiny
from tests.support import runs
from trainer.checkpoint.layout import complete

ROOT = Path(__file__).resolve().parents[2]
# A loaded machine is slow; a job that waits for ever is still found.
JOB_SECONDS = 240.0
_START_SECONDS = 300.0


class Failed(Exception):
    """What was got is not what was expected."""


def expect(condition: object, text: str) -> None:
    """Fail with `text` unless the condition holds."""
    if not condition:
        raise Failed(text)


class Zygote:
    """The process that forks. See tests/faults/zygote.py."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.faults.zygote"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        timer = threading.Timer(_START_SECONDS, self._process.kill)
        timer.start()
        try:
            expect(self._answer() == {"ready": True}, "the process that forks did not start")
        finally:
            timer.cancel()

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()  # which closes the pipes, too

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        expect(line, "the process that forks has died")
        return json.loads(line)


@dataclass
class Rank:
    """One process of a job: its id, where its output goes, its exit code once it has ended."""

    pid: int
    log: Path
    code: int | None = None

    @property
    def said(self) -> str:
        """All of its output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Harness:
    """A log, an undisturbed run of the job on two ranks, and a zygote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zygote = Zygote()
        self.logs = runs.generate(folder / "logs")
        self._reference: dict[str, Any] = {}
        self._tiny: dict[str, Any] = {}

    def close(self) -> None:
        """End everything."""
        self.zygote.close()

    def place(self, name: str) -> Place:
        """Return a folder of its own for the fault `name`."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return Place(harness=self, folder=folder)

    def reference(self) -> dict[str, Any]:
        """Return losses, metrics and rows of the undisturbed run."""
        if not self._reference:
            place = self.place("undisturbed")
            place.finish()
            self._reference = place.result()
            self._reference["rows"] = job.rows_seen(place.output, [(10**9, 2)])
            expect(
                [sum(epoch.values()) for epoch in self._reference["rows"]] == [job.ROWS] * 2,
                "the undisturbed run does not train every row once an epoch",
            )
        return self._reference

    def tiny_reference(self) -> dict[str, Any]:
        """Return the metrics of the undisturbed tiny run."""
        if not self._tiny:
            place = self.place("undisturbed-tiny")
            place.tiny()
            self._tiny = tiny.metrics(place.folder)
        return self._tiny


@dataclass
class Place:
    """One fault's folder and the jobs in it."""

    harness: Harness
    folder: Path
    started: list[Rank] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def steps(self) -> list[str]:
        """Names of the complete checkpoints."""
        return [path.name for path in complete(self.output / "checkpoints")]

    def fired(self, fault: dict[str, Any]) -> bool:
        """Return whether a fault has happened."""
        return (self.folder / f"fired-{fault['name']}").exists()

    def start(
        self,
        *words: str,
        ranks: int = 2,
        faults: Sequence[dict[str, Any]] = (),
        logs: Path | None = None,
        only: Sequence[int] | None = None,
        cwd: Path = ROOT,
    ) -> list[Rank]:
        """Start the job in the folder `cwd`; `only` some of its ranks come, if given."""
        port = _free_port()
        number = len(self.started)
        found = []
        for rank in range(ranks) if only is None else only:
            log = self.folder / f"log-{number}-{rank}.txt"
            found.append(
                self._fork(
                    "tests.faults.job",
                    [str(logs or self.harness.logs), str(self.output), list(words), list(faults)],
                    {
                        **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
                        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                    },
                    log,
                    cwd,
                )
            )
        self.started += found
        return found

    def wait(self, ranks: Sequence[Rank], seconds: float = JOB_SECONDS) -> list[int]:
        """Wait for all ranks to end and return their exit codes; end those that do not."""
        deadline = time.monotonic() + seconds
        for rank in ranks:
            while rank.code is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    self.kill(ranks)
                    raise Failed(f"ranks still ran after {seconds:g} s: {self.tail(ranks)}")
                # In short waits, as other threads of the harness ask the same process.
                answer = self.harness.zygote.ask(wait=rank.pid, seconds=0.0)
                rank.code = answer["code"]
                if rank.code is None:
                    time.sleep(min(0.02, left))
        return [rank.code for rank in ranks if rank.code is not None]

    def kill(self, ranks: Sequence[Rank]) -> None:
        """End the ranks with all that they have started."""
        for rank in ranks:
            if rank.code is None:
                os.killpg(rank.pid, signal.SIGKILL)

    def run(self, *words: str, **options: Any) -> list[Rank]:
        """Start the job and wait for its end."""
        ranks = self.start(*words, **options)
        self.wait(ranks)
        return ranks

    def finish(self, *words: str, **options: Any) -> list[Rank]:
        """Run the job, which must succeed."""
        ranks = self.run(*words, **options)
        codes = [rank.code for rank in ranks]
        expect(set(codes) == {0}, f"expected the job to succeed, got {codes}: {self.tail(ranks)}")
        return ranks

    def fail(self, fault: dict[str, Any], *words: str, **options: Any) -> list[Rank]:
        """Run the job with `fault`, which must fire; no rank may succeed."""
        ranks = self.run(*words, faults=[fault], **options)
        expect(self.fired(fault), f"the fault did not fire: {self.tail(ranks)}")
        codes = [rank.code for rank in ranks]
        expect(0 not in codes, f"expected every rank to fail, got {codes}")
        return ranks

    def result(self) -> dict[str, Any]:
        """Return losses and metrics of the finished run."""
        metrics = json.loads((self.output / "metrics.json").read_text())
        kept = ("auc", "logloss", "calibration", "rows", "train_rows", "steps")
        lines = (self.output / "curves.jsonl").read_text().splitlines()
        curve = [json.loads(line) for line in lines]
        return {
            "losses": runs.losses(self.output),
            "curve": [[point[name] for name in ("auc", "learning_rate")] for point in curve],
            "metrics": {name: metrics[name] for name in kept},
        }

    def equals_reference(self) -> str:
        """Check that the finished run is bit by bit what the undisturbed one is; say so."""
        own, reference = self.result(), self.harness.reference()
        expect(own["losses"] == reference["losses"], f"losses differ: {own} {reference}")
        expect(own["curve"] == reference["curve"], f"running AUC, rates: {own} {reference}")
        expect(own["metrics"] == reference["metrics"], f"metrics differ: {own} {reference}")
        rows = job.rows_seen(self.output, [(10**9, 2)])
        expect(rows == reference["rows"], "not the same rows")
        return "every loss and metric bit-equal"

    def tiny(self, *faults: dict[str, Any], folder: str = "", **environment: str) -> Rank:
        """Run the tiny job to its end, whatever that is."""
        rank = self.start_tiny(*faults, folder=folder, **environment)
        self.wait([rank])
        return rank

    def start_tiny(self, *faults: dict[str, Any], folder: str = "", **environment: str) -> Rank:
        """Start the tiny job."""
        place = folder or str(self.folder / "checkpoints")
        log = self.folder / f"log-{len(self.started)}.txt"
        arguments = [str(self.folder), place, list(faults)]
        rank = self._fork("tests.faults.tiny", arguments, environment, log)
        self.started.append(rank)
        return rank

    def tail(self, ranks: Sequence[Rank]) -> str:
        """Return the last lines of what ranks have said."""
        return " | ".join(rank.said.strip()[-400:].replace("\n", " / ") for rank in ranks)

    def _fork(
        self,
        module: str,
        arguments: list[Any],
        environment: dict[str, str],
        log: Path,
        cwd: Path = ROOT,
    ) -> Rank:
        answer = self.harness.zygote.ask(
            module=module,
            function="main",
            arguments=arguments,
            environment=environment,
            log=str(log),
            cwd=str(cwd),
        )
        return Rank(pid=answer["pid"], log=log)


def _free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]

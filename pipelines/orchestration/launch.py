# SPDX-License-Identifier: MIT
"""Start the trainer's commands as processes, show what they print, keep it, and try again.

A stage that trains or evaluates starts the same command that a person would, and prints it. The
command's output goes to the console and to a file beside its results. If the pipeline is killed,
the command receives SIGTERM. A training then ends at its next step with a checkpoint, and a new run
of the pipeline waits for that.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.orchestration.output_files import open_log
from pipelines.orchestration.stage import StageError, Work
from trainer.metrics.spec import described
from trainer.runtime.atomic_files import read_json
from trainer.runtime.credentials import without_credentials_in

LOG = "log.txt"
RUN = "run"  # the folder of a training, in that of its stage
_KEPT_LINES = 200
# The message of a training whose folder another one has not left yet, and how long to wait for it.
_BUSY, _BUSY_SECONDS, _BUSY_PAUSE = "another process trains in this folder", 120.0, 2.0
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
# What torchrun says of itself: its note on threads, its log lines, the lines around its summary.
_THREADS = re.compile(r"\*{20,}$|Setting OMP_NUM_THREADS environment variable")
_LAUNCHER = re.compile(r"[IWE]\d{4} .*/torch/distributed/(elastic|run)")
_TRACE, _RULE = "Traceback (most recent call last):", re.compile(r"={20,}$")


class Ended(Exception):
    """A command was ended because what it had done was enough."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How processes are started.

    Args:
        launcher: `torchrun` on this machine; `torchx` through deploy/components.py.
        topology: NODESxPROCESSES; torchrun takes one node.
        scheduler: Of torchx.
        size: What torchx asks for each node (deploy/components.py); empty: this machine's size.
        retries: Of a command that failed; a training resumes from its newest checkpoint.
        pause_seconds: Before the first retry; doubled before each further one.
        tower: `package.module:Class` of a tower from outside the repository, which evaluations
            import.
    """

    launcher: Literal["torchrun", "torchx"] = "torchrun"
    topology: str = "1x1"
    scheduler: str = "local_cwd"
    size: str = ""
    retries: int = 0
    pause_seconds: float = 5.0
    tower: str = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", self.topology)
        if not match:
            raise ValueError(
                f"-j: expected NODESxPROCESSES such as 1x2, each at least 1, got {self.topology!r}"
            )
        if self.launcher == "torchrun" and match[1] != "1":
            raise ValueError(
                f"-j: torchrun starts one node from here, got {self.topology!r}; use --launcher "
                "torchx"
            )
        if self.size and self.launcher != "torchx":
            raise ValueError(
                f"--size: has no effect without --launcher torchx, got {self.size!r}; remove it"
            )
        if self.retries < 0 or self.pause_seconds < 0:
            raise ValueError(
                f"--retries: expected numbers >= 0, got {self.retries} and {self.pause_seconds} s"
            )

    def train(self, recipe: str, output: Path, overrides: Sequence[str]) -> list[str]:
        """Return the command that trains `recipe` into `output`."""
        if self.launcher == "torchrun":
            words = (recipe, "--output", str(output), *overrides)
            return [*self._python(), "-m", "trainer.train", *words]
        return [
            str(Path(sys.executable).with_name("torchx")),
            *("run", "-s", self.scheduler, "deploy/components.py:train"),
            *("--recipe", recipe, "--output", str(output), "-j", self.topology),
            *(("--size", self.size) if self.size else ()),
            *("--", *overrides),
        ]

    def evaluate(self, run: Path, data: str, days: str, rows: str = "") -> list[str]:
        """Return the command that evaluates the newest checkpoint of `run` on part of a log."""
        words = (str(run), "--data", data, *(("--rows", rows) if rows else ("--days", days)))
        return [sys.executable, "-m", "trainer.evaluate", *words, *self._tower()]

    def compare(self, models: Sequence[Path], data: str, days: str, replicates: int) -> list[str]:
        """Return the command that compares one or two models on the same days of a log."""
        words = (*map(str, models), "--data", data, "--days", days, "--replicates", str(replicates))
        return [sys.executable, "-m", "trainer.compare", *words, *self._tower()]

    def _tower(self) -> tuple[str, ...]:
        return ("--tower", self.tower) if self.tower else ()

    def _python(self) -> list[str]:
        processes = self.topology.partition("x")[2]
        if processes == "1":
            return [sys.executable]
        words = ("--standalone", "--nnodes", "1", "--nproc-per-node", processes)
        return [sys.executable, "-m", "torch.distributed.run", *words]

    def start(
        self,
        command: Sequence[str],
        log: Path,
        say: Callable[[str], None],
        answers: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> str:
        """Run `command`, again where that may help; return what it wrote to standard output.

        Args:
            log: file to add all of its output to.
            answers: whether its standard output is an answer, which is not shown.
            stop: asked after each line that the command prints; it is ended when that is true.

        Raises:
            Ended: `stop` was true.
            ValueError: the command ended because its configuration or data are wrong (exit code 2).
            StageError: it failed otherwise, every time.
        """
        attempt, pause, waited = 0, self.pause_seconds, 0.0
        while True:
            say(f"$ {shlex.join(['python', *without_credentials_in(command[1:])])}")
            code, output, printed, stopped = _stream(command, log, say, answers, stop)
            if stopped:
                raise Ended
            if code == 0:
                return output
            if _BUSY in printed and waited < _BUSY_SECONDS:
                say(f"the training of a run that was killed is ending; waiting {_BUSY_PAUSE:g} s")
                time.sleep(_BUSY_PAUSE)
                waited += _BUSY_PAUSE
                continue
            # torchrun ends with code 1 whatever its processes end with; its summary has theirs.
            if code == 2 or re.search(r"exitcode\s*: 2\b", printed):
                raise ValueError(_reason(printed))
            if attempt == self.retries:
                raise StageError(f"{_name(command)} ended with code {code}: {_reason(printed)}")
            say(f"ended with code {code}; trying again in {pause:g} s")
            time.sleep(pause)
            attempt, pause = attempt + 1, 2 * pause


def train_and_read(config: LaunchConfig, command: Sequence[str], work: Work) -> dict[str, Any]:
    """Run a training unless the work's folder holds it finished; return its metrics."""
    path = work.folder / RUN / "metrics.json"
    if not path.is_file():  # an attempt may have died between the training's end and the commit
        config.start(command, work.folder / LOG, work.say)
    metrics = read_json(path)
    return {**metrics, "summary": described(metrics)}


def add_options(parser: argparse.ArgumentParser, retries: int = 0) -> None:
    """Add the options that `from_options` reads."""
    add, default = parser.add_argument_group("processes").add_argument, LaunchConfig()
    launchers = f"torchrun or torchx (default: {default.launcher})"
    add("--launcher", default=default.launcher, choices=("torchrun", "torchx"), help=launchers)
    topology = f"NODESxPROCESSES of a training (default: {default.topology})"
    add("-j", dest="topology", default=default.topology, metavar="NxM", help=topology)
    scheduler = f"of torchx (default: {default.scheduler})"
    add("--scheduler", default=default.scheduler, metavar="NAME", help=scheduler)
    add("--size", default="", metavar="SIZE", help="of a node for torchx: gpu8, or CORES:GPUS:MIB")
    add("--retries", type=int, default=retries, help=f"of a failed command (default: {retries})")


def from_options(options: argparse.Namespace, tower: str = "") -> LaunchConfig:
    """Return the configuration that the options of `add_options` give.

    Args:
        options: Of the command line.
        tower: As in `LaunchConfig`.
    """
    return LaunchConfig(
        launcher=options.launcher,
        topology=options.topology,
        scheduler=options.scheduler,
        size=options.size,
        retries=options.retries,
        tower=tower,
    )


def _stream(
    command: Sequence[str],
    log: Path,
    say: Callable[[str], None],
    answers: bool,
    stop: Callable[[], bool] | None,
) -> tuple[int, str, str, bool]:
    """Run a command.

    Returns:
        Its exit code, its standard output, the last of all it printed, and whether it was stopped.
    """
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    banners = _Banners()
    with (
        open_log(log) as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=_end_with_parent if _LIBC else None,
        ) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        output: list[str] = []

        def read_output(lines: Iterable[str]) -> None:
            for line in lines:
                output.append(line)
                if not answers:
                    show(line)

        def show(line: str) -> None:
            last.append(line)
            file.write(line)
            file.flush()
            if not banners.has(line):
                say(line.rstrip())

        reader = threading.Thread(target=read_output, args=(process.stdout,))
        reader.start()
        stopped = False
        for line in process.stderr:
            show(line)
            if stop is not None and not stopped and process.poll() is None and stop():
                stopped = True
                process.terminate()
        reader.join()
    return process.returncode, "".join(output), "".join(last), stopped


class _Banners:
    """Recognises what torchrun says of itself, line by line; the ranks say why they ended."""

    def __init__(self) -> None:
        self._after_log = self._in_summary = False
        self._rules = 0

    def has(self, line: str) -> bool:
        """Return whether `line` is torchrun's own: a note, a log line, or of its last summary."""
        line = line.rstrip()
        if self._in_summary:
            self._rules += bool(_RULE.match(line))
            self._in_summary = self._rules < 2  # one rule above the summary, one below
            return True
        if _THREADS.match(line):
            return True
        if self._after_log and line == _TRACE:
            self._in_summary, self._rules = True, 0
            return True
        self._after_log = bool(_LAUNCHER.match(line))
        return self._after_log


def _end_with_parent() -> None:
    """Let the system ask this process to end when the one that started it is gone."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reason(printed: str) -> str:
    """Return a command's own message on why it failed, or the last line that it printed."""
    errors = re.findall(r"^.*?\berror: (.+)$", printed, re.MULTILINE)
    lines = [line for line in printed.splitlines() if line.strip()]
    return errors[0] if errors else lines[-1].strip() if lines else "it printed nothing"


def _name(command: Sequence[str]) -> str:
    """Return what a command runs: the module that comes last after -m, or its second word."""
    modules = [word for before, word in itertools.pairwise(command) if before == "-m"]
    return modules[-1] if modules else " ".join(command[1:3])

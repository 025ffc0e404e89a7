# SPDX-License-Identifier: MIT
"""A replay that kills itself: the real commands, at any change that they make to the disk.

The trainer's commands run in forks of the replay's process instead of new interpreters, which saves
seconds each; a fork has read nothing but code. What a kill ends is the whole group at once, as a
machine that loses its power does, or the replay alone, whose trainer then lives on.
"""

from __future__ import annotations

import importlib
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trainer.compare  # and what commands import when they begin
import trainer.config.config
import trainer.data.files
import trainer.train  # noqa: F401  (its seconds, once)
from pipelines import replay, run
from pipelines.orchestration import launch

_CHANGES = ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.symlink")


def main(words: Sequence[str], output: str, kill: dict[str, Any] | None, seen: str) -> int:
    """Run `python -m pipelines.replay WORDS`, and die where `kill` says.

    kill: `match`, a regular expression of a change such as "os.rename FROM TO" with paths below
      `output`; `count`, which of its matches; `alone`, whether the trainer lives on.
    seen: file for every change, a line each.
    """
    # A module's attribute, not its name here: the launcher looks it up when it starts a command.
    launch._stream = _forked  # pyright: ignore[reportPrivateUsage]
    _watch(output, kill, seen)
    return replay.main(list(words))


def nights(several: Sequence[Sequence[str]]) -> int:
    """Run `python -m pipelines.run nightly WORDS` for each; print the exit codes as a list."""
    launch._stream = _forked  # pyright: ignore[reportPrivateUsage]
    codes = [run.main(["nightly", *words]) for words in several]
    print(f"codes {codes}", flush=True)
    return 0


def _watch(output: str, kill: dict[str, Any] | None, seen: str) -> None:
    """Count what this process and its forks change below `output`, and kill them at one of it."""
    counter, owner = mmap.mmap(-1, 8), os.getpid()
    log = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            arguments = arguments[:1]
        else:
            changes = event in _CHANGES
        if not changes:
            return
        paths = [str(one) for one in arguments[:2] if isinstance(one, str | os.PathLike)]
        if not any(output in path for path in paths):
            return
        text = " ".join([event, *(path.replace(f"{output}/", "") for path in paths)])
        os.write(log, f"{text}\n".encode())
        if kill is None or not re.search(kill["match"], text):
            return
        count = int.from_bytes(counter[:], "little") + 1
        counter[:] = count.to_bytes(8, "little")
        if count == kill["count"]:
            os.write(log, f"killed before {text}\n".encode())
            if kill.get("alone"):
                os.kill(owner, signal.SIGKILL)
            else:
                os.killpg(os.getpgid(0), signal.SIGKILL)
            time.sleep(0 if kill.get("alone") else 60)

    sys.addaudithook(look)


def _forked(
    command: Sequence[str],
    log: Path,
    say: Callable[[str], None],
    answers: bool,
    stop: Callable[[], bool] | None,
) -> tuple[int, str, str, bool]:
    """Run a command of the trainer in a fork, as `pipelines.orchestration.launch._stream` runs a
    process."""
    module, words = command[2], list(command[3:])
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reads)
        with log.open("a") as file:
            os.dup2(writes if answers else file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = 70
        try:
            code = importlib.import_module(module).main(words)
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        output = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = log.read_text("utf-8")
    if not answers:
        output = printed
    say(printed[-2000:])
    return code, output, printed, False

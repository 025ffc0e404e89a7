# SPDX-License-Identifier: MIT
"""One process of the fuzzer: it reads damaged inputs one after another and prints what was wrong.

A case may run 5 s of processor time and take 1 GiB of memory above what the sound inputs took. An
audit hook reports code that an input has started, and files written outside the case's folder. A
process that dies or stops is the parent's to notice: the number of the current case lies in a file.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import BOMB
from tests.fuzz.targets import TARGETS, Answer

CPU_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
_STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"}
_STARTS |= {"socket.connect", "pty.spawn", "webbrowser.open"}
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.symlink"}


class Hang(BaseException):
    """A case took too long."""


class Watch:
    """What an input makes the process do that no reader does."""

    def __init__(self, folder: Path) -> None:
        self.armed = False
        self.seen: list[str] = []
        self._folder = str(folder.resolve())
        sys.addaudithook(self._hook)
        sys.meta_path.insert(0, self)  # imports by importlib raise no audit event

    def find_spec(self, name: str, *_: Any) -> None:
        """Note an import of the bomb; find nothing."""
        if self.armed and name.partition(".")[0] == BOMB:
            self.seen.append(f"import {name}")

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        first = values[0] if values else ""
        if event in _STARTS:
            self.seen.append(f"{event} {values!r:.200}")
        elif event == "open" and self._writes(values) and not self._within(first):
            self.seen.append(f"wrote {first!r:.200}")
        elif event in _CHANGES and not self._within(first) and values[-1] in (-1, None):
            self.seen.append(f"{event} {first!r:.200}")

    @staticmethod
    def _writes(values: tuple[Any, ...]) -> bool:
        mode, flags = (*values, None, 0, 0)[1:3]
        if isinstance(mode, str):
            return bool(set(mode) & set("wax+"))
        return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))

    def _within(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a descriptor
        place = os.path.abspath(os.fsdecode(path))
        return place.startswith(self._folder) or place == os.devnull


def memory_in_use() -> int:
    """Return this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def peak() -> int:
    """Return the most memory that this process has ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def on_time(*_: Any) -> None:
    """End a case."""
    raise Hang


def signature(error: BaseException) -> str:
    """Return what findings of one cause have in common: the kind and where it was raised."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/tests/fuzz/" not in frame.filename
    ]
    inner = [f for f in ours if re.search(r"/(embeddings|models|trainer|pipelines)/", f.filename)]
    place = (inner or ours or [None])[-1]
    if isinstance(error, Answer):
        return f"an answer for no person: {str(error)[:60]!r}"
    where = f"{Path(place.filename).name}:{place.lineno}" if place else "?"
    return f"{type(error).__name__} at {where}"


def case(target: Any, watch: Watch, seed: int, number: int) -> tuple[str, str] | None:
    """Read one damaged input; return (signature, detail) of a finding, or None."""
    files = target.damaged(Random(f"{seed}/{target.name}/{number}"))
    before = peak()
    watch.seen, watch.armed = [], True
    found = None
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        target.read(files)
    except Hang as error:
        found = f"more than {CPU_SECONDS:.0f} s", "".join(traceback.format_tb(error.__traceback__))
    except MemoryError as error:
        found = f"memory: {signature(error)}", "".join(traceback.format_exception(error))
    except BaseException as error:
        found = signature(error), "".join(traceback.format_exception(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        watch.armed = False
    if watch.seen:
        return f"ran code: {watch.seen[0][:80]}", "; ".join(watch.seen[:5])
    if found is None and peak() - before > MEMORY_BYTES:
        return "memory", f"{(peak() - before) >> 20} MiB"
    return found


def work(name: str, folder: Path, seed: int, numbers: range) -> None:
    """Read the cases of `numbers`, printing a line of JSON for each finding and at the end."""
    warnings.simplefilter("ignore")
    watch = Watch(folder)
    target = TARGETS[name](folder)
    signal.signal(signal.SIGPROF, on_time)
    for number in range(-20, 0):  # load what sound and hardly damaged inputs need
        case(target, watch, seed, number)
    limit = memory_in_use() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    current = os.open(folder / "current", os.O_WRONLY | os.O_CREAT)
    for number in numbers:
        os.pwrite(current, f"{number:12d}".encode(), 0)
        found = case(target, watch, seed, number)
        if found is not None:
            text = {"number": number, "signature": found[0], "detail": found[1][-4_000:]}
            print(json.dumps(text), flush=True)
    print(json.dumps({"done": numbers.stop}), flush=True)


if __name__ == "__main__":
    kind, place, first_seed, start, stop, step = sys.argv[1:]
    work(kind, Path(place), int(first_seed), range(int(start), int(stop), int(step)))

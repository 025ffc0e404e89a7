# SPDX-License-Identifier: MIT
"""Read damaged inputs until a time or a number is reached: python -m tests.fuzz.run [KIND ...].

  python -m tests.fuzz.run --seconds 600 --seed 1
  python -m tests.fuzz.run schema index --count 200000 --jobs 2

Each case is known by its seed and number. A finding is an input that gave a trace, ran code, wrote
elsewhere, took more than 5 s or 1 GiB, or ended the process. Findings of one cause are listed once;
the first input of each is kept below --keep. The exit code is 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Lock

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
STOPPED_SECONDS = 60.0
# Thousands of small files a second: in memory where the system has a place for that.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(kw_only=True)
class Findings:
    """What was found in one kind of input, by cause.

    Attributes:
        cases: inputs read.
        counts: findings of each cause.
        first: the number and the details of the first finding of each cause.
    """

    kind: str
    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, str]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def add(self, number: int, cause: str, detail: str) -> None:
        """Add a finding."""
        with self.lock:
            self.counts[cause] += 1
            self.first.setdefault(cause, (number, detail))


@dataclass(frozen=True, kw_only=True)
class Share:
    """The cases of one worker: every `step`-th number from `start` to below `stop`."""

    seed: int
    start: int
    stop: int
    step: int
    deadline: float


def run_share(findings: Findings, share: Share) -> None:
    """Read the cases of a share, in one process after another where one dies or stops."""
    number = share.start
    while number < share.stop and time.monotonic() < share.deadline:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_MEMORY) as name:
            last, why = _run_worker(findings, share, number, Path(name))
            with findings.lock:
                findings.cases += max(0, (last - number) // share.step + 1)
            if why:
                findings.add(last, *why)
            number = last + share.step


def _run_worker(
    findings: Findings, share: Share, start: int, folder: Path
) -> tuple[int, tuple[str, str] | None]:
    """Return the last case that a worker has begun, and why it ended if it should not have."""
    module = [sys.executable, "-m", "tests.fuzz.worker", findings.kind, str(folder)]
    words = [*module, *map(str, (share.seed, start, share.stop, share.step))]
    output, errors = folder / "findings", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        child = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=err)
        last, since, why = start - share.step, time.monotonic(), None
        while child.poll() is None:
            time.sleep(0.05)
            now, current = time.monotonic(), _current(folder)
            if current not in (None, last):
                last, since = current, now
            if now > share.deadline:
                child.kill()
                break
            if current is not None and now - since > STOPPED_SECONDS:
                child.kill()
                why = f"stopped for {STOPPED_SECONDS:.0f} s", ""
                break
        code = child.wait()
    current = _current(folder)
    last = start - share.step if current is None else current
    done = False
    for line in output.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        done = done or "done" in found
        if "signature" in found:
            findings.add(found["number"], found["signature"], found["detail"])
    if not done and why is None and time.monotonic() < share.deadline:
        tail = errors.read_text(encoding="utf-8", errors="replace")[-3_000:]
        if last < start:
            raise RuntimeError(f"{findings.kind}: the worker did not begin (code {code}): {tail}")
        why = f"the process died with code {code}", tail
    return (share.stop - 1 if done else last), why


def _current(folder: Path) -> int | None:
    try:
        return int((folder / "current").read_text() or "x")
    except (OSError, ValueError):
        return None


def keep(findings: Findings, seed: int, folder: Path) -> None:
    """Write the first input of each cause into a folder of its own, with what happened."""
    if not findings.first:
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        target = TARGETS[findings.kind](Path(name))
        for number, detail in findings.first.values():
            place = folder / f"{findings.kind}-{seed}-{number}"
            place.mkdir(parents=True, exist_ok=True)
            for file, content in target.damaged(Random(f"{seed}/{findings.kind}/{number}")).items():
                (place / file).write_bytes(content)
            (place / "what-happened.txt").write_text(detail, encoding="utf-8")


def fuzz(kind: str, seed: int, count: int, seconds: float, jobs: int) -> Findings:
    """Read damaged inputs of one kind and return what was found."""
    findings = Findings(kind=kind)
    deadline = time.monotonic() + seconds
    shares = [
        Share(seed=seed, start=job, stop=count, step=jobs, deadline=deadline)
        for job in range(min(jobs, count))
    ]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda share: run_share(findings, share), shares))
    return findings


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(TARGETS)} (default: all)")
    add("--seed", type=int, default=0, help="of the damage (default: 0)")
    add("--count", type=int, default=200_000, help="inputs of each kind (default: 200000)")
    add("--seconds", type=float, default=600.0, help="for all kinds together (default: 600)")
    add("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    add("--keep", type=Path, default=Path("fuzz-findings"), help="folder for inputs of findings")
    given = parser.parse_args()
    kinds = given.kinds or list(TARGETS)
    unknown = sorted(set(kinds) - set(TARGETS))
    if unknown:
        parser.error(f"KIND: expected some of {', '.join(TARGETS)}, got {', '.join(unknown)}")
    failed, end = False, time.monotonic() + given.seconds
    for place, kind in enumerate(kinds):
        seconds = max(1.0, (end - time.monotonic()) / (len(kinds) - place))
        found = fuzz(kind, given.seed, given.count, seconds, given.jobs)
        keep(found, given.seed, given.keep)
        print(f"{kind}: {found.cases:,} inputs, {len(found.counts)} causes of findings", flush=True)
        for cause, count in found.counts.most_common():
            number = found.first[cause][0]
            print(f"  {count:>7,} x {cause}; first {given.keep}/{kind}-{given.seed}-{number}")
        failed = failed or bool(found.counts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

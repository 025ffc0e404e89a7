# SPDX-License-Identifier: MIT
"""Our speed against others', and against ourselves without an optimisation: `make bench`.

    python -m tests.benchmarks.bench [--pairs 7] [--only WORD ...] [--globo LOGS] [--criteo LOGS]
        [--json FILE] [--page FILE]

A benchmark has two sides, each a process of its own that is warm before the first round
(`sides.py`). A pair runs one side after the other, every other pair in the other order. Reported is
the median over the pairs of the ratio of units a second of the sides' CPU time, with its quartiles.
A pair in which other processes took more than 2 % of the cores is marked; such figures hold less.
The JSON file has every round; the page is one table. A benchmark whose data is not there, or whose
two sides are the same on this machine, says so in place of a figure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from trainer.distributed.precision import multiplies_bf16

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
MIN_PAIRS = 7
MOST_FOREIGN = 0.02
_TOWERS = ("specformer", "rankelastor", "tokenformer")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Two sides, what they do, and the least ratio that is aimed at.

    Attributes:
        name: what is compared with what.
        ours: name and settings of a side (`sides.SIDES`).
        theirs: of the other.
        target: least ratio of ours to theirs; 0 for none.
        missing: why it cannot be run; empty if it can.
    """

    name: str
    ours: tuple[str, dict[str, Any]]
    theirs: tuple[str, dict[str, Any]]
    target: float = 0.0
    missing: str = ""


@dataclass(kw_only=True)
class Result:
    """What came of a benchmark: ratios, one a pair, and the share that others took of the cores."""

    ratios: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """Pairs in which others took more than they may."""
        return sum(share > MOST_FOREIGN for share in self.foreign)

    def quartiles(self) -> tuple[float, float, float]:
        """Return the lower quartile, the median and the upper quartile of the ratios."""
        low, median, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, median, high


class Side:
    """A side's process."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.sides", name, json.dumps(settings)]
        self._command = shlex.join(command)
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def work(self) -> dict[str, float]:
        """Work once; return `units`, `wall` and `cpu` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{self._command}: ended with exit code {code}")
        return json.loads(line)


def benchmarks(globo: Path, criteo: Path) -> list[Benchmark]:
    """Return all benchmarks."""
    found = [
        Benchmark(
            name=f"spectral operator / torch.linalg.svd, {tuple(shape)}",
            ours=("operator", {"shape": shape}),
            theirs=("svd", {"shape": shape}),
            target=target,
        )
        for shape, target in (([1024, 16, 304], 8), ([512, 39, 312], 6), ([4096, 24, 64], 6))
    ]
    no_globo = "" if globo.exists() else "no log of Globo (--globo)"
    no_criteo = "" if criteo.exists() else "no log of Criteo (--criteo)"
    same = "" if multiplies_bf16(torch.device("cpu")) else "auto is fp32 on this CPU"
    for tower in ("dlrm", *_TOWERS):
        step = {"recipe": f"{tower}.globo", "data": str(globo)}
        system, auto = {**step, "allocator": "system"}, {**step, "dtype": "auto"}
        found.append(
            Benchmark(
                name=f"{tower}.globo, runtime.allocator keep / system",
                ours=("training", step),
                theirs=("training", system),
                missing=no_globo,
            )
        )
        found.append(
            Benchmark(
                name=f"{tower}.globo, precision.dtype auto / fp32",
                ours=("training", auto),
                theirs=("training", step),
                missing=no_globo or same,
            )
        )
    found += [
        Benchmark(
            name=f"rows/s of {tower}.globo / dlrm.globo",
            ours=("training", {"recipe": f"{tower}.globo", "data": str(globo)}),
            theirs=("training", {"recipe": "dlrm.globo", "data": str(globo)}),
            target=0.6 if tower == "specformer" else 0.0,
            missing=no_globo,
        )
        for tower in _TOWERS
    ]
    logs = (("criteo", criteo, 0.6, no_criteo), ("globo", globo, 0.35, no_globo))
    for log, path, target, missing in logs:
        settings = {"recipe": f"dlrm.{log}", "data": str(path)}
        found.append(
            Benchmark(
                name=f"loader of {log} / Arrow's scan of its columns",
                ours=("loading", settings),
                theirs=("scanning", settings),
                target=target,
                missing=missing,
            )
        )
    return found


def measure(benchmark: Benchmark, pairs: int) -> Result:
    """Run a benchmark's pairs."""
    result, sides = Result(), []
    try:
        sides = [Side(*benchmark.ours), Side(*benchmark.theirs)]
        for pair in range(pairs):
            busy, began = busy_seconds(), time.monotonic()
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            told = {number: sides[number].work() for number in order}
            seconds = time.monotonic() - began
            own = told[0]["cpu"] + told[1]["cpu"]
            share = max(0.0, busy_seconds() - busy - own) / (seconds * (psutil.cpu_count() or 1))
            speeds = [told[number]["units"] / told[number]["cpu"] for number in (0, 1)]
            result.ratios.append(speeds[0] / speeds[1])
            result.foreign.append(share)
            result.rounds.append({"ours": told[0], "theirs": told[1], "foreign": share})
    finally:
        for side in sides:
            side.stop()
    return result


def busy_seconds() -> float:
    """Return the CPU seconds that all processes of the machine have taken."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def machine() -> dict[str, Any]:
    """Return what figures depend on: CPU, cores, memory, versions."""
    features = torch.cpu.get_capabilities()
    wanted = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    names = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy", "pyarrow")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cpu": features.get("cpu_name", platform.processor()),
        "features": [name for name in wanted if features.get(name)],
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
        "seed": 0,
    }


def row(benchmark: Benchmark, result: Result | None) -> str:
    """Return a benchmark's line of the table."""
    target = f"{benchmark.target:g}" if benchmark.target else ""
    if result is None:
        return f"| {benchmark.name} | not run: {benchmark.missing} | | {target} | |"
    low, median, high = result.quartiles()
    met = "" if not benchmark.target else ("met" if median >= benchmark.target else "missed")
    busy = f"{result.busy} of {len(result.ratios)}, to {100 * max(result.foreign):.0f} %"
    return (
        f"| {benchmark.name} | {median:.2f} | {low:.2f} to {high:.2f} | {target} {met} | {busy} |"
    )


def page(found: dict[str, Any], rows: list[str], command: str) -> str:
    """Return the page: where and how it was measured, and the table."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    features = ", ".join(found["features"]) or "none of AVX2 and AVX-512"
    cores = f"{found['cores']} cores, {found['memory_bytes'] >> 30} GiB"
    head = f"""# Benchmarks

Written on {found["date"]} by `{command}`.
`make bench` runs all of it anew. Ratios of units of work a second of CPU time, one thread a side,
both sides warm and in turn; medians over the pairs, with quartiles. The last column counts the
pairs in which other processes took more than {100 * MOST_FOREIGN:.0f} % of the cores, and the
largest share: such figures hold less.

{found["cpu"]} ({features}), {cores}.
Python {found["python"]}, {versions}.

| ours / theirs | ratio | quartiles | aim | pairs with other work |
|---|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n"


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="benchmarks in alternating pairs")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of benchmarks")
    parser.add_argument("--globo", type=Path, default=SHARED / "globo_sessions")
    parser.add_argument("--criteo", type=Path, default=SHARED / "criteo_1tb_80k")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "bench.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    words = parser.parse_args()
    if words.pairs < MIN_PAIRS:
        parser.error(f"--pairs: a median needs at least {MIN_PAIRS}, got {words.pairs}")
    chosen = [
        benchmark
        for benchmark in benchmarks(words.globo, words.criteo)
        if not words.only or any(word in benchmark.name for word in words.only)
    ]
    command = "python -m tests.benchmarks.bench"
    command += f" --pairs {words.pairs}" + "".join(
        f" --only {shlex.join(words.only)}" for _ in words.only[:1]
    )
    found = {"command": command, "date": f"{datetime.date.today()}", **machine(), "results": {}}
    rows = []
    for benchmark in chosen:
        result = None if benchmark.missing else measure(benchmark, words.pairs)
        rows.append(row(benchmark, result))
        print(rows[-1], flush=True)
        rounds = [] if result is None else result.rounds
        found["results"][benchmark.name] = {"missing": benchmark.missing, "rounds": rounds}
        # After each, so that what an interrupted command has measured is there.
        words.json.parent.mkdir(parents=True, exist_ok=True)
        words.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        words.page.write_text(page(found, rows, command), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

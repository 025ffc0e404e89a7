# SPDX-License-Identifier: MIT
"""Times that can be compared on a shared machine: interleaved rounds, ratios inside a round.

Seconds of one run say little where other work comes and goes; the ratio of two candidates that ran
one right after the other says much more. `interleave` runs every candidate once a round, starting
each round with another one, and keeps all times; `Times.ratio` is the median over the rounds of the
ratio within a round, with its quartiles.

On a CPU everything runs in one thread and the clock counts the process's own CPU time, so being
suspended costs nothing. On a GPU the clock is the wall's, read after the device has finished.
A benchmark:

    single_threaded()
    times = interleave({"ours": ours, "theirs": theirs}, rounds=9)
    print(times.ratio("theirs", "ours"))
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

MIN_ROUNDS = 7
Bound = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Median and quartiles over rounds of one candidate's seconds over another's."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:6.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every candidate in every round: `seconds[name][round]`."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median seconds of a candidate; comparable only within one run."""
        return statistics.median(self.seconds[name])

    def ratio(self, over: str, under: str) -> Ratio:
        """Return how many times as long as `under` the candidate `over` takes."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        ratios = [a / b for a, b in pairs]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(median=median, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a report: what was compared, the ratio, and the bound it is held against."""

    name: str
    ratio: Ratio
    bound: Bound | None = None
    target: float | None = None

    @property
    def met(self) -> bool:
        """Whether the median keeps the bound; True where there is none."""
        if self.bound is None or self.target is None:
            return True
        median = self.ratio.median
        return median >= self.target if self.bound == "at least" else median <= self.target

    def __str__(self) -> str:
        text = f"{self.name:<64} {self.ratio}"
        if self.bound is None or self.target is None:
            return text
        return f"{text}  {self.bound} {self.target:g}: {'met' if self.met else 'MISSED'}"


def single_threaded() -> None:
    """Use one thread from here on; call it before the first measurement."""
    torch.set_num_threads(1)


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    device: torch.device | None = None,
    min_seconds: float = 0.02,
) -> Times:
    """Return the times of all candidates, each run once a round after one run to warm up.

    rounds: at least 7. min_seconds: a candidate faster than this is repeated within a round until
    it takes about as long; its time is that of one repetition.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"a median needs at least {MIN_ROUNDS} rounds, got {rounds}")
    repeats = {}
    for name, candidate in candidates.items():
        _seconds(candidate, 1, device)
        once = _seconds(candidate, 1, device)
        repeats[name] = max(1, round(min_seconds / max(once, 1e-7)))
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for start in range(rounds):
        first = start % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_seconds(candidates[name], repeats[name], device))
    return Times(seconds=seconds)


def _seconds(candidate: Callable[[], object], repeats: int, device: torch.device | None) -> float:
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    for _ in range(repeats):
        candidate()
    if on_gpu:
        torch.cuda.synchronize(device)
    return (clock() - start) / repeats

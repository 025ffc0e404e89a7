# SPDX-License-Identifier: MIT
"""What the exporter adds to a step: blocks of steps with it and without, in turn, in one run.

    torchrun --nproc-per-node 2 -m tests.benchmarks.exporter --data LOGS [--recipe dlrm.demo]
                                            [--pairs 7] [--block 200] [setting value ...]

LOGS: `python -m pipelines.synthesize LOGS`. With: every step is noted and sent, one of a log
interval (50 steps) is timed by its parts, and rank 0 is scraped once a block, which is to last no
longer than a server waits (15 s; the mean is printed). Without: nothing of that. The figures are
the median over pairs of one block's time over the other's, with quartiles, on rank 0: CPU time of
the process with all its threads (the scraping client's too), and the clock's. At most 1.01 is
wanted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.timing import Line, Times
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime, start
from trainer.trainer import Trainer

INTERVAL = 50
LIMIT = 1.01


def scrape(output: Path) -> None:
    """Ask the exporter of a run for everything, as a server does."""
    (note,) = json.loads((output / "exporter-0.json").read_text("utf-8"))
    with urllib.request.urlopen(f"http://{note['targets'][0]}/metrics", timeout=10) as answer:
        answer.read()


class Blocks:
    """Takes the exporter away in every other block of a run, and keeps the time of each.

    Attributes: cpu, clock: seconds by block, `with` and `without` (the first pair is left out).
    """

    def __init__(self, trainer: Trainer, runtime: Runtime, size: int) -> None:
        self.trainer, self.runtime, self.size = trainer, runtime, size
        self.cpu: dict[str, list[float]] = {"with": [], "without": []}
        self.clock: dict[str, list[float]] = {"with": [], "without": []}
        self._step = trainer._train_step
        self._sample = trainer.pipeline.phases.step
        self._listeners: list[Any] = []
        self._before = 0.0, 0.0
        self._name = "with"
        trainer._train_step = self.step

    def step(self, batches: Iterator[Any]) -> None:
        """Take one step; begin a block where one ends."""
        trainer, size = self.trainer, self.size
        if trainer.progress.step % size == 0:
            self._begin("without" if trainer.progress.step // size % 2 else "with")
        if (
            self._name == "with"
            and trainer.progress.step % size == size // 2
            and self.runtime.is_first
        ):
            threading.Thread(target=scrape, args=(trainer.output,)).start()
        self._step(batches)
        if trainer.progress.step % size == 0 and trainer.progress.step > 2 * size:
            self.cpu[self._name].append(time.process_time() - self._before[0])
            self.clock[self._name].append(time.perf_counter() - self._before[1])

    def _begin(self, name: str) -> None:
        telemetry = self.trainer.telemetry
        self._listeners = self._listeners or telemetry.listeners
        telemetry.listeners = self._listeners if name == "with" else []
        own = INTERVAL if name == "with" else 1 << 40  # whose middle never comes
        self.trainer.pipeline.phases.step = lambda step, interval: self._sample(step, own)
        self._name = name
        self._before = time.process_time(), time.perf_counter()


def measure(runtime: Runtime, config: TrainConfig, output: Path, size: int) -> Blocks:
    """Train and return what the blocks of `size` steps took on this rank."""
    trainer = Trainer(config, output, runtime)
    blocks = Blocks(trainer, runtime, size)
    trainer.fit()
    return blocks


def main() -> None:
    """Print the ratios; rank 0 speaks."""
    parser = argparse.ArgumentParser(description="What the exporter adds to a step.")
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="dlrm.demo")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--block", type=int, default=200)
    options, overrides = parser.parse_known_args()
    steps = 2 * options.block * (options.pairs + 1)
    words = ["--data.path", options.data, "--max-steps", str(steps), "--epochs", "100"]
    words += ["--telemetry.interval-steps", str(INTERVAL), "--telemetry.mode", "quiet"]
    config = apply_overrides(load_recipe(options.recipe), [*words, *overrides])
    runtime = start(config.runtime)
    with tempfile.TemporaryDirectory() as folder:
        blocks = measure(runtime, config, Path(folder) / "run", options.block)
    for what, seconds in (("CPU time", blocks.cpu), ("clock", blocks.clock)):
        ratio = Times(seconds=seconds).ratio("with", "without")
        if runtime.is_first:
            print(Line(name=f"exporter: {what} of a step", ratio=ratio, bound="at most",
                       target=LIMIT))  # fmt: skip
    if runtime.is_first:
        print(f"a block took {statistics.mean(blocks.clock['with']):.1f} s by the clock")
    runtime.stop()


if __name__ == "__main__":
    main()

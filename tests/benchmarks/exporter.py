# SPDX-License-Identifier: MIT
"""What the exporter adds to a step: blocks of steps with it and without, in turn, in one run.

    torchrun --nproc-per-node 2 -m tests.benchmarks.exporter --data LOGS [--recipe dlrm.demo]
                                                             [--pairs 10] [setting value ...]

LOGS: `python -m pipelines.synthesize LOGS`. A block is a log interval (20 steps). With: every step
is noted and sent, one is timed by its parts, and rank 0 is scraped once, which at this pace is many
times as often as a server would. Without: nothing of that. The figures are the median over pairs of
one block's time over the other's, with quartiles, on rank 0: CPU time of the process with all its
threads (the scraping client's too), which other work on the machine does not change, and the
clock's. At most 1.01 is wanted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.timing import Line, Times
from trainer.config import TrainConfig, apply_overrides, load_recipe
from trainer.loop import Trainer
from trainer.runtime import Runtime, start

BLOCK = 20
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

    def __init__(self, trainer: Trainer, runtime: Runtime) -> None:
        self.trainer, self.runtime = trainer, runtime
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
        trainer = self.trainer
        if trainer.step % BLOCK == 0:
            self._begin("without" if trainer.step // BLOCK % 2 else "with")
        if self._name == "with" and trainer.step % BLOCK == BLOCK // 2 and self.runtime.is_first:
            threading.Thread(target=scrape, args=(trainer.output,)).start()
        self._step(batches)
        if trainer.step % BLOCK == 0 and trainer.step > 2 * BLOCK:
            self.cpu[self._name].append(time.process_time() - self._before[0])
            self.clock[self._name].append(time.perf_counter() - self._before[1])

    def _begin(self, name: str) -> None:
        telemetry = self.trainer.telemetry
        self._listeners = self._listeners or telemetry.listeners
        telemetry.listeners = self._listeners if name == "with" else []
        interval = BLOCK if name == "with" else 1 << 40  # whose middle never comes
        self.trainer.pipeline.phases.step = lambda step, _: self._sample(step, interval)
        self._name = name
        self._before = time.process_time(), time.perf_counter()


def measure(runtime: Runtime, config: TrainConfig, output: Path) -> Blocks:
    """Train and return what the blocks took on this rank."""
    trainer = Trainer(config, output, runtime)
    blocks = Blocks(trainer, runtime)
    trainer.fit()
    return blocks


def main() -> None:
    """Print the ratios; rank 0 speaks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="dlrm.demo")
    parser.add_argument("--pairs", type=int, default=10)
    options, overrides = parser.parse_known_args()
    steps = 2 * BLOCK * (options.pairs + 1)
    words = ["--data.path", options.data, "--max-steps", str(steps), "--epochs", "100"]
    words += ["--log.interval-steps", str(BLOCK), "--log.mode", "quiet"]
    config = apply_overrides(load_recipe(options.recipe), [*words, *overrides])
    runtime = start(config.runtime)
    with tempfile.TemporaryDirectory() as folder:
        blocks = measure(runtime, config, Path(folder) / "run")
    for what, seconds in (("CPU time", blocks.cpu), ("clock", blocks.clock)):
        ratio = Times(seconds=seconds).ratio("with", "without")
        if runtime.is_first:
            print(Line(name=f"exporter: {what} of a step", ratio=ratio, bound="at most",
                       target=LIMIT))  # fmt: skip
    runtime.stop()


if __name__ == "__main__":
    main()

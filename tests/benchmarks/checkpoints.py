# SPDX-License-Identifier: MIT
"""What a checkpoint costs: python -m tests.benchmarks.checkpoints [--rows 2000000] [--steps 60].

One process trains DLRM on generated clicks with tables of so many rows together. Printed are

- how long training stands still for a checkpoint (and for the one before, where that is not written
  yet), in steps, and how much slower the steps are while one is written;
- MB/s of writing and reading a checkpoint (checksums and fsync included) beside `torch.save` with
  fsync and `torch.load` of the same bytes;
- how long a killed run takes until it makes its next step, beside a fresh one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import runs
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import complete
from trainer.checkpoint.staging import Staging, local_bytes
from trainer.config.config import TrainConfig
from trainer.runtime.runtime import Runtime, RuntimeConfig, start
from trainer.trainer import Trainer

ROUNDS = 5


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def configure(logs: Path, rows: int, *words: str) -> TrainConfig:
    """Return a run whose tables have `rows` rows together."""
    config = runs.small("dlrm.demo", logs, "--checkpoint.interval-seconds", "0", *words)
    share = rows // len(config.schema.tables)
    tables = tuple(dataclasses.replace(t, num_embeddings=share) for t in config.schema.tables)
    schema = dataclasses.replace(config.schema, tables=tables)
    return dataclasses.replace(config, schema=schema)


def training(logs: Path, rows: int, steps: int, runtime: Runtime, folder: Path) -> None:
    """Print what checkpoints cost training."""
    every = steps // 2
    words = ("--max-steps", str(2 * steps), "--checkpoint.interval-steps", str(every))
    trainer = Trainer(configure(logs, rows, *words), folder / "run", runtime)
    times: dict[bool, list[float]] = {False: [], True: []}
    train_step = trainer._train_step

    def timed(batches: object) -> None:
        busy = trainer.saver.busy
        times[busy].append(seconds_of(lambda: train_step(batches)))  # pyright: ignore

    stalls: list[tuple[float, float]] = []
    saver, save = trainer.saver, trainer.saver.save

    def stalling(*arguments: Any) -> None:
        waited = saver.waited_seconds
        stalled = seconds_of(lambda: save(*arguments))
        waited = saver.waited_seconds - waited
        stalls.append((stalled - waited, waited))

    trainer._train_step, saver.save = timed, stalling
    trainer.fit()
    step = statistics.median(times[False])
    first, *later = (copied for copied, _ in stalls)
    copied, waited = statistics.median(later), statistics.median(wait for _, wait in stalls[1:])
    print(f"step without a checkpoint    {step * 1e3:9.1f} ms (median of {len(times[False])})")
    if times[True]:
        slow = statistics.median(times[True]) / step
        print(f"step while one is written    {slow:9.2f} of that (median of {len(times[True])})")
    print(f"standstill, first checkpoint {first * 1e3:9.1f} ms, {first / step:.2f} steps")
    print(f"standstill, a later one      {copied * 1e3:9.1f} ms, {copied / step:.2f} steps")
    print(f"and for the one before it    {waited * 1e3:9.1f} ms (saved every {every} steps)")


def files(logs: Path, rows: int, runtime: Runtime, folder: Path) -> None:
    """Print the speed of writing and reading."""
    trainer = Trainer(configure(logs, rows, "--max-steps", "1"), folder / "files", runtime)
    trainer.fit()
    state, manifest = trainer.state.tensors(), trainer.state.manifest()
    megabytes = local_bytes(state) / 1e6
    plain = Staging().copy(state)
    flat = {
        name: [shard.tensor for shard in value.local_shards()]
        if hasattr(value, "local_shards")
        else value
        for name, value in dcp.flatten(plain)
    }
    target = folder / "plain.pt"

    def torch_save() -> None:
        with target.open("wb") as file:
            torch.save(flat, file)
            file.flush()
            os.fsync(file.fileno())

    place = folder / "saved"
    times: dict[str, list[float]] = {}
    for step in range(ROUNDS):
        work = {
            "dcp.save": lambda step=step: dcp.save(state, place, step, manifest),
            "torch.save + fsync": torch_save,
            "dcp.load": lambda step=step: dcp.load(state, place / f"step-{step}"),
            "torch.load": lambda: torch.load(target, weights_only=True),
        }
        for name, call in work.items():
            times.setdefault(name, []).append(seconds_of(call))
    print(f"state                        {megabytes:9.0f} MB, {len(flat)} tensors")
    for name, values in times.items():
        print(f"{name:<28} {megabytes / statistics.median(values):9.0f} MB/s")


def resuming(logs: Path, rows: int, runtime: Runtime, folder: Path) -> None:
    """Print how long a killed run takes to go on."""
    config = configure(logs, rows, "--max-steps", "6", "--checkpoint.interval-steps", "2")
    runs.train_until(runtime, config, folder / "killed", 5)
    assert complete(folder / "killed/checkpoints")
    for name in ("killed", "fresh"):
        trainers: list[Trainer] = []
        begun = seconds_of(
            lambda name=name, trainers=trainers: trainers.append(
                Trainer(config, folder / name, runtime)
            )
        )
        print(f"{name} run until its first step {begun:8.2f} s, from step {trainers[0].step}")
        trainers[0].fit()


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of all tables together")
    parser.add_argument("--steps", type=int, default=60, help="half of those that are trained")
    given = parser.parse_args()
    runtime = start(RuntimeConfig(device="cpu", num_threads=1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = runs.generate(folder / "logs", rows_per_day=2 * given.steps * runs.BATCH)
        training(logs, given.rows, given.steps, runtime, folder)
        files(logs, given.rows, runtime, folder)
        resuming(logs, given.rows, runtime, folder)
    runtime.stop()


if __name__ == "__main__":
    main()

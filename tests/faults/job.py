# SPDX-License-Identifier: MIT
"""The job that faults are injected into: the real trainer on a small log, and a record of its rows.

Every rank appends, for each step, the groups of the rows it trained to a file in the run's folder;
the last record of a step counts, as a step that was lost is trained again.
"""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path
from typing import Any, cast

from tests.faults import inject
from tests.support import runs
from trainer.config.config import TrainConfig
from trainer.runtime.exit_codes import exit_code
from trainer.runtime.runtime import start
from trainer.trainer import Trainer

EPOCHS, STEPS = 2, 5  # on two ranks
ROWS = 2 * STEPS * runs.BATCH


def configure(logs: str, words: list[str]) -> TrainConfig:
    """Return the configuration of the job; a checkpoint after every second step."""
    return runs.small(
        "dlrm.demo",
        Path(logs),
        *("--epochs", str(EPOCHS), "--checkpoint.interval-steps", "2"),
        *("--runtime.device", "cpu", "--runtime.num-threads", "1", "--telemetry.mode", "plain"),
        *("--loader.order", "shuffle", "--loader.shuffle-rows", "256"),
        *("--checkpoint.interval-seconds", "0"),
        *words,
    )


def main(logs: str, output: str, words: list[str], faults: list[dict[str, Any]]) -> int:
    """Train on this rank as `python -m trainer.train` does, with faults; return the exit code."""
    rank, folder = int(os.environ.get("RANK", "0")), Path(output).parent
    installed = [inject.install(fault, rank, folder) for fault in faults]

    def work() -> None:
        config = configure(logs, words)
        runtime = start(config.runtime)
        trainer = Trainer(config, Path(output), runtime)
        _record_rows(trainer)
        for tell in installed:
            tell(trainer)
        trainer.fit()
        runtime.stop()

    return exit_code(work, resumes=True)


def _record_rows(trainer: Trainer) -> None:
    """Write down which rows each step has trained."""
    path = trainer.output / f"rows-{trainer.runtime.rank}.jsonl"
    progress = trainer.pipeline.progress

    def recorded(batches: Any) -> Any:
        predictions = progress(batches)
        if trainer.parallel.module.training:
            groups = predictions.groups[: predictions.num_examples].tolist()
            line = json.dumps(
                {"epoch": trainer.progress.epoch, "step": trainer.progress.step + 1, "rows": groups}
            )
            with path.open("a") as file:
                file.write(line + "\n")
        return predictions

    cast(Any, trainer.pipeline).progress = recorded


def rows_seen(output: Path, world_sizes: list[tuple[int, int]]) -> list[collections.Counter[int]]:
    """Return the multiset of rows that each epoch has trained.

    world_sizes: (last step, ranks) of each process group that worked on the run, in order: a record
      of a step counts only on the ranks that were there when the step was last trained.
    """
    seen = [collections.Counter[int]() for _ in range(EPOCHS)]
    for path in sorted(output.glob("rows-*.jsonl")):
        rank = int(path.stem.partition("-")[2])
        latest: dict[int, dict[str, Any]] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            latest[record["step"]] = record
        for step, record in latest.items():
            ranks = next(ranks for last, ranks in world_sizes if step <= last)
            if rank < ranks:
                seen[record["epoch"]].update(record["rows"])
    return seen

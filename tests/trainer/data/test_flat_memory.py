# SPDX-License-Identifier: MIT
"""A run takes as much memory for ten times the data."""

from pathlib import Path

import pytest

from tests.support import runs
from trainer.trainer import Trainer

STEPS = 100


@pytest.mark.dist
def test_the_memory_of_a_run_is_flat_over_ten_times_the_data(processes, tmp_path):
    logs = runs.generate(tmp_path / "logs", rows_per_day=STEPS * runs.BATCH)
    words = ["--loader.shuffle-rows", "512", "--loader.order", "shuffle"]
    words += ["--telemetry.window-examples", "512", "--checkpoint.interval-steps=8"]
    config = runs.small("dlrm.demo", logs, *words)
    ((early, late),) = processes.run(_resident, config, tmp_path / "run", world_size=1)
    assert late < 1.05 * early, f"{early} MB after a tenth of the data, {late} MB after all"


def _resident(runtime, config, output) -> tuple[float, float]:
    """Train and return the MB resident after a tenth of the steps and at their end."""
    trainer = Trainer(config, output, runtime)
    train_step, seen = trainer._train_step, []

    def noted(batches) -> None:
        train_step(batches)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append(pages * 4096 / 1e6)

    trainer._train_step = noted
    trainer.fit()
    assert len(seen) == STEPS
    return max(seen[: STEPS // 10]), max(seen)

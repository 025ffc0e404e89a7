# SPDX-License-Identifier: MIT
"""Runs to score, and what the trainer's own evaluation predicts of their test day."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support import runs
from trainer import train
from trainer.evaluation.evaluate import evaluate, open_checkpoint, real_rows
from trainer.runtime.runtime import Runtime
from trainer.warm_start.policies import resolve


def trained(folder: Path, recipe: str, logs: Path, *overrides: str) -> Path:
    """Train a recipe for a few steps and return the run's folder."""
    run = folder / recipe
    words = [recipe, "--output", str(run), "--data.path", str(logs), "--telemetry.mode", "quiet"]
    words += ["--data.train-days", runs.DAYS[0], "--data.test-days", runs.DAYS[1]]
    assert train.main([*words, "--loader.batch-size", "64", "--max-steps", "3", *overrides]) == 0
    return run


def predicted(runtime: Runtime, run: Path, logs: Path) -> np.ndarray:
    """Return the (B, K) probabilities of this rank's rows by the trainer's evaluation."""
    opened = open_checkpoint(resolve(run), str(logs), (runs.DAYS[1], ""), runtime)
    found = []
    evaluate(
        opened.pipeline,
        opened.loader,
        opened.config,
        lambda one: found.append(real_rows(one)[0].cpu().numpy()),
    )
    opened.loader.close()
    return np.concatenate(found)


def rows_of(logs: Path, day: str = runs.DAYS[1]) -> pa.Table:
    """Return the rows of a day, in the log's order."""
    return read(logs / f"dt={day}")


def read(folder: Path) -> pa.Table:
    """Return the rows of a folder's Parquet files, in order of their names."""
    files = sorted(folder.glob("*.parquet"))
    return pa.concat_tables([pq.read_table(path, partitioning=None) for path in files])

# SPDX-License-Identifier: MIT
"""Small runs of shipped recipes on generated logs, for tests of the whole trainer."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from trainer.checkpoint import dcp
from trainer.checkpoint.dcp_files import Reader
from trainer.checkpoint.layout import complete
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.evaluation.evaluate import evaluate_checkpoint
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime
from trainer.trainer import Trainer

DAYS = ("2026-01-01", "2026-01-02")
BATCH = 64


def generate(folder: Path, rows_per_day: int = 640) -> Path:
    """Write two days of logs of a small population."""
    clicks = ClickConfig(num_users=200, num_items=150)
    synthesize(folder, SynthesisConfig(days=2, rows_per_day=rows_per_day, clicks=clicks))
    return folder


def small(recipe: str, logs: Path, *overrides: str, rows: int = 512) -> TrainConfig:
    """Return `recipe` with tables of at most `rows` rows; day one trains, day two tests."""
    config = load_recipe(recipe)
    tables = tuple(
        dataclasses.replace(table, num_embeddings=min(table.num_embeddings, rows))
        for table in config.schema.tables
    )
    config = dataclasses.replace(config, schema=dataclasses.replace(config.schema, tables=tables))
    return apply_overrides(
        config,
        [
            *("--data.path", str(logs), "--data.train-days", DAYS[0], "--data.test-days", DAYS[1]),
            *("--loader.batch-size", str(BATCH), "--loader.order", "none"),
            *("--telemetry.interval-steps", "1", "--telemetry.mode", "quiet"),
            *overrides,
        ],
    )


def losses(output: Path) -> list[float]:
    """Return the loss of every step of a run."""
    lines = (output / "curves.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def saved(run: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a run's newest checkpoint, whole, but what its reports gathered."""
    path = complete(run / "checkpoints")[-1]
    held = Reader(path).read_metadata().state_dict_metadata
    kinds = {
        name: entry
        for name, entry in held.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("metrics.")
    }
    found = {name: torch.zeros(m.size, dtype=m.properties.dtype) for name, m in kinds.items()}
    with warnings.catch_warnings():
        # torch wants to be told that one process reads.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(found, path)
    return found


def train(runtime: Runtime, config: TrainConfig, output: Path) -> dict[str, Any]:
    """Run on this rank and return the metrics."""
    return Trainer(config, output, runtime).fit()


def train_until(runtime: Runtime, config: TrainConfig, output: Path, step: int) -> None:
    """Run on this rank, but die before step `step + 1`."""
    trainer = Trainer(config, output, runtime)
    run_step = trainer._train_step

    def dying(batches: Any) -> None:
        if trainer.progress.step == step:
            raise KeyboardInterrupt
        run_step(batches)

    trainer._train_step = dying
    try:
        trainer.fit()
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the run ended before step {step}")


def failure(runtime: Runtime, config: TrainConfig, output: Path) -> str:
    """Return the message of the ValueError that a run ends with on this rank."""
    try:
        Trainer(config, output, runtime).fit()
    except ValueError as error:
        return str(error)
    raise AssertionError("the run did not fail")


def evaluated(runtime: Runtime, checkpoint: Path, logs: Path, days: str) -> dict[str, Any]:
    """Evaluate a checkpoint on this rank."""
    return evaluate_checkpoint(checkpoint, str(logs), days, runtime)

# SPDX-License-Identifier: MIT
"""Heads of several tasks on the generated log, whose relation of tasks is known.

  python -m tests.benchmarks.tasks OUTPUT [--days 4] [--rows-per-day 20000] [--seeds 1 2 3]

In the generated log a like needs a click: P(like) = P(click) P(like | click). Trains the tower of
`dlrm.demo` with each head on all days but the last and prints, on the last day, mean and standard
deviation over the seeds of the AUC of the click, of the like over all rows, and of the like after a
click (like's score over click's) on the clicked rows. The last line is what the true probabilities
reach. One process, CPU; every head sees the same rows, in the order of the seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from models.heads import HeadConfig
from models.ranking import Predictions
from pipelines.synthesize import SynthesisConfig, auc, generate, synthesize
from pipelines.synthetic.impressions import TASKS
from trainer.build import build_training, open_loader
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.evaluation.evaluate import evaluate, real_rows
from trainer.recipes.load import load_recipe
from trainer.runtime import runtime

HEADS = {
    "shared_bottom": HeadConfig(hidden_units=(64,)),
    "shared_bottom, uncertainty": HeadConfig(hidden_units=(64,), uncertainty=True),
    "mmoe": HeadConfig(kind="mmoe", hidden_units=(64,), task_units=(32,)),
    "ple": HeadConfig(kind="ple", hidden_units=(64,), num_experts=2, task_units=(32,)),
    "esmm": HeadConfig(kind="esmm", hidden_units=(64,)),
}


def areas(labels: NDArray[np.float64], scores: NDArray[np.float64]) -> list[float]:
    """Return the AUC of click, of like, and of like after click, of (N, 2) labels and scores."""
    clicked = labels[:, 0] > 0
    rates = scores[clicked, 1] / scores[clicked, 0]
    whole = [auc(labels[:, k], scores[:, k]) for k in range(2)]
    return [*whole, auc(labels[clicked, 1], rates)]


def trained(config: TrainConfig, started: runtime.Runtime) -> list[float]:
    """Train through the training days once; return `areas` of the test rows."""
    started = dataclasses.replace(started, seed=config.runtime.seed)
    torch.manual_seed(started.seed)
    model, dense, _, pipeline = build_training(config, started)
    loader = open_loader(config, started, train=True)
    steps = len(loader)
    schedule = config.dense.schedule.build(steps, dense.optimizer, model.fused_optimizer)
    batches = iter(loader)
    model.module.train()
    for number in range(steps):
        schedule.apply(number)
        pipeline.progress(batches)
    labels, scores = [], []

    def keep(predictions: Predictions) -> None:
        found, known, _, _ = real_rows(predictions)
        labels.append(known.numpy().astype(np.float64))
        scores.append(found.numpy().astype(np.float64))

    evaluate(pipeline, open_loader(config, started, train=False), config, keep)
    return areas(np.concatenate(labels), np.concatenate(scores))


def main() -> None:
    """Print a line a head."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("output", type=Path, help="new folder for the log")
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument("--rows-per-day", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options, overrides = parser.parse_known_args()
    synthesis = SynthesisConfig(days=options.days, rows_per_day=options.rows_per_day)
    synthesize(options.output, synthesis)
    *days, (last, table, probabilities) = generate(synthesis)
    labels = np.stack([table.column(task).to_numpy() for task in TASKS], 1).astype(np.float64)
    words = ["--data.path", str(options.output), "--data.train-days", f"{days[0][0]}:{days[-1][0]}"]
    words += ["--data.test-days", last, "--runtime.device", "cpu", *overrides]
    base = apply_overrides(load_recipe("dlrm.demo"), words)
    started = runtime.start(base.runtime)
    print("head".ljust(28), "click AUC        like AUC         like after click")
    found: dict[str, list[list[float]]] = {name: [] for name in HEADS}
    for seed, (name, head) in itertools.product(options.seeds, HEADS.items()):
        model = dataclasses.replace(base.model, head=head)
        own = dataclasses.replace(base.runtime, seed=seed)
        found[name].append(trained(dataclasses.replace(base, model=model, runtime=own), started))
    for name, rows in found.items():
        spread = np.std(rows, 0, ddof=1) if len(rows) > 1 else [None] * len(rows[0])
        texts = [
            f"{mean:.4f}{' ' * 9 if std is None else f' ± {std:.4f}'}"
            for mean, std in zip(np.mean(rows, 0), spread, strict=True)
        ]
        print(name.ljust(28), "  ".join(texts))
    print(
        "true probabilities".ljust(28),
        "           ".join(f"{x:.4f}" for x in areas(labels, probabilities)),
    )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""Towers by test-then-train over the last days of Globo's log, with paired differences.

    python -m tests.benchmarks.study --data DATA/globo_large --output DIR [--jobs 2] [--write]

One run for each tower, rate of field dropout and seed, with the recipe TOWER.globo and nothing else
changed. Trains on 2017-10-01 to 10-10, then predicts and trains on each day until 10-16. Nothing is
chosen by these six days. Prints metrics pooled over their rows, means over the seeds, and each
model's difference to the reference; --write puts the table and a picture into docs/study/. A run
that is there is not trained again, so a study that was killed goes on.

The standard error of a difference has two parts: that of the rows, by a bootstrap over users of
both models' predictions of the same rows (mean of the seeds), and that of the mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from trainer.evaluation.compare import compare_days
from trainer.runtime.runtime import Runtime, start

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "study"
DAYS = ["--data.train-days", "2017-10-01:2017-10-10", "--data.test-days", "2017-10-11:2017-10-16"]
TOWERS = ["dlrm", "dcnv2", "din", "rankelastor", "specformer", "tokenformer"]
_Z = 1.959964  # of a 95 % interval


class Model(NamedTuple):
    """A line of the table: a tower and its rate of field dropout."""

    tower: str
    dropout: str

    @property
    def label(self) -> str:
        return self.tower if self.dropout == "0" else f"{self.tower}, field dropout {self.dropout}"


def folder_of(output: Path, model: Model, seed: int) -> Path:
    return output / f"{model.tower}-{model.dropout}-{seed}"


def train(data: str, output: Path, model: Model, seed: int) -> None:
    """Train one run, unless it is there."""
    run = folder_of(output, model, seed)
    if (run / "metrics.json").exists():
        return
    words = [sys.executable, "-m", "trainer.train", f"{model.tower}.globo", "--output", str(run)]
    words += ["--data.path", data, *DAYS, "--data.progressive", "--runtime.seed", str(seed)]
    words += ["--model.tokenizer.field-dropout", model.dropout, "--runtime.num-threads", "1"]
    words += ["--checkpoint.interval-seconds", "0", "--telemetry.mode", "quiet"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model.label}, seed {seed}: {done.stderr[-2000:]}")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    print(f"trained {model.label}, seed {seed}", flush=True)


def summary(
    output: Path, model: Model, reference: Model, seeds: Sequence[int], runtime: Runtime
) -> dict[str, Any]:
    """Return a model's metrics and its differences to the reference, over the seeds that exist."""
    found: dict[str, Any] = {"model": model.label, "seeds": len(seeds)}
    runs = [json.loads((folder_of(output, model, s) / "metrics.json").read_text()) for s in seeds]
    for name in ("auc", "gauc", "logloss", "calibration", "rows"):
        found[name] = statistics.fmean(run[name] for run in runs)
    if model == reference:
        return found
    pairs = []
    for seed in seeds:
        folders = [folder_of(output, one, seed) for one in (model, reference)]
        pairs.append(compare_days(folders, True, runtime, 200)["differences"])
    for name in ("auc", "gauc", "logloss"):
        values = [pair[name]["difference"] for pair in pairs]
        widths = [pair[name]["interval"][1] - pair[name]["interval"][0] for pair in pairs]
        found[f"{name}_difference"] = statistics.fmean(values)
        if len(values) > 1:  # seeds move a model more than rows do, so one seed has no error
            rows = statistics.fmean(widths) / (2 * _Z)
            of_seeds = statistics.stdev(values) / math.sqrt(len(values))
            found[f"{name}_error"] = math.hypot(rows, of_seeds)
    return found


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a Markdown table."""
    head = ["model", "seeds", "AUC", "GAUC", "logloss", "calibration"]
    head += ["AUC less reference", "GAUC less reference", "logloss less reference"]
    rows = [head, ["---"] * len(head)]
    for one in found:
        row = [one["model"], str(one["seeds"])]
        row += [f"{one[name]:.4f}" for name in ("auc", "gauc", "logloss")]
        row.append(f"{one['calibration']:.3f}")
        for name in ("auc", "gauc", "logloss"):
            key = f"{name}_difference"
            error = f" ± {one[f'{name}_error']:.4f}" if f"{name}_error" in one else ""
            row.append(f"{one[key]:+.4f}{error}" if key in one else "reference")
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def picture(found: Sequence[dict[str, Any]], reference: Model, path: Path) -> None:
    """Draw one dot a model of several seeds: AUC and logloss less the reference's, 95 %."""
    shown = [one for one in found if "auc_error" in one][::-1]
    figure, plots = plt.subplots(1, 2, figsize=(9, 0.4 * len(shown) + 1.4), sharey=True)
    for plot, name in zip(plots, ("auc", "logloss"), strict=True):
        values = [one[f"{name}_difference"] for one in shown]
        errors = [_Z * one[f"{name}_error"] for one in shown]
        plot.errorbar(values, range(len(shown)), xerr=errors, fmt="o", capsize=3, color="#1f6feb")
        plot.axvline(0, color="#888", linewidth=1)
        plot.set_yticks(range(len(shown)), [one["model"] for one in shown])
        plot.set_xlabel(f"{name} less that of {reference.label}")
        plot.grid(axis="x", alpha=0.3)
        plot.locator_params(axis="x", nbins=5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--towers", nargs="+", default=TOWERS)
    parser.add_argument("--dropout", nargs="+", default=["0", "0.3"], metavar="RATE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--reference", default="dlrm-0", metavar="TOWER-RATE")
    parser.add_argument("--present", action="store_true", help="train nothing, show what is there")
    parser.add_argument("--write", action="store_true", help="write docs/study/")
    options = parser.parse_args()
    tower, _, rate = options.reference.partition("-")
    reference, output = Model(tower, rate), options.output.resolve()
    models = [Model(tower, rate) for rate in options.dropout for tower in options.towers]
    if not options.present:
        output.mkdir(parents=True, exist_ok=True)
        grid = [(model, seed) for seed in options.seeds for model in models]
        with ThreadPoolExecutor(options.jobs) as pool:
            data = str(Path(options.data).resolve())
            for one in [pool.submit(train, data, output, *pair) for pair in grid]:
                one.result()
    runtime, found = start(), []
    for model in models:
        done = {s for s in options.seeds if (folder_of(output, model, s) / "metrics.json").exists()}
        paired = {s for s in done if (folder_of(output, reference, s) / "metrics.json").exists()}
        if paired:
            found.append(summary(output, model, reference, sorted(paired), runtime))
    runtime.stop()
    found.sort(key=lambda one: -one["auc"])
    print(*lines(found), sep="\n")
    if options.write:
        DOCS.mkdir(exist_ok=True)
        picture(found, reference, DOCS / "differences.png")
        (DOCS / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

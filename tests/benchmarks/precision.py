# SPDX-License-Identifier: MIT
"""What half precision changes of a model's AUC, against what another seed changes of it.

    python -m tests.benchmarks.precision --data DATA/globo_sessions --output DIR [--seeds 5]
        [--recipes dlrm.globo ...] [--formats fp32 bf16 fp16] [--ranks 1] [setting value ...]

Formats: fp32, bf16 and fp16 of computation; `tables-fp16`, the tables alone; `exchange-fp16` and
`exchange-bf16`, what travels between ranks alone (with --ranks 2). Trains every recipe in every
format from every seed, one run after the other, and prints a table: mean AUC, its standard
deviation and range (largest - smallest) over the seeds, and the difference of a format from FP32,
as mean over the seeds with its standard error. A difference
counts as within the seeds' spread where its mean is no larger than FP32's range. Globo's recipes
train on one day here (2017-10-11; test 2017-10-12) unless settings say otherwise. Runs that DIR
holds are not made again, so that an interrupted command goes on, and the seeds that have finished
everywhere are tabled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer import train
from trainer.run_dir import METRICS

SETTINGS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("--precision.dtype", "bf16"),
    "fp16": ("--precision.dtype", "fp16"),
    "tables-fp16": ("--sparse.weights", "fp16"),
    "exchange-fp16": ("--parallel.sharding.exchange", "fp16"),
    "exchange-bf16": ("--parallel.sharding.exchange", "bf16"),
}
RECIPES = ("dlrm.globo", "tokenformer.globo", "rankelastor.globo", "specformer.globo")
FORMATS = ("fp32", "bf16", "fp16")
_DAYS = ("--data.train-days", "2017-10-11", "--data.test-days", "2017-10-12")


def run(words: Sequence[str], output: Path, rank: int, ranks: int) -> None:
    """Be a rank of a run, in a process of its own; what it says goes beside `output`."""
    if ranks > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_000 + os.getppid() % 1000)}
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({**place, **{name: str(value) for name, value in numbers.items()}})
    log = output.with_name(f"{output.name}.{rank}.log")
    with log.open("w", encoding="utf-8") as stream:
        sys.stdout = sys.stderr = stream
        code = train.main(words)
    sys.exit(code)


def auc_of(output: Path) -> float | None:
    """Return the AUC of a finished run, None of another."""
    metrics = output / METRICS
    return float(json.loads(metrics.read_text("utf-8"))["auc"]) if metrics.exists() else None


def table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the lines of a table; found: AUC by recipe, format and seed."""
    lines = ["| recipe | format | AUC | deviation | range | minus fp32 | within |"]
    lines.append("|---|---|---|---|---|---|---|")
    for recipe, formats in found.items():
        base = formats["fp32"]
        for name, values in formats.items():
            spread = max(values) - min(values)
            cells = [recipe, name, f"{statistics.mean(values):.5f}"]
            cells += [f"{statistics.stdev(values):.5f}", f"{spread:.5f}", "", ""]
            if name != "fp32":
                pairs = [value - other for value, other in zip(values, base, strict=True)]
                mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
                cells[-2] = f"{mean:+.5f} ± {error:.5f}"
                cells[-1] = "yes" if abs(mean) <= max(base) - min(base) else "NO"
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Make the runs that are missing and print the table; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--formats", nargs="+", choices=tuple(SETTINGS), default=FORMATS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    words, settings = parser.parse_known_args()
    if words.seeds < 2 or "fp32" not in words.formats:
        parser.error("a comparison needs at least two seeds, and fp32 among the formats")
    words.output.mkdir(parents=True, exist_ok=True)
    # Loaded once, by the process that the runs are copies of.
    import trainer.trainer  # noqa: F401

    context = multiprocessing.get_context("fork")
    found: dict[str, dict[str, list[float]]] = {
        recipe: {name: [] for name in words.formats} for recipe in words.recipes
    }
    for seed in range(words.seeds):
        for recipe in words.recipes:
            for name in words.formats:
                output = words.output / f"{recipe}-{name}-{seed}"
                if auc_of(output) is None:
                    given = [recipe, "--output", str(output), "--data.path", words.data]
                    given += ["--telemetry.mode", "quiet", "--runtime.seed", str(seed)]
                    given += [*(_DAYS if recipe.endswith(".globo") else ()), *SETTINGS[name]]
                    began = time.monotonic()
                    processes = [
                        context.Process(
                            target=run, args=([*given, *settings], output, rank, words.ranks)
                        )
                        for rank in range(words.ranks)
                    ]
                    for process in processes:
                        process.start()
                    for process in processes:
                        process.join()
                    seconds = time.monotonic() - began
                    print(f"{output.name}: {auc_of(output)} in {seconds:.0f} s", flush=True)
                auc = auc_of(output)
                if auc is None:
                    print(f"{output.name} failed, see {output}.0.log")
                    return 1
                found[recipe][name].append(auc)
        if seed:
            print("\n".join([f"{seed + 1} seeds", *table(found)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

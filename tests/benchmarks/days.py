# SPDX-License-Identifier: MIT
"""How a recipe does day after day, and whether its memory grows: one run over all days of a log.

    python -m tests.benchmarks.days dlrm.globo_dynamic --data DATA/globo_sessions [--first DAY]

One process trains through the days in order, as the recipe says but on all days but the last, and
after each predicts the next one, whose rows it has not seen (from DAY on, to save time: what is
trained does not depend on it). Prints the resident memory per day, and per predicted day AUC, log
loss and calibration, and of the dynamic tables how many ids hold a row, how many came and left
since the day predicted before, and which share of the ids of the predicted day (of its first
batches) had a row of their own. At the end the mean AUC by rows, and the largest memory after the
second trained day over that of the second day. Memory is read after a day's training, once what is
free is given back; predictions keep some of their own, so read it with the last day as DAY.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from embeddings.dynamic.dynamic import Part, dynamic_parts
from embeddings.dynamic.idmap import TOTALS
from embeddings.stats import Hits
from tests.benchmarks.timing import single_threaded
from trainer.build import build_training, open_loader
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.data.files import days_of, discover
from trainer.evaluation.evaluate import evaluate
from trainer.recipes.load import load_recipe
from trainer.runtime import runtime

TARGET = 1.05
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the main memory that this process holds, once it has given back what is free."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_days(config: TrainConfig, train: str, test: str) -> TrainConfig:
    """Return `config` with other days."""
    data = dataclasses.replace(config.data, train_days=train, test_days=test)
    return dataclasses.replace(config, data=data)


def run(config: TrainConfig, started: runtime.Runtime, first: str) -> Iterator[dict[str, Any]]:
    """Train through the days of the log; yield what is found on each next day from `first` on."""
    days = [day for day in days_of(config.data.path) if day]
    config = on_days(config, f"{days[0]}:{days[-2]}", days[-1])
    model, dense, _, pipeline = build_training(config, started)
    loader = open_loader(config, started, train=True)
    steps, size = len(loader), loader.config.batch_size
    schedule = config.dense.schedule.build(steps, dense.optimizer, model.fused_optimizer)
    rows = [
        sum(sum(file.row_group_rows) for file in discover(config.data.path, (d, d), config.schema))
        for d in days[:-1]
    ]
    # A batch in which two days meet comes after the first has been predicted from.
    ends = [total // size for total in itertools.accumulate(rows)]
    batches, step = iter(loader), 0
    model.module.train()
    before: dict[str, list[int]] = {}
    for day, end in zip(days[1:], [*ends[:-1], steps], strict=True):
        today = itertools.islice(batches, end - step)
        for number in range(step, end):
            schedule.apply(number)
            pipeline.progress(today)
        step = end
        found: dict[str, Any] = {"day": day, "bytes": resident_bytes()}
        if day >= first:
            with Hits(model.model) as hits:
                tested = open_loader(on_days(config, "", day), started, train=False)
                found |= evaluate(pipeline, tested, config)
            found["tables"] = {
                part.table.name: table_numbers(part, hits.numbers(), before)
                for part in dynamic_parts(model.model)
            }
        yield found


def table_numbers(
    part: Part, hits: dict[str, dict[str, int]], before: dict[str, list[int]]
) -> dict[str, float]:
    """Return what a dynamic table holds and what it has counted since `before`, which is renewed.

    hits: of the predicted day.
    """
    name, now = part.table.name, part.map.totals.tolist()
    old = before.get(name, [0] * len(TOTALS))
    before[name] = now
    counts = dict(zip(TOTALS, (a - b for a, b in zip(now, old, strict=True)), strict=True))
    own = hits[name]["hits"] / max(1, hits[name]["lookups"])
    return {"held": part.map.occupancy()[0], "own": own, **counts}


def describe(found: dict[str, Any]) -> str:
    """Return a line of what was found on a day."""
    line = f"{found['day']}  {found['bytes'] / 2**20:,.0f} MiB"
    if "auc" in found:
        line += (
            f"  AUC {found['auc']:.4f}  logloss {found['logloss']:.4f}  calibration "
            f"{found['calibration']:.3f}"
        )
    for name, table in found.get("tables", {}).items():
        line += (
            f"  {name}: {table['held']:,} ids, {table['admitted']:,} came, "
            f"{table['evicted']:,} had to go, {table['expired']:,} expired, "
            f"{table['failed']:,} failed, {table['own']:.1%} of lookups have a row"
        )
    return line


def main() -> None:
    """Print the curve."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--first", default="", metavar="DAY")
    options, overrides = parser.parse_known_args()
    single_threaded()
    config = apply_overrides(load_recipe(options.recipe), ["--data.path", options.data, *overrides])
    started = runtime.start(dataclasses.replace(config.runtime, device="cpu", num_threads=1))
    curve = []
    try:
        for found in run(config, started, options.first):
            curve.append(found)
            print(describe(found), flush=True)
    finally:
        started.stop()
    tested = [found for found in curve if "auc" in found]
    rows = sum(found["rows"] for found in tested)
    print(f"AUC, mean by rows: {sum(f['auc'] * f['rows'] for f in tested) / rows:.4f}")
    if len(curve) > 2:
        ratio = max(found["bytes"] for found in curve[2:]) / curve[1]["bytes"]
        verdict = "met" if ratio <= TARGET else "MISSED"
        print(f"memory after day 2, over day 2's: {ratio:.3f}  at most {TARGET}: {verdict}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""A side of a benchmark, in a process of its own: `python -m tests.benchmarks.sides NAME JSON`.

The process makes what it needs, runs once to warm up, and says so. Then each line on its standard
input is a round: it works once and answers with the units of work, the seconds by the clock and
those of its CPU. So both sides of a pair are warm, hold their own memory and allocator settings,
and never run at the same time (`bench.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import torch

from models.spectral import fused
from tests.benchmarks.towers import by_operator, by_svd
from trainer.build import build_training, open_loader, settle
from trainer.config.config import TrainConfig
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime, RuntimeConfig, find_spectral, start

# Works once, and returns how many units it did.
Work = Callable[[], int]
_BATCHES = 4


def svd(shape: list[int]) -> Work:
    """Soften by torch.linalg.svd under autograd; units are examples."""
    torch.manual_seed(0)
    tokens, grad = torch.randn(*shape), torch.randn(*shape)
    return lambda: (by_svd(tokens, grad), shape[0])[1]


def operator(shape: list[int]) -> Work:
    """Soften by the spectral operator."""
    start(RuntimeConfig(device="cpu"))
    library, reason = find_spectral()
    if library is None:
        raise RuntimeError(f"no compiled form: {reason}")
    fused.provide(lambda: library)
    torch.manual_seed(0)
    tokens, grad = torch.randn(*shape), torch.randn(*shape)
    return lambda: (by_operator(tokens, grad), shape[0])[1]


def training(recipe: str, data: str, allocator: str = "keep", dtype: str = "fp32") -> Work:
    """Take whole steps (look-up to optimizers) on batches in memory; units are rows."""
    config, runtime = _run(recipe, data, allocator)
    precision = dataclasses.replace(config.precision, dtype=dtype)
    config = settle(dataclasses.replace(config, precision=precision), runtime)
    loader = open_loader(config, runtime, train=True)
    batches = list(itertools.islice(loader, _BATCHES))
    loader.close()
    pipeline = build_training(config, runtime).pipeline
    endless = itertools.cycle(batches)

    def work() -> int:
        for _ in batches:
            pipeline.progress(endless)
        return sum(len(batch.labels) for batch in batches)

    return work


def loading(recipe: str, data: str) -> Work:
    """Read an epoch's batches by the loader, as the recipe orders them; units are rows."""
    config, runtime = _run(recipe, data, "keep")
    loader = open_loader(config, runtime, train=True)
    return lambda: sum(len(batch.labels) for batch in loader)


def scanning(recipe: str, data: str) -> Work:
    """Read the same rows and columns by Arrow, row group by row group, and do nothing with them."""
    config, runtime = _run(recipe, data, "keep")
    loader = open_loader(config, runtime, train=True)
    files = [file.path for file in loader.files]
    present = set(pq.read_schema(files[0]).names)
    columns = sorted(set(config.schema.columns) & present)

    def work() -> int:
        rows = 0
        for path in files:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                rows += file.read_row_group(group, columns=columns, use_threads=False).num_rows
        return rows

    return work


def _run(recipe: str, data: str, allocator: str) -> tuple[TrainConfig, Runtime]:
    config = load_recipe(recipe)
    settings: Any = {"device": "cpu", "num_threads": 1, "allocator": allocator}
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=data),
        runtime=dataclasses.replace(config.runtime, **settings),
        loader=dataclasses.replace(config.loader, num_workers=0),
    )
    return config, start(config.runtime)


SIDES: dict[str, Callable[..., Work]] = {
    "svd": svd,
    "operator": operator,
    "training": training,
    "loading": loading,
    "scanning": scanning,
}


def main(name: str, settings: dict[str, Any]) -> None:
    """Answer a line for each line that is read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    work = SIDES[name](**settings)
    work()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        units = work()
        told = {
            "units": units,
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
        }
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

# SPDX-License-Identifier: MIT
"""A run of milliseconds that saves after every step, to be killed very often.

Its steps are arithmetic on a few tensors and random numbers; everything that keeps it (the folder,
checkpoints, the saver's thread, retention) is the trainer's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.faults import inject
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import complete, read_manifest, recover
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.schedule import CheckpointConfig
from trainer.checkpoint.state import RandomState
from trainer.checkpoint.storage import locate
from trainer.runtime.atomic_files import write_json
from trainer.runtime.runtime import Runtime

STEPS = 12


def main(output: str, folder: str, faults: list[dict[str, Any]]) -> int:
    """Go on from the newest checkpoint in `folder` to the end; write metrics.json in `output`."""
    torch.set_num_threads(1)
    group = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=group, rank=0, world_size=1)
    device = torch.device("cpu")
    runtime = Runtime(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device, seed=0)
    for fault in faults:
        inject.install(fault, 0, Path(output))
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(7)
    place = locate(folder)
    recover(place)
    state = {"w": torch.zeros(4, 100), "count": torch.zeros((), dtype=torch.int64)}
    generators, losses = RandomState(runtime), []
    found = complete(place)
    if found:
        tensors = {**state, "random": generators.tensors()}
        dcp.load(tensors, found[-1])
        generators.restore(tensors["random"])
        losses = read_manifest(found[-1])["losses"]
    saver = Saver(place, CheckpointConfig(keep=2), runtime, 60.0, lambda text, _: print(text))
    for step in range(len(losses) + 1, STEPS + 1):
        state["w"] += torch.randn(4, 100) * np.random.rand() + random.random()
        state["count"] += step
        losses.append(float(state["w"].double().pow(2).sum()))
        saver.save({**state, "random": generators.tensors()}, step, {"losses": losses})
        (Path(output) / "kept").write_text(str(saver.written_step))  # whatever happens now
    saver.wait(last=True)
    write_json(Path(output) / "metrics.json", {"losses": losses, "count": int(state["count"])})
    return 0


def metrics(output: Path) -> dict[str, Any]:
    """Return what a run that reached its end has written."""
    return json.loads((output / "metrics.json").read_text())

# SPDX-License-Identifier: MIT
"""The first lines of a run's log: where it begins, on which rows, and how it computes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from models.tower import Tower
from trainer.build import Loaders
from trainer.config.config import TrainConfig
from trainer.distributed.precision import DTYPES
from trainer.run_dir import CURVES
from trainer.runtime.json_lines import last_step
from trainer.runtime.runtime import Runtime
from trainer.warm_start.inherit import Inherited


class Place(NamedTuple):
    """Where a run begins.

    Attributes:
        step: the finished steps of its checkpoint.
        end_step: the last step.
        inherited: what it takes over from others.
        restarted: whether the folder holds this run, but no checkpoint of it.
    """

    step: int
    end_step: int
    inherited: Inherited | None
    restarted: bool


def greeting(
    config: TrainConfig,
    runtime: Runtime,
    output: Path,
    place: Place,
    loaders: Loaders,
    tower: Tower,
) -> list[tuple[str, bool]]:
    """Return the lines, and of each whether it is shown in quiet mode as well.

    Args:
        config: of the run.
        runtime: this process among the ranks.
        output: the run's folder.
        place: where the run begins.
        loaders: of the training, validation and test rows.
        tower: of the model.
    """
    restart = f"restart {runtime.restarts}: " if runtime.restarts else ""
    lines: list[tuple[str, bool]] = []
    if place.inherited is not None:
        lines += [(line, False) for line in place.inherited.table()]
    elif place.step:
        # What the curve has beyond the checkpoint, before it is cut.
        reached = last_step(output / CURVES) if runtime.is_first else 0
        lost = reached - place.step
        again = f"; {lost:,} steps that were lost are trained again" if lost > 0 else ""
        text = f"resumed at step {place.step:,} of {place.end_step:,}"
        lines.append((f"{restart}{text}{again}", bool(restart)))
    elif place.restarted:
        text = f"{output} holds no checkpoint yet: from the beginning"
        lines.append((f"{restart}{text}", bool(restart)))
    uses = ("training", "validating", "testing")
    used = [(use, one) for use, one in zip(uses, loaders, strict=True) if one is not None]
    lines.append(("; ".join(f"{use} on {loader.describe()}" for use, loader in used), True))
    if config.data.progressive:
        lines.append(("each test day is predicted first, then trained on", True))
    dtype, device = config.precision.dtype, runtime.device
    computes = f"{dtype} on {runtime.world_size} x {device.type}"
    lines += [
        (f"dense weights: {config.dense.describe()}", False),
        (f"tables: {config.sparse.describe()}", False),
        (f"{computes}, dense weights by {config.parallel.describe()}", False),
        (config.loader.describe(runtime.world_size), False),
    ]
    return [*lines, *((line, False) for line in tower.describe(device, DTYPES[dtype]))]

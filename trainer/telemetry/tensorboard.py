# SPDX-License-Identifier: MIT
"""A run's curve and evaluations as event files for TensorBoard, where that package is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.telemetry.telemetry import StepReport

# What of a point of the curve is no curve.
_AXES = ("step", "rows", "seconds")


def check_installed() -> None:
    """Check that event files can be written.

    Raises:
        ValueError: the package is missing.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "export.tensorboard: expected the package tensorboard, which is not installed; "
            "install the versions that requirements/dev.txt lists for it, or leave the setting out"
        )


class EventWriter:
    """Writes scalars into `folder`: train/NAME by interval, test/NAME by evaluation, ranks/PLACE.

    Args:
        folder: The folder of the event files.
        step: The step from which the run continues. Later events of an earlier process are hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def step(self, report: StepReport) -> None:
        """Do nothing: curves have a point an interval."""

    def interval(self, record: Mapping[str, Any]) -> None:
        """Write a point of the curve."""
        self._write("train", record, int(record["step"]))
        self._writer.flush()

    def evaluation(
        self, step: int, metrics: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write an evaluation, and the effective ranks that were found with it."""
        self._write("test", metrics, step)
        named = {f"{record['module']}/{record['path']}": record.get("erank") for record in ranks}
        self._write("ranks", named, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file. Safe to call twice."""
        self._writer.close()

    def _write(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        """Write what is a finite number."""
        for name, value in numbers.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and math.isfinite(value) and name not in _AXES:
                self._writer.add_scalar(f"{group}/{name}", value, step)

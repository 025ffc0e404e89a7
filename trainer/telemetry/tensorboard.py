# SPDX-License-Identifier: MIT
"""A run's curve and evaluations as event files for TensorBoard, where that package is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.telemetry.callbacks import Callback, Run

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


class TensorBoard(Callback):
    """Writes scalars: train/NAME by interval, test/NAME by evaluation, ranks/PLACE.

    A run that goes on hides the later events of an earlier process.
    """

    def on_start(self, run: Run) -> None:
        """Open DIR/tensorboard."""
        from torch.utils.tensorboard.writer import SummaryWriter

        purge = run.step + 1 if run.step else None
        self._writer = SummaryWriter(str(run.output / "tensorboard"), purge_step=purge)

    def on_interval(self, record: Mapping[str, Any]) -> None:
        """Write a point of the curve."""
        self._write("train", record, int(record["step"]))
        self._writer.flush()

    def on_evaluation(
        self, step: int, metrics: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write an evaluation, and the effective ranks that were found with it."""
        self._write("test", metrics, step)
        named = {f"{record['module']}/{record['path']}": record.get("erank") for record in ranks}
        self._write("ranks", named, step)
        self._writer.flush()

    def on_end(self) -> None:
        """Finish the file."""
        self._writer.close()

    def _write(self, group: str, numbers: Mapping[str, Any], step: int) -> None:
        """Write what is a finite number."""
        for name, value in numbers.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and math.isfinite(value) and name not in _AXES:
                self._writer.add_scalar(f"{group}/{name}", value, step)

# SPDX-License-Identifier: MIT
"""Test-then-train: each day is predicted by what has trained on all days before, then trained on.

That is how a model that is retrained every night does, and every day but the first counts as test
data at the cost of one training run (progressive validation: Blum, Kalai and Langford, "Beating the
hold-out", COLT 1999). The loaders' epochs are the days; `trainer.build.progressive_epochs` divides
them. A day's predictions stay in the run's folder (`predictions.py`), so metrics are pooled over
days, also those before a restart, and `trainer.compare` pairs two runs' rows without a model.

Shapes: B rows, K labels.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from models.ranking import Predictions
from trainer.config.config import TrainConfig
from trainer.data.loader import Loader
from trainer.evaluation.predictions import (
    DayWriter,
    equal_parts,
    no_rows,
    read_days,
    read_rows,
)
from trainer.metrics.details import Details
from trainer.metrics.metrics import Metrics
from trainer.runtime.runtime import Runtime


class Progressive:
    """The test days of one run.

    Args:
        config: of the run.
        output: its folder.
        loader: of the test rows, an epoch a day.
        runtime: this process among the ranks.
    """

    def __init__(self, config: TrainConfig, output: Path, loader: Loader, runtime: Runtime) -> None:
        self._labels = [label.name for label in config.schema.labels]
        self._grouped = bool(config.schema.user)
        self._output, self._loader, self._runtime = output, loader, runtime
        self._writer: DayWriter | None = None

    def begin(self, trained: Loader) -> str:
        """Turn to the day after those that `trained` has read, and return it.

        Args:
            trained: the loader of the training rows. A run that `max_steps` ends inside a day
                predicts the day after it.
        """
        self._loader.set_epoch(trained.epoch - (trained.step == 0))
        day = self._loader.files_of(self._loader.epoch)[0].day
        self._writer = DayWriter(self._output, day, self._labels, self._runtime)
        return day

    def keep(self, predictions: Predictions) -> None:
        """Take a batch of the day's predictions."""
        assert self._writer is not None
        self._writer.keep(predictions)

    def end(self, metrics: dict[str, Any]) -> None:
        """Write the day. Collective."""
        assert self._writer is not None
        self._writer.finish(metrics)
        self._writer = None

    def pooled(self, details: Details) -> dict[str, Any]:
        """Return the metrics of all days' rows, and of each day in `days`. Collective.

        Args:
            details: is given all rows, and finds its `values`.
        """
        days = read_days(self._output)
        own = days[self._runtime.rank :: self._runtime.world_size]
        metrics = Metrics(self._labels, grouped=self._grouped)
        details.begin(metrics)
        parts = itertools.chain.from_iterable(read_rows(day) for day in own)
        for rows in equal_parts(parts, no_rows(len(self._labels)), self._runtime):
            metrics.update(*rows)
            details.update(*rows)
        found: dict[str, Any] = metrics.compute()
        details.finish(found)
        return found | {"days": {day.name: day.metrics for day in days}}


def describe_days(metrics: dict[str, Any]) -> str:
    """Return pooled metrics in a line."""
    days = list(metrics["days"])
    text = ", ".join(
        f"{name} {metrics[name]:.4f}" for name in ("auc", "gauc", "logloss") if name in metrics
    )
    return f"{len(days)} days predicted ({days[0]} to {days[-1]}), pooled: {text}"

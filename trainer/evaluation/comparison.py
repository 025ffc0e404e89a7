# SPDX-License-Identifier: MIT
"""Models on the same rows: their metrics, and their differences with intervals.

All models predict a rank's rows in the same order. The scores of all but the last are kept (4 bytes
a row and label, on each rank); while the last one predicts, the rows of all models stream into one
bootstrap for each label and each slice.

Shapes: B examples, K labels, Q models.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.metrics.bootstrap import BINS, Bootstrap, drift, of_draws
from trainer.metrics.metrics import Metrics, communication_device
from trainer.metrics.spec import METRICS, with_intervals

# Bins of the slices' scores: bounded for all slices of a column together.
_SLICE_BINS, _LEAST_BINS = 2**14, 64
_SLICE_SCORES = 2**16
_SLICE_USER_ROWS = 1_000_000


class Paired:
    """Q models' predictions of one label on the same rows: `update`, then `finish` once.

    Rows of which a model has no finite prediction are left out of all models.

    Args:
        num_models: Q.
        replicates: Of the bootstrap.
        grouped: Whether there are users.
        parts: How many such objects share the memory: more have fewer bins each.
    """

    def __init__(self, num_models: int, replicates: int, grouped: bool, parts: int = 1) -> None:
        names = [str(number) for number in range(num_models)]
        bins, self._metrics = BINS, Metrics(names, grouped=grouped)
        if parts > 1:
            bins = min(BINS, max(_LEAST_BINS, _SLICE_BINS // parts))
            self._metrics = Metrics(
                names,
                grouped=grouped,
                max_bins=_SLICE_SCORES,
                max_user_rows=_SLICE_USER_ROWS,
            )
        self._bootstrap = Bootstrap(self._metrics, range(num_models), replicates, bins)
        # Rows of which all models have a finite prediction, and the sum of |first - last|.
        self._moved = np.zeros(2)

    def update(
        self,
        scores: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        users: torch.Tensor,
    ) -> None:
        """Add a batch. Collective once: every rank makes as many calls.

        Args:
            scores: (B, Q).
            labels: (B,).
            weights: (B,).
            users: (B,) int64.
        """
        counted = (weights > 0) & scores.isfinite().all(1)
        models = scores.shape[1]
        weights = torch.where(counted, weights, 0.0)
        labels, weights = (one[:, None].expand(-1, models) for one in (labels, weights))
        self._metrics.update(scores, labels, weights, users)
        self._bootstrap.update(scores, labels, weights, users)
        distance = (scores[:, 0] - scores[:, -1])[counted].abs().sum(dtype=torch.float64)
        self._moved += [float(counted.sum()), float(distance)]

    def finish(self) -> dict[str, Any]:
        """Return `rows` and `models`, and of two models `differences`. Collective.

        A metric that the rows do not define is NaN, and so is its interval.
        """
        exact = self._metrics.compute_labels()
        self._bootstrap.finish(exact)
        moved, device = torch.from_numpy(self._moved), self._device()
        if device is not None:
            moved = moved.to(device)
            dist.all_reduce(moved, group=self._metrics.process_group)
        rows, distance = moved.tolist()
        models = []
        for model in range(len(exact)):
            found = {name: self._bootstrap.interval(name, model) for name in with_intervals()}
            values = {name: value for name, (value, _) in found.items()}
            intervals = {name: ends for name, (_, ends) in found.items()}
            models.append({**values, "intervals": intervals})
        answer: dict[str, Any] = {"rows": int(rows), "models": models}
        if len(models) == 2:
            answer["differences"] = self._differences() | {
                "drift": drift(self._bootstrap.counts[0], self._bootstrap.counts[1]),
                "mean_move": distance / rows if rows else float("nan"),
            }
        return answer

    def _differences(self) -> dict[str, Any]:
        """Return the first model's metrics less the second's, with their intervals.

        Of a metric that is best at 1 there is the difference of |ln value| as well, as
        `<name>_error`: twice too much is as wrong as half.
        """
        found = {}
        for name in with_intervals():
            drawn = {name: self._bootstrap.drawn(name)}
            if METRICS[name].better == "one":
                with np.errstate(divide="ignore", invalid="ignore"):
                    drawn[METRICS[name].difference] = np.abs(np.log(drawn[name]))
            for key, values in drawn.items():
                with np.errstate(invalid="ignore"):
                    value, interval = of_draws(values[:, 0] - values[:, 1])
                value = value if np.isfinite(value) else float("nan")
                found[key] = {"difference": value, "interval": interval}
        return found

    def _device(self) -> torch.device | None:
        return communication_device(self._metrics.process_group)


class Comparison:
    """What is said of one model or two: the rows of all stream through `update`.

    Args:
        labels: Of each model, its labels' names; those that all have are compared, and the first.
        slices: The names of the slices of each column.
        grouped: Whether there are users.
        replicates: Of the bootstrap.
    """

    def __init__(
        self,
        labels: Sequence[Sequence[str]],
        slices: Mapping[str, Sequence[str]],
        grouped: bool,
        replicates: int,
    ) -> None:
        # name -> its place among the labels of each model.
        self._places = {
            name: [one.index(name) for one in labels]
            for name in labels[0]
            if all(name in one for one in labels)
        }
        first = [0] * len(labels)
        self._others = {name: one for name, one in self._places.items() if one != first}
        self._first = Paired(len(labels), replicates, grouped)
        self._labels = {name: Paired(len(labels), replicates, grouped) for name in self._others}
        self._slices = {
            column: [Paired(len(labels), replicates, grouped, 1 + len(names)) for _ in names]
            for column, names in slices.items()
        }
        self._names = slices
        self._differ = False

    def update(
        self,
        scores: Sequence[torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        codes: Mapping[str, NDArray[np.integer]],
    ) -> None:
        """Add a batch. Collective.

        Args:
            scores: (B, K) of each model.
            rows: Labels and weights (B, K) of the last model, and users (B,).
            codes: (B,) of each column, the rows' slices.
        """
        labels, weights, users = rows
        first = torch.stack([one[:, 0] for one in scores], 1)
        self._first.update(first, labels[:, 0], weights[:, 0], users)
        for name, places in self._others.items():
            own = torch.stack([one[:, at] for one, at in zip(scores, places, strict=True)], 1)
            last = places[-1]
            self._labels[name].update(own, labels[:, last], weights[:, last], users)
        for column, parts in self._slices.items():
            for number, part in enumerate(parts):
                chosen = torch.from_numpy(np.flatnonzero(codes[column] == number))
                inside = (one[chosen] for one in (first, labels[:, 0], weights[:, 0], users))
                part.update(*inside)

    def finish(self) -> dict[str, Any]:
        """Return what is said of the models, and by label and slice. Collective."""
        whole = self._first.finish()
        found = {name: one for name, one in whole.items() if name != "rows"}
        whole = dict(found)
        rest = {name: one.finish() for name, one in self._labels.items()}
        for one in rest.values():
            one.pop("rows")
        if len(self._places) > 1:
            found["labels"] = {name: rest.get(name, whole) for name in self._places}
        if self._slices:
            found["slices"] = {
                column: [
                    {"slice": name, **said}
                    for name, part in zip(self._names[column], parts, strict=True)
                    if (said := part.finish())["rows"]
                ]
                for column, parts in self._slices.items()
            }
        return found


def checksum(columns: Sequence[NDArray], before: int = 0) -> int:
    """Return a checksum of rows, to tell whether two models were given the same."""
    for one in columns:
        before = zlib.crc32(np.ascontiguousarray(one).tobytes(), before)
    return before

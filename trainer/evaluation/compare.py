# SPDX-License-Identifier: MIT
"""Two models on the same rows: predictions of both, checked to be of equal rows, and their metrics.

Runs of test-then-train have left their predictions, so comparing those needs no model. The command
is `trainer/compare.py`.

Shapes: B examples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from models.ranking import Predictions
from trainer.checkpoint.storage import Folder
from trainer.data.loader import LoaderConfig
from trainer.data.splits import describe_days
from trainer.evaluation.comparison import Comparison, checksum
from trainer.evaluation.evaluate import (
    evaluate,
    open_checkpoint,
    read_config,
    real_rows,
)
from trainer.evaluation.predictions import equal_parts, no_rows, read_days, read_rows
from trainer.evaluation.slices import SliceCodes
from trainer.metrics.metrics import Metrics, communication_device
from trainer.metrics.validity import all_doubts
from trainer.runtime.printable import printable
from trainer.runtime.runtime import Runtime

# Scores, labels and weights (B, K) and users (B,), in host memory.
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Codes = dict[str, NDArray[np.int32]]


class Rows(NamedTuple):
    """Which rows all models predict: of a log, its days and share of rows, by which loader."""

    data: str
    chosen: tuple[str, str]
    loader: LoaderConfig


class Model:
    """A checkpoint's model, opened on the rows that it is to predict. Collective.

    Args:
        path: The checkpoint.
        rows: Which rows.
        runtime: This process among the others.
        slice_by: Columns.

    Attributes:
        slices: The names of the slices of each column.

    Raises:
        ValueError: no checkpoint there, or data that does not fit its schema.
    """

    def __init__(
        self, path: Folder, rows: Rows, runtime: Runtime, slice_by: Sequence[str] = ()
    ) -> None:
        self._opened = open_checkpoint(path, rows.data, rows.chosen, runtime, rows.loader)
        config, files = self._opened.config, self._opened.loader.files
        self._codes = [SliceCodes(one, config, files, runtime) for one in slice_by]
        self.slices = {one.column: one.names for one in self._codes}

    def predict(self, take: Callable[[Batch, Codes], object]) -> dict[str, Any]:
        """Predict every row and return the metrics. Collective.

        Args:
            take: Is given each batch, and the slices (B,) of its rows by column.
        """

        def keep(found: Predictions) -> None:
            scores, labels, weights, users = (one.cpu() for one in real_rows(found))
            codes = {one.column: one.of(len(users)).astype(np.int32) for one in self._codes}
            take((scores.float(), labels.float(), weights.float(), users), codes)

        opened = self._opened
        metrics = evaluate(opened.pipeline, opened.loader, opened.config, keep)
        opened.loader.close()
        for one in self._codes:
            one.close()
        return metrics


class Checked:
    """Checksums of what each model was given of a row beside its features.

    Args:
        labels: Of each model, its labels' names.
        shared: Those that all have.
    """

    def __init__(self, labels: Sequence[Sequence[str]], shared: Sequence[str]) -> None:
        self._places = [[0, *(one.index(name) for name in shared)] for one in labels]
        self._sums, self._rows = [0] * len(labels), [0] * len(labels)
        self._weight = 0.0

    def add(self, model: int, batch: Batch) -> None:
        """Add a batch that a model was given."""
        _, labels, weights, users = (one.numpy() for one in batch)
        places = self._places[model]
        columns = [labels[:, places], weights[:, places], users]
        self._sums[model] = checksum(columns, self._sums[model])
        self._rows[model] += len(users)
        self._weight += float(weights[:, 0].sum())

    def check(self, data: str, label: str) -> None:
        """Refuse rows without a label, and models of different rows. Collective.

        Raises:
            ValueError: there are such.
        """
        differ = any(one != self._sums[0] for one in self._sums)
        found = torch.tensor([float(differ), self._weight, *map(float, self._rows)])
        device = communication_device(None)
        if device is not None:
            found = found.to(device)
            dist.all_reduce(found)
        differing, weight, *rows = found.tolist()
        if differing:
            counts = " and ".join(f"{one:,.0f}" for one in rows)
            raise ValueError(
                f"compare: the models predict different rows ({counts}); their schemas must name "
                "the same label, weight and user"
            )
        if not weight:
            raise ValueError(
                f"{data}: expected rows with a label {label!r}, got none; choose other days"
            )


def compare(
    paths: Sequence[Folder],
    rows: Rows,
    runtime: Runtime,
    slice_by: Sequence[str] = (),
    replicates: int = 200,
) -> dict[str, Any]:
    """Return what is said of the models at `paths`, one or two. Collective.

    Raises:
        ValueError: as `Model`; no row has the first label; or the models were given other rows.
    """
    configs = [read_config(path)[0] for path in paths]
    labels = [[label.name for label in one.schema.labels] for one in configs]
    shared = [name for name in labels[0] if all(name in one for one in labels)]
    checked = Checked(labels, shared)
    before: list[tuple[torch.Tensor, Codes]] = []

    def store(batch: Batch, codes: Codes) -> None:
        checked.add(0, batch)
        before.append((batch[0], codes))

    model = Model(paths[0], rows, runtime, slice_by)
    slices, metrics = model.slices, []
    if len(paths) > 1:
        metrics.append(model.predict(store))
        del model  # its tables make room for the next one's
        model = Model(paths[1], rows, runtime)
    comparison = Comparison(labels, slices, bool(configs[0].schema.user), replicates)
    taken = iter(before)

    def take(batch: Batch, codes: Codes) -> None:
        checked.add(len(paths) - 1, batch)
        scores = [batch[0]]
        if len(paths) > 1:
            first, codes = next(taken)
            scores = [first, batch[0]]
        comparison.update(scores, batch[1:], codes)

    metrics.append(model.predict(take))
    checked.check(rows.data, labels[0][0])
    return _finished(comparison, metrics)


def compare_days(
    folders: Sequence[Path], grouped: bool, runtime: Runtime, replicates: int = 200
) -> dict[str, Any]:
    """Return what is said of the runs in `folders`, one or two, on the days they predicted.

    The rows are those of days that all have predicted; `slices` has each such day. No model is
    loaded. Collective.

    Args:
        folders: of runs with `data.progressive`.
        grouped: whether there are users.
        runtime: this process among the others.
        replicates: of the bootstrap.

    Raises:
        ValueError: no common day, files that are damaged, or runs of other rows.
    """
    every = [{day.name: day for day in read_days(folder)} for folder in folders]
    names = [name for name in every[0] if all(name in one for one in every)]
    if not names:
        raise ValueError(
            "compare: expected days that all runs have predicted, got "
            + " and ".join(describe_days(one) or "none" for one in every)
        )
    labels = [list(one[names[0]].labels) for one in every]
    changed = [
        one[name].folder
        for one, own in zip(every, labels, strict=True)
        for name in names
        if list(one[name].labels) != own
    ]
    if changed:
        raise ValueError(f"{printable(str(changed[0]))}: other labels than the day before")
    shared = [name for name in labels[0] if all(name in one for one in labels)]
    if not shared:
        raise ValueError(f"compare: expected a label that both have, got {labels}")
    checked = Checked(labels, shared)
    comparison = Comparison(labels, {"day": names}, grouped, replicates)
    metrics = [Metrics(one, grouped=grouped) for one in labels]
    own = range(runtime.rank, len(names), runtime.world_size)
    streams = (
        (number, *parts)
        for number in own
        for parts in zip_longest(*(read_rows(one[names[number]]) for one in every))
    )
    empty = (0, *(no_rows(len(one)) for one in labels))
    for number, *parts in equal_parts(streams, empty, runtime):
        for model, part in enumerate(parts):
            if part is not None:
                checked.add(model, part)
        sizes = [0 if part is None else len(part.users) for part in parts]
        if len(set(sizes)) > 1:  # of different rows, which is refused below
            sizes, parts = [0], empty[1:]
        codes = {"day": np.full(sizes[0], number, np.int32)}
        for one, part in zip(metrics, parts, strict=True):
            one.update(*part)
        comparison.update([part.scores for part in parts], parts[-1][1:], codes)
    checked.check("the predicted days", labels[0][0])
    return _finished(comparison, [one.compute() for one in metrics])


def _finished(comparison: Comparison, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a comparison found, with each model's metrics and alerts. Collective."""
    found = comparison.finish()
    pairs = zip(metrics, found["models"], strict=True)
    found["models"] = [
        one
        | {
            "intervals": own["intervals"],
            "alerts": all_doubts(one, {"intervals": own["intervals"]}),
        }
        for one, own in pairs
    ]
    return found

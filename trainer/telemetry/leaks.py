# SPDX-License-Identifier: MIT
"""Finds a feature that is the label, or reveals it, in the first rows that train.

A column that separates the labels by itself with an AUC above 0.99 is hardly ever a feature: it is
known after the label, or it is the label. Numbers are judged by their order. Ids are judged on rows
that did not decide: the label means by id of the even rows score the odd ones, so that an id that
occurs once reveals nothing.

Shapes: B examples, N rows kept, C dense features, F sparse features.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from embeddings.schema.schema import Schema
from models.batch import Batch
from trainer.metrics.auc import binary_auc
from trainer.metrics.validity import LEAST_OF_A_CLASS

Floats = NDArray[np.float64]
# Rows that suffice where both classes are frequent, and at which the search ends in any case.
_ROWS, _MOST_ROWS = 8_192, 131_072
_LEAK = 0.99


class LeakWatch:
    """Looks at the batches on their way to the model until it has rows enough. One rank does.

    Args:
        schema: Names the features and the labels; the first label counts.
        active: Whether to look at all.

    Attributes:
        first_steps: The step of the alert by its name, after `report`.
    """

    def __init__(self, schema: Schema, active: bool = True) -> None:
        self.first_steps: dict[str, int] = {}
        self._schema = schema
        self._labels: list[NDArray[np.float32]] = []
        self._dense: list[NDArray[np.float32]] = []
        self._ids: list[dict[str, NDArray[np.int64]]] = []
        self._rows, self._positive = 0, 0.0
        self._done = not active

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, having looked at the first of them, which are in host memory."""
        for batch in batches:
            if not self._done and self._rows < _MOST_ROWS and not self._enough(_ROWS):
                self._take(batch)
            yield batch

    def report(self, step: int, last: bool = False) -> list[str]:
        """Return the alert, once there are rows enough or the run ends.

        Args:
            step: Finished steps.
            last: Whether there will be no more rows.
        """
        if self._done or not (self._enough(_ROWS) or self._rows >= _MOST_ROWS or last):
            return []
        self._done = True
        found = self._find() if self._enough(0) else []
        self._labels, self._dense, self._ids = [], [], []
        if not found:
            return []
        self.first_steps["feature_is_label"] = step
        named = ", ".join(f"{name} (AUC {area:.4f})" for name, area in found)
        return [
            f"ALERT feature_is_label at step {step:,}: of {self._rows:,} training rows each of "
            f"these tells label {self._schema.labels[0].name!r} by itself: {named}. {ADVICE}"
        ]

    def _enough(self, rows: int) -> bool:
        least = min(self._positive, self._rows - self._positive)
        return self._rows >= rows and least >= LEAST_OF_A_CLASS

    def _take(self, batch: Batch) -> None:
        """Keep a batch's rows that have a label, and their ids of features with one id a row."""
        kept = (batch.weights[:, 0] > 0).cpu().numpy()  # (B,)
        self._labels.append(batch.labels[:, 0].cpu().numpy()[kept])
        self._dense.append(batch.dense.cpu().numpy()[kept])  # (B, C)
        ids = {}
        for name, values in batch.sparse.to_dict().items():
            if bool((values.lengths() == 1).all()):
                ids[name] = values.values().cpu().numpy()[kept]
        self._ids.append(ids)
        self._rows += int(kept.sum())
        self._positive += float(self._labels[-1].sum())

    def _find(self) -> list[tuple[str, float]]:
        """Return the features that tell the label, each with its AUC."""
        labels = np.concatenate(self._labels).astype(np.float64)
        dense = np.concatenate(self._dense)
        found = []
        for feature, values in zip(self._schema.dense, dense.T, strict=True):
            area = _area(np.nan_to_num(values.astype(np.float64), nan=-np.inf), labels)
            if max(area, 1 - area) > _LEAK:
                found.append((f"dense feature {feature.name!r}", max(area, 1 - area)))
        for name in set.intersection(*(set(one) for one in self._ids)):
            area = _told_by_ids(np.concatenate([one[name] for one in self._ids]), labels)
            if area > _LEAK:
                found.append((f"sparse feature {name!r}", area))
        return sorted(found)


ADVICE = (
    "No click log is that easy. Likely cause: a column that is known only after the label, or that "
    "is the label. Way out: leave it out of the schema."
)


def _area(scores: Floats, labels: Floats) -> float:
    """Return the area under the ROC curve of (N,) scores; 0.5 where a class is absent."""
    _, place = np.unique(scores, return_inverse=True)
    sums = np.stack([np.bincount(place, one) for one in (labels, 1 - labels)], dtype=np.float64)
    area = binary_auc(sums[0], sums[1])
    return 0.5 if np.isnan(area) else area


def _told_by_ids(ids: NDArray[np.int64], labels: Floats) -> float:
    """Return the AUC of the odd rows by the label means of the even rows with the same id."""
    _, place = np.unique(ids, return_inverse=True)
    even = np.arange(len(ids)) % 2 == 0
    size = int(place.max()) + 1
    count = np.bincount(place[even], minlength=size)
    # An id that no even row has gets the mean of all.
    total = np.bincount(place[even], labels[even], size)
    score = np.where(count > 0, total / np.maximum(count, 1), labels[even].mean())
    return _area(score[place[~even]], labels[~even])

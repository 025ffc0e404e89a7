# SPDX-License-Identifier: MIT
"""The values of a run's metrics on one rank: set during training, sent as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.telemetry.prometheus_metrics import BY_NAME

Key = tuple[str, tuple[str, ...]]


class Values:
    """The values of series, by metric and label values; plain numbers that any thread may read."""

    def __init__(self) -> None:
        self._numbers: dict[Key, float] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a series; it stays until it is set again."""
        assert len(BY_NAME[name].labels) == len(labels), name
        self._numbers[name, labels] = float(value)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a series that begins at 0."""
        self.set(name, self._numbers.get((name, labels), 0.0) + value, *labels)

    def get(self, name: str, *labels: str) -> float | None:
        """Return a series, None if it was never set."""
        return self._numbers.get((name, labels))

    def forget(self, name: str) -> None:
        """Drop the series of a metric, before those that still exist are set again."""
        for key in [key for key in self._numbers.copy() if key[0] == name]:
            self._numbers.pop(key, None)

    def items(self) -> Iterator[tuple[Key, float]]:
        """Yield the series as they are now."""
        yield from self._numbers.copy().items()

    def plain(self) -> list[Any]:
        """Return the series as lists of [name, labels, value], which JSON can hold."""
        return [[name, list(labels), value] for (name, labels), value in self.items()]

    def replace(self, plain: Any) -> None:
        """Replace all values by what `plain` returned on another rank, except unknown series."""
        self._numbers = dict(_checked(plain))


def _checked(plain: Any) -> Iterator[tuple[Key, float]]:
    """Yield the entries that are series of a known metric."""
    for entry in plain if isinstance(plain, list) else ():
        if not (isinstance(entry, list) and len(entry) == 3):
            continue
        name, labels, value = entry
        metric = BY_NAME.get(name) if isinstance(name, str) else None
        texts = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if metric and texts and number and len(labels) == len(metric.labels):
            yield (name, tuple(labels)), float(value)

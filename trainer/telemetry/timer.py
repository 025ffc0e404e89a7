# SPDX-License-Identifier: MIT
"""How long a run waits for its input: the first thing to know of a slow one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class InputTimer:
    """Seconds spent waiting for input."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, counting the time until each arrives as waiting."""
        with self.waiting():
            iterator = iter(items)
        while True:
            with self.waiting():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

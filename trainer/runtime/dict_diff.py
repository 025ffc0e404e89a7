# SPDX-License-Identifier: MIT
"""The differences of nested settings, for every command that compares configurations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

_SHOWN = 60


class Difference(NamedTuple):
    """A setting that differs.

    Attributes:
        path: its keys, joined by dots.
        old: its value before, None where it is absent.
        new: its value now, None where it is absent.
    """

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        """Return 'path: old, now new', in one line."""
        return f"{self.path}: {_short(self.old)}, now {_short(self.new)}"


def differences(old: Any, new: Any, ignored: Collection[str] = ()) -> list[Difference]:
    """Return where two nested mappings differ, in the order of their paths.

    Args:
        old: the values before.
        new: the values now.
        ignored: paths that may differ, with all that is below them.
    """
    found = _walk(old, new, "", frozenset(ignored))
    return sorted(found, key=lambda one: one.path)


def _walk(old: Any, new: Any, path: str, ignored: frozenset[str]) -> Iterator[Difference]:
    if path in ignored:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            below = f"{path}.{key}" if path else str(key)
            yield from _walk(old.get(key), new.get(key), below, ignored)
    elif old != new:
        yield Difference(path, old, new)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."

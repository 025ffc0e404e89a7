# SPDX-License-Identifier: MIT
"""Convert plain data (dicts, lists and scalars, as YAML and JSON give them) to dataclasses.

Conversion is strict: an unknown key, a missing key or a value of another type is an error that
gives its path, what was expected, what was found and a way out. The data may come from somebody
else's file, so the work is bounded: nothing is copied before its type is known, and a message shows
only the beginning of a value, however often YAML aliases repeat it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import reprlib
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

_INT64 = range(-(2**63), 2**63)
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxdict, _SHOWN.maxlist, _SHOWN.maxstring = 2, 3, 3, 80


def suggest(name: str, known: Iterable[Any]) -> str:
    """Return ', did you mean X?' for the closest text of `known`, or an empty string."""
    texts = [one for one in known if isinstance(one, str)]  # a choice may be a number
    close = difflib.get_close_matches(name[:200], texts, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def from_plain(kind: Any, value: Any, path: str) -> Any:
    """Convert plain dicts, lists and scalars to an annotated type.

    Args:
        kind: a dataclass, `tuple[T, ...]`, `dict[str, T]`, `Literal`, a scalar type, or a union. A
            union of dataclasses is told apart by the key `type`, which holds the class's name.
        value: what was read. A dataclass that is of type `kind` already is returned as it is.
        path: the value's place, for error messages.

    Returns:
        A value of type `kind`. Whole numbers become floats where a float is expected.

    Raises:
        ValueError: an unknown or missing key, or a value of another type.
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _from_union(typing.get_args(kind), value, path)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if isinstance(value, kind):
            return value
        return _from_mapping(kind, value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}: expected a list, got {type(value).__name__}")
        inner = typing.get_args(kind)[0]
        return tuple(from_plain(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: expected a mapping, got {type(value).__name__}")
        inner = typing.get_args(kind)[1]
        return {
            _scalar(str, key, path): from_plain(inner, item, f"{path}.{key}")
            for key, item in value.items()
        }
    if origin is Literal:
        choices = typing.get_args(kind)
        # True is equal to 1, and not one of the numbers 1 and 8.
        if not any(type(value) is type(one) and value == one for one in choices):
            meant = suggest(value, choices) if isinstance(value, str) else ""
            raise ValueError(
                f"{path}: expected one of {list(choices)}, got {_SHOWN.repr(value)}{meant}"
            )
        return value
    return _scalar(kind, value, path)


def _scalar(kind: Any, value: Any, path: str) -> Any:
    """Return `value` as the scalar type `kind`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and kind in (int, float) and value not in _INT64:
        raise ValueError(
            f"{path}: expected a number of at most 64 bits, got one of {value.bit_length()}"
        )
    if whole and kind is float:
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        # YAML reads `no`, `1.10` and `2026-01-01` as other types than text.
        quoted = (
            "; write it in quotes" if kind is str and not isinstance(value, list | dict) else ""
        )
        raise ValueError(
            f"{path}: expected {kind.__name__}, got {_SHOWN.repr(value)} "
            f"({type(value).__name__}){quoted}"
        )
    return value


def _from_mapping(kind: Any, value: Any, path: str) -> Any:
    """Convert `value` to the dataclass `kind`."""
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(value).__name__}")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            shown = _SHOWN.repr(key).strip("'") if isinstance(key, str) else _SHOWN.repr(key)
            raise ValueError(
                f"{path}.{shown}: unknown key{suggest(str(key), fields)}; known: {list(fields)}"
            )
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in value:
            raise ValueError(f"{path}.{name}: missing key")
    built = {key: from_plain(hints[key], item, f"{path}.{key}") for key, item in value.items()}
    try:
        return kind(**built)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; Python evaluates their source to find them."""
    return typing.get_type_hints(kind)


def _from_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Convert `value` to the member of a union that its key `type` names, or to its one scalar."""
    if value is None and type(None) in kinds:
        return None
    named = {
        kind.__name__: kind
        for kind in kinds
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    if not named:
        scalars = [kind for kind in kinds if kind is not type(None)]
        return from_plain(scalars[0], value, path) if len(scalars) == 1 else value
    if len(kinds) == 2 and type(None) in kinds:
        (only,) = named.values()  # optional, so there is nothing to tell apart
        return from_plain(only, value, path)
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in named:
        meant = suggest(name, named) if isinstance(name, str) else ""
        raise ValueError(
            f"{path}.type: expected one of {sorted(named)}, got {_SHOWN.repr(name)}{meant}"
        )
    rest = {key: item for key, item in value.items() if key != "type"}
    return from_plain(named[name], rest, path)

# SPDX-License-Identifier: MIT
"""Plain data (dicts, lists and scalars, as YAML and JSON give them) to dataclasses.

Unknown keys are errors that give their path and the closest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ', did you mean X?' for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def from_plain(kind: Any, value: Any, path: str) -> Any:
    """Convert plain dicts, lists and scalars to the annotated type `kind`.

    A union of dataclasses is told apart by the key `type`, which holds the class's name. `path`
    names the place in error messages.

    Raises:
        ValueError: unknown or missing key, or wrong type, with the key's path.
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _from_union(typing.get_args(kind), value, path)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _from_mapping(kind, value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}: expected a list, got {type(value).__name__}")
        return tuple(
            from_plain(typing.get_args(kind)[0], item, f"{path}[{i}]")
            for i, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: expected a mapping, got {type(value).__name__}")
        return {
            str(key): from_plain(typing.get_args(kind)[1], item, f"{path}.{key}")
            for key, item in value.items()
        }
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise ValueError(
                f"{path}: expected one of {list(typing.get_args(kind))}, got {value!r}"
                f"{suggest(str(value), typing.get_args(kind))}"
            )
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ValueError(
            f"{path}: expected {kind.__name__}, got {value!r} ({type(value).__name__})"
        )
    return value


def _from_mapping(kind: Any, value: Any, path: str) -> Any:
    """Convert `value` to the dataclass `kind`."""
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a mapping, got {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise ValueError(
                f"{path}.{key}: unknown key{suggest(str(key), fields)}; known: {list(fields)}"
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
    if not isinstance(value, dict) or name not in named:
        raise ValueError(
            f"{path}.type: expected one of {sorted(named)}, got {name!r}{suggest(str(name), named)}"
        )
    return from_plain(
        named[name], {key: item for key, item in value.items() if key != "type"}, path
    )

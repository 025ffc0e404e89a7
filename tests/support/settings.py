# SPDX-License-Identifier: MIT
"""What a configuration sets: its values that are not the defaults of their dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any


def changed(value: Any) -> Any:
    """Return plain data of what differs from the defaults, so that a new setting changes nothing.

    A dataclass without a default for a field keeps that field. Classes stand under `type` where a
    field may hold several.
    """
    if isinstance(value, list | tuple):
        return [changed(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found: dict[str, Any] = {"type": type(value).__name__}
    for field in dataclasses.fields(value):
        item, default = getattr(value, field.name), field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if item != default:
            found[field.name] = changed(item)
    return found

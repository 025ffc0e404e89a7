# SPDX-License-Identifier: MIT
"""Thresholds as options: a dataclass of numbers whose fields carry their own help."""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def threshold(default: Any, help_text: str) -> Any:
    """Return a dataclass field with a default and the help of its option."""
    return field(default=default, metadata={"help": help_text})


def add_thresholds(parser: argparse.ArgumentParser, prefix: str, config: type[Any]) -> None:
    """Add an option --PREFIX-NAME for every field of `config`."""
    group = parser.add_argument_group(f"{prefix}: {(config.__doc__ or '').partition(';')[0]}")
    for item in fields(config):
        name, text = option(prefix, item.name), item.metadata["help"]
        if isinstance(item.default, bool):
            group.add_argument(name, action="store_true", help=f"{text} (default: off)")
        else:
            kind, text = type(item.default), f"{text} (default: {item.default})"
            group.add_argument(name, type=kind, default=item.default, metavar="X", help=text)


def read_thresholds(prefix: str, config: type[Config], options: argparse.Namespace) -> Config:
    """Return the configuration that the options of `add_thresholds` give.

    Raises:
        ValueError: a threshold is out of its range.
    """
    names = [item.name for item in fields(config)]  # pyright: ignore[reportArgumentType]
    return config(**{name: getattr(options, f"{prefix}_{name}") for name in names})


def option(prefix: str, name: str) -> str:
    """Return the option of a field."""
    return f"--{prefix}-{name.replace('_', '-')}"

# SPDX-License-Identifier: MIT
"""What a tower is: its settings, its module, and the hooks that it may offer.

A tower is single-device code that turns tokens into one representation an example. Field towers
read (B, T, D) tokens, stream towers (TokenFormer, OneTrans, HSTU) read a `Stream`; the class of the
settings decides which. Nothing outside `models/` and the recipes names a tower: what training,
sharding and reports want to know of one, they ask through the methods of `Tower`.

A tower may lie in a package of its own. Its settings are a subclass of `TowerConfig`, its module
one of `Tower`. A recipe `package.module:function` uses it, or the package announces the settings'
class in the entry point group `fullrank.towers`. A configuration that was read from a file never
decides what is imported: `find_tower` looks only among classes that are imported already and among
installed entry points.

Shapes: B examples, T tokens, V targets, D token width.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.plugins import GROUP, announced

# Packages beside this file, each of whose modules holds a tower or parts of one.
_FOLDERS = ("towers", "baselines")


class Tower(nn.Module):
    """A module from tokens or a stream to representations.

    A field tower maps tokens (B, T, D) to (B, output_dim), a stream tower a `Stream` to
    (B, V, output_dim) or `UserOutputs`. Every method is a hook; what it does here suits a tower
    that does not override it.

    Attributes:
        output_dim: width of the representation.
    """

    output_dim: int

    def set_progress(self, fraction: float) -> None:
        """Prepare the next step; called before every step of a run.

        A tower keeps decisions, not the fraction: a compiled tower is compiled again for every new
        value of an attribute.

        Args:
            fraction: of the run's steps that have been taken, from 0 to 1.
        """

    def fsdp_units(self) -> list[nn.Module]:
        """Return parts whose weights FSDP may gather and free one by one, inner before outer.

        The tower must run each of them through its `forward` alone. The default is every block of
        its module lists. What is in none of them is gathered for the whole tower.
        """
        return blocks_of(self)

    def describe(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Return lines for the log of a run: what the tower chooses by itself, such as kernels.

        Args:
            device: that it runs on.
            dtype: that its products are computed in.
        """
        return []


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Settings of a tower that reads field tokens (B, T, D).

    A field `warmup`, where a tower has one, is the share of a run's steps, from the first, that it
    trains in a simpler form.
    """

    def build(self, num_tokens: int, token_dim: int, /) -> Tower:
        """Return the tower for (B, num_tokens, token_dim) tokens."""
        raise NotImplementedError(f"{type(self).__name__}.build")


@dataclass(frozen=True, kw_only=True)
class StreamTowerConfig(TowerConfig):
    """Settings of a tower that reads a `Stream` of `num_tokens` fields beside history and targets.

    Args:
        max_length: newest events of a history that are used.
        num_actions: classes of the action on each event; 0 if streams have none. It follows from
            the schema.
    """

    max_length: int = 64
    num_actions: int = 0

    @property
    def learns_from_history(self) -> bool:
        """Whether the tower returns `UserOutputs`, which are trained at past events too."""
        return False


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return every block of the module lists among a module's children."""
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def type_name(kind: type[TowerConfig]) -> str:
    """Return how a written configuration names the class of a tower's settings.

    A class of this repository goes by its own name, another one as `package.module:Class`.
    """
    ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__qualname__ if ours else f"{kind.__module__}:{kind.__qualname__}"


def find_tower(name: Any) -> type[TowerConfig]:
    """Return the class of settings that `type_name` names so; nothing is imported by that name.

    Raises:
        ValueError: no such class is imported, and no installed package announces it.
    """
    for folder in _FOLDERS:
        place = [str(Path(__file__).with_name(folder))]
        for module in pkgutil.walk_packages(place, f"{__package__}.{folder}."):
            importlib.import_module(module.name)
    known = {type_name(kind): kind for kind in _subclasses(TowerConfig)}
    if isinstance(name, str) and name not in known and ":" in name:
        package = name.partition(":")[0].partition(".")[0]
        for point in announced().values():
            if point.module.partition(".")[0] == package:
                point.load()
        known = {type_name(kind): kind for kind in _subclasses(TowerConfig)}
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"expected one of {', '.join(sorted(known))}; got {name!r:.80}. A tower from a package "
            f"of its own must be installed with an entry point in the group {GROUP!r}, or be named "
            "on the command line by --tower package.module:Class"
        )
    return known[name]


def _subclasses(kind: type[TowerConfig]) -> Iterator[type[TowerConfig]]:
    """Yield the classes of towers' settings that have been imported."""
    for one in kind.__subclasses__():
        if one is not StreamTowerConfig:
            yield one
        yield from _subclasses(one)

# SPDX-License-Identifier: MIT
"""Towers of other packages: what installed packages announce as entry points. Needs no torch.

A package announces a tower in its `pyproject.toml`:

    [project.entry-points."fullrank.towers"]
    acme = "acme.towers:AcmeConfig"

`acme` then is a tower in recipes (`acme.demo`). The value is a class of settings, or a function
without parameters that returns a `ModelConfig`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "fullrank.towers"
# Of the option --tower.
TOWER_HELP = "settings of a tower from another package that announces none; imports the module"


def announced() -> dict[str, EntryPoint]:
    """Return what installed packages announce, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}

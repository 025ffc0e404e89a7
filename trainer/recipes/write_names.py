# SPDX-License-Identifier: MIT
"""Write `trainer/config/names.json` from the recipes: python -m trainer.recipes.write_names."""

from __future__ import annotations

import json
import sys

from trainer.config.names import FILE, Names
from trainer.config.overrides import Kind, setting_kinds
from trainer.recipes.load import recipes
from trainer.runtime.program import quiet_pipe


def generate() -> str:
    """Return the text of the file."""
    known = recipes()
    kinds = {name: setting_kinds(recipe.run()) for name, recipe in known.items()}
    first, *others = kinds.values()
    shared = {
        name: kind for name, kind in first.items() if all(one.get(name) == kind for one in others)
    }
    groups: dict[str, tuple[list[str], dict[str, Kind]]] = {}
    for name, of_recipe in kinds.items():
        own = {key: kind for key, kind in of_recipe.items() if key not in shared}
        groups.setdefault(json.dumps(own), ([], own))[0].append(name)
    found = Names(
        recipes={name: recipe.summary for name, recipe in known.items()},
        settings=shared,
        more=[group for group in groups.values() if group[1]],
    )
    return json.dumps(found._asdict(), indent=1) + "\n"


def main() -> int:
    """Write the file and return the exit code."""
    FILE.write_text(generate(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

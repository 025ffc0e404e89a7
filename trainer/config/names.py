# SPDX-License-Identifier: MIT
"""The names of recipes and settings, known without torch.

`names.json` holds what `--list`, shell completion and the first check of a command line need, so
that they answer in tenths of a second. A test compares the file with the recipes. After a recipe or
a setting has been added, renamed or removed, `python -m trainer.recipes.write_names` writes it.

A recipe or a setting that is missing from the file, but occurs in the sources, is left to the
complete check. So a file that is out of date costs time and refuses nothing that exists.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.schema.plain import suggest
from models.plugins import announced
from trainer.config.overrides import Kind, UnknownSettingError, check_words
from trainer.runtime.program import program

FILE = Path(__file__).with_name("names.json")
_SOURCES = Path(__file__).resolve().parents[2]
_PACKAGES = ("embeddings", "models", "trainer")


class Names(NamedTuple):
    """What the file holds.

    Attributes:
        recipes: each recipe's one-line description, by its name.
        settings: what each setting expects that all recipes share, by its name.
        more: the settings that only some recipes have: names of recipes, and settings.
    """

    recipes: dict[str, str]
    settings: dict[str, Kind]
    more: list[tuple[list[str], dict[str, Kind]]]

    def of(self, recipe: str) -> dict[str, Kind]:
        """Return what each setting of a recipe expects."""
        return self.settings | next((own for names, own in self.more if recipe in names), {})

    def all_settings(self) -> list[str]:
        """Return the names of the settings of any recipe, sorted."""
        return sorted(set(self.settings).union(*(own for _, own in self.more)))


@functools.cache
def names() -> Names:
    """Return what the file holds.

    Raises:
        RuntimeError: the file is missing or damaged.
    """
    try:
        return Names(**json.loads(FILE.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RuntimeError(
            f"{FILE}: expected the names of recipes and settings, cannot read them ({error}); "
            "write them with `python -m trainer.recipes.write_names`, or install the package again"
        ) from error


def check_command(recipe: str, words: Sequence[str]) -> None:
    """Refuse a recipe or a setting that certainly does not exist, without importing the recipes.

    Args:
        recipe: a recipe's name. `package.module:function` passes, and so does a tower of an
            installed package: their settings are not known here.
        words: the settings after it.

    Raises:
        ValueError: there is no such recipe or setting, or a word that is no value of its setting.
    """
    if ":" in recipe:
        return
    known = names()
    if recipe not in known.recipes:
        if recipe.partition(".")[0] in announced():  # a tower of an installed package
            return
        if not all(_occurs(part) for part in recipe.split(".")):
            raise ValueError(unknown_recipe(recipe, known.recipes))
        return
    try:
        check_words(known.of(recipe), words)
    except UnknownSettingError as error:
        field = error.name.rpartition(".")[2].lstrip("-")
        listed = any(name.rpartition(".")[2].lstrip("-") == field for name in known.all_settings())
        if listed or not _occurs(field.replace("-", "_")):
            raise


def unknown_recipe(name: str, known: Mapping[str, Any]) -> str:
    """Return what to answer to a name that is no recipe."""
    return (
        f"recipe {name!r} does not exist{suggest(name, known)}; recipes: {', '.join(known)} "
        f"({program('trainer.train')} --list describes them)"
    )


def describe_recipes() -> str:
    """Return one line a recipe: its name and the first line of its docstring."""
    known = names().recipes
    width = max(len(name) for name in known)
    return "\n".join(f"{name:<{width}}  {summary}" for name, summary in known.items())


def _occurs(word: str) -> bool:
    """Return whether the sources define a field, a function or a module of this name."""
    if not word.isidentifier():
        return False
    defined = re.compile(rf"^(?:    )?(?:def )?{word}\s*[:(=]", re.MULTILINE)
    return any(
        path.stem == word or defined.search(path.read_text(encoding="utf-8"))
        for package in _PACKAGES
        for path in (_SOURCES / package).rglob("*.py")
    )

# SPDX-License-Identifier: MIT
"""Recipes by name: TOWER.DATASET, or package.module:function.

A pair that needs settings of its own is a function `DATASET` in the module `TOWER` of this folder,
and so is any variant (`rankelastor.demo_code`). Every other pair is composed of the tower's entry
in `towers.py` and the log's in `datasets.py`. Installed packages add towers by entry points
(`models/plugins.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from models.plugins import GROUP, announced
from models.ranking import ModelConfig
from models.tower import StreamTowerConfig, TowerConfig
from trainer.config.config import TrainConfig
from trainer.config.names import unknown_recipe
from trainer.recipes.datasets import DATASETS
from trainer.recipes.towers import TOWERS, Entry, fields, stream


class Recipe(NamedTuple):
    """A named run.

    Attributes:
        summary: one line for the list of recipes.
        run: returns its configuration.
    """

    summary: str
    run: Callable[[], TrainConfig]


def recipes() -> dict[str, Recipe]:
    """Return the recipes of the repository by name, in order of towers and logs."""
    own = _functions()
    found = {}
    for tower, entry in TOWERS.items():
        names = [f"{tower}.{dataset}" for dataset in DATASETS]
        names += [name for name in own if name.startswith(f"{tower}.") and name not in names]
        found |= {name: own.get(name) or _composed(entry, name) for name in names}
    return found


def load_recipe(name: str) -> TrainConfig:
    """Return the configuration called `name`.

    A name with a colon imports what it names, so it must come from the user's command line and
    never from a file.

    Args:
        name: `specformer.globo`, or `package.module:function` from elsewhere.

    Raises:
        ValueError: no such recipe; the message proposes the closest name.
    """
    if ":" not in name:
        return _by_name(name)
    module, _, function = name.partition(":")
    try:
        if not module:
            raise ImportError("no module is named")
        config = getattr(importlib.import_module(module), function)()
        if not isinstance(config, TrainConfig):
            raise TypeError(f"it returned {type(config).__name__}, not a TrainConfig")
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"recipe {name!r}: cannot be loaded ({error}); expected package.module:function on "
            "PYTHONPATH"
        ) from error
    return dataclasses.replace(config, recipe=config.recipe or name)


def _by_name(name: str) -> TrainConfig:
    """Return the configuration of a recipe of the repository or of an installed tower."""
    known = recipes()
    tower, _, dataset = name.partition(".")
    if name in known:
        config = known[name].run()
    elif dataset in DATASETS and tower in announced():
        config = DATASETS[dataset].run(_announced_model(tower))
    else:
        raise ValueError(unknown_recipe(name, known))
    return dataclasses.replace(config, recipe=name)


def import_tower(name: str) -> type[TowerConfig]:
    """Import the class of a tower's settings that the user's command line names.

    Args:
        name: `package.module:Class`.

    Raises:
        ValueError: it cannot be imported, or is no class of a tower's settings.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--tower {name}: cannot be imported ({error}); expected package.module:Class on "
            "PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, TowerConfig)):
        raise ValueError(f"--tower {name}: expected a subclass of models.tower.TowerConfig")
    return found


def model_of(tower: TowerConfig) -> ModelConfig:
    """Return a tower with the tokenizer that its kind reads, as it suits any log."""
    return stream(tower) if isinstance(tower, StreamTowerConfig) else fields(tower)


def _announced_model(tower: str) -> ModelConfig:
    """Return the model of a tower that an installed package announces."""
    point = announced()[tower]
    try:
        found = point.load()
        is_class = isinstance(found, type) and issubclass(found, TowerConfig)
        model = model_of(found()) if is_class else found()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"tower {tower!r}: its package cannot be loaded ({error}); the entry point in group "
            f"{GROUP!r} is {point.value}"
        ) from error
    if not isinstance(model, ModelConfig):
        raise ValueError(
            f"tower {tower!r}: expected its entry point {point.value} in group {GROUP!r} to be a "
            f"subclass of TowerConfig or to return a ModelConfig, got {type(model).__name__}"
        )
    return model


def _composed(tower: Entry, name: str) -> Recipe:
    dataset = DATASETS[name.partition(".")[2]]
    return Recipe(f"{tower.title} on {dataset.title}.", lambda: dataset.run(tower.model()))


def _functions() -> dict[str, Recipe]:
    """Return the recipes that are functions, by module.function."""
    found = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name not in TOWERS:
            continue
        module = importlib.import_module(f"{__package__}.{info.name}")
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_":
                summary = (inspect.getdoc(value) or "").partition("\n")[0]
                found[f"{info.name}.{name}"] = Recipe(summary, value)
    return found

# SPDX-License-Identifier: MIT
"""A package `acme` with a tower of its own, as somebody else would write it."""

from __future__ import annotations

from pathlib import Path

TOWERS = '''
from dataclasses import dataclass

from torch import nn

from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class AcmeConfig(TowerConfig):
    """hidden: width."""

    hidden: int = 8
    warmup: float = 0.5

    def build(self, num_tokens, token_dim, /):
        return Acme(self, num_tokens * token_dim)


class Acme(Tower):
    """Two maps; the second one rests until half of the run."""

    def __init__(self, config, width):
        super().__init__()
        self.config, self.output_dim, self.warm = config, config.hidden, False
        self.first = nn.Linear(width, config.hidden)
        self.blocks = nn.ModuleList([nn.Linear(config.hidden, config.hidden)])
        self.blocks[0].measured_as = "layer"

    def set_progress(self, fraction):
        self.warm = fraction < self.config.warmup

    def describe(self, device, dtype):
        return [f"acme multiplies in {dtype} on {device.type}"]

    def forward(self, tokens_BTD):
        hidden = self.first(tokens_BTD.flatten(1)).relu()
        return hidden + (0.0 if self.warm else 1.0) * self.blocks[0](hidden)
'''
RECIPES = '''
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer.recipes import datasets
from acme.towers import AcmeConfig


def feed():
    """Acme on the generated log."""
    model = ModelConfig(tower=AcmeConfig(), tokenizer=TokenizerConfig(token_dim=8))
    return datasets.demo(model)
'''


def write_package(folder: Path) -> Path:
    """Write the package, which nothing announces; return the folder to put on PYTHONPATH."""
    package = folder / "acme"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "towers.py").write_text(TOWERS)
    (package / "recipes.py").write_text(RECIPES)
    return folder


def announce(folder: Path, value: str, name: str = "acme") -> None:
    """Write what an installed package has beside it: an entry point `name` of `value`."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[fullrank.towers]\n{name} = {value}\n")

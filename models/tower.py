# SPDX-License-Identifier: MIT
"""What a tower is, and the union of the towers a recipe can name.

A tower is single-device code that turns tokens into one representation an example. Field towers
read (B, T, D) tokens; TokenFormer reads a `Stream`. Which of the two a configuration needs is
decided by its type alone, so a new field tower is one file plus one line in `TowerConfig`.

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from models.baselines.dlrm import DLRMConfig
from models.rankelastor import RankElastorConfig
from models.specformer import SpecFormerConfig
from models.tokenformer import TokenFormerConfig

FieldTowerConfig = SpecFormerConfig | RankElastorConfig | DLRMConfig
TowerConfig = SpecFormerConfig | RankElastorConfig | TokenFormerConfig | DLRMConfig


class Tower(Protocol):
    """A module from field tokens (B, T, D) to a representation (B, output_dim)."""

    output_dim: int

    def __call__(self, tokens_BTD: Tensor) -> Tensor:
        """Return the representation (B, output_dim)."""
        ...

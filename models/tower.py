# SPDX-License-Identifier: MIT
"""What a tower is, and the union of the towers a recipe can name.

A tower is single-device code that turns tokens into one representation an example. Field towers
read (B, T, D) tokens; stream towers (TokenFormer, OneTrans, HSTU) read a `Stream`. Which of the two
a configuration needs is decided by its type alone, so a new tower is one file plus one line here.

Shapes: B examples, T tokens, V targets, D token width.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from models.baselines.dlrm import DLRMConfig
from models.baselines.hstu import HSTUConfig
from models.baselines.onetrans import OneTransConfig
from models.baselines.rankmixer import RankMixerConfig
from models.stream import Stream
from models.towers.rankelastor import RankElastorConfig
from models.towers.specformer import SpecFormerConfig
from models.towers.tokenformer import TokenFormerConfig

# build(num_tokens, token_dim)
FieldTowerConfig = SpecFormerConfig | RankElastorConfig | DLRMConfig | RankMixerConfig
# build(num_fields, token_dim); all have max_length and num_actions.
StreamTowerConfig = TokenFormerConfig | OneTransConfig | HSTUConfig
TowerConfig = (
    SpecFormerConfig
    | RankElastorConfig
    | TokenFormerConfig
    | DLRMConfig
    | RankMixerConfig
    | OneTransConfig
    | HSTUConfig
)


class Tower(Protocol):
    """A module from field tokens (B, T, D) to a representation (B, output_dim)."""

    output_dim: int

    def __call__(self, tokens_BTD: Tensor) -> Tensor:
        """Return the representation (B, output_dim)."""
        ...


class StreamTower(Protocol):
    """A module from a stream to the outputs of its targets (B, V, output_dim), or more."""

    output_dim: int

    def __call__(self, stream: Stream) -> Any:
        """Return the targets' outputs (B, V, output_dim)."""
        ...

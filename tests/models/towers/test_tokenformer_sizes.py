# SPDX-License-Identifier: MIT
"""The sizes T, S, M and L: parameters of each tower, and a forward of each on one stream."""

from __future__ import annotations

import pytest
import torch

from models.ranking import RankingModel
from models.towers.tokenformer import TokenFormerConfig
from tests.support.streams import stream_of
from trainer.recipes.load import load_recipe

SIZES = {"tiny": 32_896, "small": 262_656, "medium": 1_049_600, "large": 6_294_528}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_the_parameters_that_its_widths_and_layers_say(size: str) -> None:
    config = load_recipe(f"tokenformer.demo_{size}")
    with torch.device("meta"):
        tower = RankingModel(config.schema, config.model, torch.device("meta")).tower
    dim, depth = tower.output_dim, len(tower.layers)
    # Four maps of attention and three of the feed-forward, two norms.
    layer = 4 * dim**2 + 3 * 4 * dim**2 + 2 * dim
    assert depth * layer == SIZES[size]
    assert sum(parameter.numel() for parameter in tower.layers.parameters()) == SIZES[size]


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_a_size_scores_a_stream(size: str) -> None:
    config = load_recipe(f"tokenformer.demo_{size}")
    assert isinstance(config.model.tower, TokenFormerConfig)
    dim = config.model.tokenizer.token_dim
    tower = config.model.tower.build(3, dim).double()
    out = tower(stream_of([30, 0, 4], dim=dim, num_actions=0))
    assert out.shape == (3, 1, dim) and bool(out.isfinite().all())

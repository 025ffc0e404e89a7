# SPDX-License-Identifier: MIT
"""TokenFormer where a log needs other settings than `towers.tokenformer()`, and its sizes.

A run: python -m trainer.train tokenformer.demo_small --output DIR --data.path LOGS.
"""

from __future__ import annotations

import dataclasses

from models.ranking import ModelConfig
from models.towers.tokenformer import TokenFormerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets, towers


def demo_user_centric() -> TrainConfig:
    """TokenFormer on the generated log, learning from every past event's action as well."""
    return datasets.demo(towers.tokenformer(user_centric=True))


def demo_tiny() -> TrainConfig:
    """TokenFormer of size T on the generated log: 1F1S, width 32."""
    return _sized(32, 2, (16,))


def demo_small() -> TrainConfig:
    """TokenFormer of size S on the generated log: 2F2S, width 64."""
    return _sized(64, 2, (32, 16))


def demo_medium() -> TrainConfig:
    """TokenFormer of size M on the generated log: 2F2S, width 128."""
    return _sized(128, 4, (32, 16))


def demo_large() -> TrainConfig:
    """TokenFormer of size L on the generated log: 3F3S, width 256."""
    return _sized(256, 4, (32, 16, 8))


def globo() -> TrainConfig:
    """TokenFormer on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    return datasets.globo(towers.tokenformer(window=8))


def criteo() -> TrainConfig:
    """TokenFormer on a Criteo log: no history, one full layer, three fields beside the target."""
    config = datasets.criteo(_fields_alone(("I1", "I2", "I3"), num_layers=1))
    return _faster(config, 4e-3)


def frappe() -> TrainConfig:
    """TokenFormer on Frappe's contexts, which have no history."""
    return datasets.frappe(towers.tokenformer(window=8))


def movielens() -> TrainConfig:
    """TokenFormer on MovieLens-100K, which has no history: two fields beside the target."""
    config = datasets.movielens(_fields_alone(("gender", "occupation"), num_layers=2))
    return _faster(config, 2e-3)


def _fields_alone(stream_fields: tuple[str, ...], num_layers: int) -> ModelConfig:
    # Without a history all there is to tell stands in the target, and attention over every field
    # averages what the target has already read.
    model = towers.tokenformer(window=8, stream_fields=stream_fields, token_dim=64)
    assert isinstance(model.tower, TokenFormerConfig)
    windows = model.tower.windows[: num_layers - 1]
    tower = dataclasses.replace(model.tower, num_layers=num_layers, windows=windows)
    return dataclasses.replace(model, tower=tower)


def _faster(config: TrainConfig, learning_rate: float) -> TrainConfig:
    return dataclasses.replace(
        config, dense=dataclasses.replace(config.dense, learning_rate=learning_rate)
    )


def _sized(token_dim: int, num_heads: int, windows: tuple[int, ...]) -> TrainConfig:
    # The paper names sizes and says nothing of them: these are our own, each about four times the
    # parameters of the one before. As many full layers as sliding ones.
    tower = TokenFormerConfig(
        num_layers=2 * len(windows),
        num_full_layers=len(windows),
        windows=windows,
        num_heads=num_heads,
    )
    return datasets.demo(towers.stream(tower, token_dim))

# SPDX-License-Identifier: MIT
"""TokenFormer on each log.

A run: python -m trainer.train tokenformer.demo --output DIR --data.path LOGS.
"""

from __future__ import annotations

import dataclasses

from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from models.towers.tokenformer import TokenFormerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets


def demo() -> TrainConfig:
    """TokenFormer on the generated log, scoring each impression: two minutes on 2 cores."""
    return datasets.demo("tokenformer.demo", _model(max_length=20))


def demo_user_centric() -> TrainConfig:
    """TokenFormer on the generated log, learning from every past event's action as well."""
    return datasets.demo("tokenformer.demo_user_centric", _model(max_length=20, user_centric=True))


def demo_tiny() -> TrainConfig:
    """TokenFormer of size T on the generated log: 1F1S, width 32."""
    return _sized("tiny", 32, 2, (16,))


def demo_small() -> TrainConfig:
    """TokenFormer of size S on the generated log: 2F2S, width 64."""
    return _sized("small", 64, 2, (32, 16))


def demo_medium() -> TrainConfig:
    """TokenFormer of size M on the generated log: 2F2S, width 128."""
    return _sized("medium", 128, 4, (32, 16))


def demo_large() -> TrainConfig:
    """TokenFormer of size L on the generated log: 3F3S, width 256."""
    return _sized("large", 256, 4, (32, 16, 8))


def globo() -> TrainConfig:
    """TokenFormer on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    fields = ("environment", "deviceGroup", "os", "country", "region")
    return datasets.globo("tokenformer.globo", _model(10, stream_fields=fields))


def criteo() -> TrainConfig:
    """TokenFormer on a Criteo log: no history, one full layer, three fields beside the target."""
    config = datasets.criteo("tokenformer.criteo", _fields_alone(("I1", "I2", "I3"), num_layers=1))
    return _faster(config, 4e-3)


def frappe() -> TrainConfig:
    """TokenFormer on Frappe's contexts, which have no history."""
    return datasets.frappe("tokenformer.frappe", _model(max_length=1))


def movielens() -> TrainConfig:
    """TokenFormer on MovieLens-100K, which has no history: two fields beside the target."""
    model = _fields_alone(("gender", "occupation"), num_layers=2)
    return _faster(datasets.movielens("tokenformer.movielens", model), 2e-3)


def _fields_alone(stream_fields: tuple[str, ...], num_layers: int) -> ModelConfig:
    # Without a history all there is to tell stands in the target, and attention over every field
    # averages what the target has already read.
    model = _model(max_length=1, stream_fields=stream_fields, token_dim=64)
    assert isinstance(model.tower, TokenFormerConfig)
    windows = model.tower.windows[: num_layers - 1]
    tower = dataclasses.replace(model.tower, num_layers=num_layers, windows=windows)
    return dataclasses.replace(model, tower=tower)


def _faster(config: TrainConfig, learning_rate: float) -> TrainConfig:
    return dataclasses.replace(
        config, dense=dataclasses.replace(config.dense, learning_rate=learning_rate)
    )


def _sized(size: str, token_dim: int, num_heads: int, windows: tuple[int, ...]) -> TrainConfig:
    # The paper names sizes and says nothing of them: these are our own, each about four times the
    # parameters of the one before. As many full layers as sliding ones.
    tower = TokenFormerConfig(
        num_layers=2 * len(windows),
        num_full_layers=len(windows),
        windows=windows,
        num_heads=num_heads,
        max_length=20,
    )
    tokenizer = TokenizerConfig(token_dim=token_dim, target_fields="all")
    return datasets.demo(f"tokenformer.demo_{size}", ModelConfig(tower=tower, tokenizer=tokenizer))


def _model(
    max_length: int,
    user_centric: bool = False,
    stream_fields: tuple[str, ...] = (),
    token_dim: int = 32,
) -> ModelConfig:
    # The target token is the whole impression; 1F1S: one full layer, then one sliding.
    return ModelConfig(
        tower=TokenFormerConfig(
            mode="user_centric" if user_centric else "impression",
            num_layers=2,
            num_full_layers=1,
            windows=(8,) if max_length <= 10 else (16,),
            num_heads=2,
            expansion=2.0,
            max_length=max_length,
        ),
        tokenizer=TokenizerConfig(
            token_dim=token_dim, target_fields="all", stream_fields=stream_fields
        ),
    )

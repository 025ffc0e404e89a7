# SPDX-License-Identifier: MIT
"""HSTU on each log.

A run: python -m trainer.train hstu.demo --output DIR --data.path LOGS.
"""

from __future__ import annotations

from models.baselines.hstu import HSTUConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets


def demo() -> TrainConfig:
    """HSTU, a baseline, on the generated log: minutes on 2 cores.

    AUC .7532 on one rank (dlrm.demo: .7523; standard error .0031).
    """
    return datasets.demo("hstu.demo", _model(max_length=20))


def globo() -> TrainConfig:
    """HSTU on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    fields = ("environment", "deviceGroup", "os", "country", "region")
    return datasets.globo("hstu.globo", _model(10, stream_fields=fields))


def _model(max_length: int, stream_fields: tuple[str, ...] = ()) -> ModelConfig:
    # The target token is the whole impression, as in TokenFormer's recipes.
    return ModelConfig(
        tower=HSTUConfig(max_length=max_length),
        tokenizer=TokenizerConfig(token_dim=32, target_fields="all", stream_fields=stream_fields),
    )

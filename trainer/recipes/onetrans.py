# SPDX-License-Identifier: MIT
"""OneTrans on each log.

A run: python -m trainer.train onetrans.demo --output DIR --data.path LOGS.
"""

from __future__ import annotations

from models.baselines.onetrans import OneTransConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets


def demo() -> TrainConfig:
    """OneTrans, a baseline, on the generated log: minutes on 2 cores.

    AUC .7496 on one rank (dlrm.demo: .7523; standard error .0031).
    """
    return datasets.demo("onetrans.demo", _model(max_length=20))


def globo() -> TrainConfig:
    """OneTrans on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    fields = ("environment", "deviceGroup", "os", "country", "region")
    return datasets.globo("onetrans.globo", _model(10, stream_fields=fields))


def _model(max_length: int, stream_fields: tuple[str, ...] = ()) -> ModelConfig:
    # The target token is the whole impression, as in TokenFormer's recipes.
    return ModelConfig(
        tower=OneTransConfig(max_length=max_length),
        tokenizer=TokenizerConfig(token_dim=32, target_fields="all", stream_fields=stream_fields),
    )

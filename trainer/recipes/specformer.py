# SPDX-License-Identifier: MIT
"""SpecFormer on each log.

A run: python -m trainer.train specformer.demo --output DIR --data.path LOGS.
"""

from __future__ import annotations

import dataclasses

from embeddings.optimizer import SparseOptimizerConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from models.towers.specformer import SpecFormerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets


def demo() -> TrainConfig:
    """SpecFormer on the generated log: two minutes on 2 cores."""
    return datasets.demo("specformer.demo", _model())


def globo() -> TrainConfig:
    """SpecFormer on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    return datasets.globo("specformer.globo", _model())


def criteo() -> TrainConfig:
    """SpecFormer on a Criteo log: its 39 fields and 13 numbers in 13 tokens of several each."""
    return datasets.criteo("specformer.criteo", _model(token_dim=64, num_tokens=13))


def frappe() -> TrainConfig:
    """SpecFormer on Frappe's contexts."""
    return datasets.frappe("specformer.frappe", _model())


def movielens() -> TrainConfig:
    """SpecFormer on MovieLens-100K, with damped steps of its tables.

    It learns from larger batches, and its head drops nothing.
    """
    model = _model(token_dim=64)
    config = datasets.movielens("specformer.movielens", model)
    return dataclasses.replace(
        config,
        model=model,
        loader=dataclasses.replace(config.loader, batch_size=256),
        sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=1e-5),
    )


def _model(token_dim: int = 32, num_tokens: int = 0) -> ModelConfig:
    return ModelConfig(
        tower=SpecFormerConfig(num_layers=2, ffn_ratio=2.0, logit_scale="rsqrt_dim", warmup=0.05),
        tokenizer=TokenizerConfig(token_dim=token_dim, num_tokens=num_tokens),
    )

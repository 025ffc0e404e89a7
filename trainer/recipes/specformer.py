# SPDX-License-Identifier: MIT
"""SpecFormer where a log needs other settings than `towers.specformer()`.

A run: python -m trainer.train specformer.criteo --output DIR --data.path LOGS.
"""

from __future__ import annotations

import dataclasses

from embeddings.optimizer import SparseOptimizerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets, towers


def criteo() -> TrainConfig:
    """SpecFormer on a Criteo log: its 39 fields and 13 numbers in 13 tokens of several each."""
    return datasets.criteo(towers.specformer(token_dim=64, num_tokens=13))


def movielens() -> TrainConfig:
    """SpecFormer on MovieLens-100K, with damped steps of its tables.

    It learns from larger batches, and its head drops nothing.
    """
    model = towers.specformer(token_dim=64)
    config = datasets.movielens(model)
    return dataclasses.replace(
        config,
        model=model,
        loader=dataclasses.replace(config.loader, global_batch_size=512),
        sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=1e-5),
    )

# SPDX-License-Identifier: MIT
"""RankMixer on each log.

A run: python -m trainer.train rankmixer.demo --output DIR --data.path LOGS.

The number of tokens must divide their width: 13 slices of the fields and the three summaries of a
history make 16 tokens, without a history the slices alone do.
"""

from __future__ import annotations

from models.baselines.rankmixer import RankMixerConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets


def demo() -> TrainConfig:
    """RankMixer, a baseline, on the generated log: minutes on 2 cores.

    AUC .7526 on one rank (dlrm.demo: .7523; standard error .0031).
    """
    return datasets.demo("rankmixer.demo", _model(num_slices=13))


def globo() -> TrainConfig:
    """RankMixer on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    return datasets.globo("rankmixer.globo", _model(num_slices=13))


def criteo() -> TrainConfig:
    """RankMixer on a Criteo log."""
    return datasets.criteo("rankmixer.criteo", _model(num_slices=16))


def frappe() -> TrainConfig:
    """RankMixer on Frappe's contexts."""
    return datasets.frappe("rankmixer.frappe", _model(num_slices=16))


def movielens() -> TrainConfig:
    """RankMixer on MovieLens-100K."""
    return datasets.movielens("rankmixer.movielens", _model(num_slices=16))


def _model(num_slices: int) -> ModelConfig:
    return ModelConfig(
        tower=RankMixerConfig(),
        tokenizer=TokenizerConfig(token_dim=32, num_tokens=num_slices),
    )

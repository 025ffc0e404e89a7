# SPDX-License-Identifier: MIT
"""RankElastor on each log.

A run: python -m trainer.train rankelastor.demo --output DIR --data.path LOGS.
"""

from __future__ import annotations

from models.rankelastor import RankElastorConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer import protocols
from trainer.config import TrainConfig


def demo() -> TrainConfig:
    """RankElastor (the paper's equations) on the generated log: two minutes on 2 cores."""
    return protocols.demo("rankelastor.demo", _model())


def demo_code() -> TrainConfig:
    """RankElastor as its authors released it, on the generated log."""
    return protocols.demo("rankelastor.demo_code", _code_model())


def globo() -> TrainConfig:
    """RankElastor on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    return protocols.globo("rankelastor.globo", _model(token_dim=16, depth=1))


def globo_code() -> TrainConfig:
    """RankElastor as released, on Globo's sessions."""
    return protocols.globo("rankelastor.globo_code", _code_model(token_dim=16, depth=1))


def criteo() -> TrainConfig:
    """RankElastor on a Criteo log, 15 tokens of width 26 as in the paper."""
    return protocols.criteo("rankelastor.criteo", _model(token_dim=26, num_tokens=15))


def frappe() -> TrainConfig:
    """RankElastor on Frappe's contexts."""
    return protocols.frappe("rankelastor.frappe", _model())


def movielens() -> TrainConfig:
    """RankElastor on MovieLens-100K."""
    return protocols.movielens("rankelastor.movielens", _model())


def _model(token_dim: int = 32, num_tokens: int = 0, depth: int = 2) -> ModelConfig:
    return ModelConfig(
        tower=RankElastorConfig(variant="paper", depth=depth),
        tokenizer=TokenizerConfig(token_dim=token_dim, num_tokens=num_tokens),
    )


def _code_model(token_dim: int = 32, depth: int = 2) -> ModelConfig:
    return ModelConfig(
        tower=RankElastorConfig(variant="code", depth=depth),
        tokenizer=TokenizerConfig(token_dim=token_dim),
    )

# SPDX-License-Identifier: MIT
"""DLRM on each log.

A run: python -m trainer.train dlrm.demo --output DIR --data.path LOGS.
"""

from __future__ import annotations

import dataclasses

from embeddings.schema.lifetime import DynamicConfig
from models.baselines.dlrm import DLRMConfig
from models.heads import HeadConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets, schemas


def demo() -> TrainConfig:
    """DLRM, the baseline, on the generated log: two minutes on 2 cores."""
    return datasets.demo("dlrm.demo", _model())


def globo() -> TrainConfig:
    """DLRM on Globo's sessions, train 2017-10-01..11, test 2017-10-12."""
    return datasets.globo("dlrm.globo", _model())


def globo_dynamic() -> TrainConfig:
    """DLRM on Globo's sessions, articles in dynamic tables of a quarter of the articles there are.

    The sixteen days hold 22,706 articles; those not seen for three days leave. An article has a row
    from its first occurrence: with `min_occurrences=2` rows without an id would learn from first
    occurrences alone, and tomorrow's articles would be taken for those (embeddings/README.md).
    """
    dynamic = DynamicConfig(eviction="ttl", ttl_days=3)
    config = datasets.globo("dlrm.globo_dynamic", _model())
    return dataclasses.replace(config, schema=schemas.globo(5_676, dynamic))


def globo_hashed() -> TrainConfig:
    """DLRM on Globo's sessions, articles hashed into as many rows as there are articles."""
    config = datasets.globo("dlrm.globo_hashed", _model())
    return dataclasses.replace(config, schema=schemas.globo(22_704))


def criteo() -> TrainConfig:
    """DLRM on a Criteo log."""
    return datasets.criteo("dlrm.criteo", _small())


def frappe() -> TrainConfig:
    """DLRM on Frappe's contexts."""
    return datasets.frappe("dlrm.frappe", _model())


def movielens() -> TrainConfig:
    """DLRM on MovieLens-100K."""
    return datasets.movielens("dlrm.movielens", _small(dropout=0.2))


def _small(dropout: float = 0.0) -> ModelConfig:
    # Small logs: two layers of 64 units, the second one the head's.
    return ModelConfig(
        tower=DLRMConfig(hidden_units=(64,), dropout=dropout),
        tokenizer=TokenizerConfig(token_dim=16),
        head=HeadConfig(hidden_units=(64,)),
    )


def _model() -> ModelConfig:
    return ModelConfig(tower=DLRMConfig(), tokenizer=TokenizerConfig(token_dim=16))

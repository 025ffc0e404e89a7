# SPDX-License-Identifier: MIT
"""DLRM where a log needs other settings than `towers` gives, and on Globo with other tables.

A run: python -m trainer.train dlrm.globo_dynamic --output DIR --data.path LOGS.
"""

from __future__ import annotations

from embeddings.schema.lifetime import DynamicConfig
from models.baselines.fields.dlrm import DLRMConfig
from models.heads import HeadConfig
from models.ranking import ModelConfig
from models.tokens import TokenizerConfig
from trainer.config.config import TrainConfig
from trainer.recipes import datasets, schemas, towers


def globo_dynamic() -> TrainConfig:
    """DLRM on Globo's sessions, articles in dynamic tables of a quarter of the articles there are.

    The sixteen days hold 22,706 articles; those not seen for three days are evicted. An article has
    a row from its first occurrence. With `min_occurrences=2` rows without an id would learn from
    first occurrences alone, and tomorrow's articles would be taken for those.
    """
    dynamic = DynamicConfig(eviction="ttl", ttl_days=3)
    return datasets.globo(towers.TOWERS["dlrm"].model(), schemas.globo(5_676, dynamic))


def globo_hashed() -> TrainConfig:
    """DLRM on Globo's sessions, articles hashed into as many rows as there are articles."""
    return datasets.globo(towers.TOWERS["dlrm"].model(), schemas.globo(22_704))


def criteo() -> TrainConfig:
    """DLRM on a Criteo log."""
    return datasets.criteo(_small())


def movielens() -> TrainConfig:
    """DLRM on MovieLens-100K."""
    return datasets.movielens(_small(dropout=0.2))


def _small(dropout: float = 0.0) -> ModelConfig:
    # Small logs: two layers of 64 units, the second one the head's.
    return ModelConfig(
        tower=DLRMConfig(hidden_units=(64,), dropout=dropout),
        tokenizer=TokenizerConfig(token_dim=16),
        head=HeadConfig(hidden_units=(64,)),
    )

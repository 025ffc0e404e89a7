# SPDX-License-Identifier: MIT
"""RankMixer on logs without a history, where 16 slices of the fields are all its tokens.

A run: python -m trainer.train rankmixer.criteo --output DIR --data.path LOGS.
"""

from __future__ import annotations

from trainer.config.config import TrainConfig
from trainer.recipes import datasets, towers


def criteo() -> TrainConfig:
    """RankMixer (baseline) on a Criteo log."""
    return datasets.criteo(towers.rankmixer(num_tokens=16))


def frappe() -> TrainConfig:
    """RankMixer (baseline) on Frappe's contexts."""
    return datasets.frappe(towers.rankmixer(num_tokens=16))


def movielens() -> TrainConfig:
    """RankMixer (baseline) on MovieLens-100K."""
    return datasets.movielens(towers.rankmixer(num_tokens=16))

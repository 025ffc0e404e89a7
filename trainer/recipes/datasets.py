# SPDX-License-Identifier: MIT
"""How each log is trained on: schema, days, batch size, optimizers - the same for every tower.

One protocol a log, because a change of optimizer can move a model further than a change of tower
does (papers' comparisons suffer from it); a recipe adds only the tower and its tokenizer.
"""

from __future__ import annotations

import dataclasses

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.schema import Schema
from models.ranking import ModelConfig
from trainer.config.config import DataConfig, TrainConfig
from trainer.data.loader import LoaderConfig
from trainer.distributed.optimizer import DenseOptimizerConfig, ScheduleConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.recipes import schemas
from trainer.telemetry.telemetry import TelemetryConfig


def demo(recipe: str, model: ModelConfig) -> TrainConfig:
    """Return a run on the generated log: three days to train on, the fourth to test."""
    return _config(
        recipe,
        model,
        schemas.demo(),
        DataConfig(train_days="2026-01-01:2026-01-03", test_days="2026-01-04"),
        loader=LoaderConfig(batch_size=256, order="time"),
        sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=1e-7),
        dense_learning_rate=2e-3,
    )


def globo(recipe: str, model: ModelConfig) -> TrainConfig:
    """Return a run on Globo's sessions: eleven days to train on, in order, the twelfth to test.

    The tables' eps is large on purpose: it damps the first steps of rows seen once or twice. Users
    learn slowly: most have one row, and a tower that reads an untouched row too strongly mistakes
    all rows of tomorrow's new users for their first ones.
    """
    return _config(
        recipe,
        model,
        schemas.globo(),
        DataConfig(train_days="2017-10-01:2017-10-11", test_days="2017-10-12"),
        loader=LoaderConfig(batch_size=1024, order="time"),
        sparse=SparseOptimizerConfig(
            kind="rowwise_adagrad",
            learning_rate=0.02,
            eps=3e-5,
            table_learning_rates={"user": 0.01},
        ),
    )


def criteo(recipe: str, model: ModelConfig) -> TrainConfig:
    """Return a run on a Criteo log without days: the first three quarters train, the rest tests.

    Rows are read as they lie, the newest last. Clicks are rare, so heads start at their share.
    """
    head = dataclasses.replace(model.head, prior=(0.03,))
    return _config(
        recipe,
        dataclasses.replace(model, head=head),
        schemas.criteo(),
        DataConfig(train_rows="0:0.75", test_rows="0.75:1"),
        loader=LoaderConfig(batch_size=256, order="none"),
        sparse=SparseOptimizerConfig(kind="adagrad", learning_rate=0.05),
    )


def frappe(recipe: str, model: ModelConfig) -> TrainConfig:
    """Return a run on Frappe: data.path is the training file, data.test_path the test file.

    Apps and users come back often, so their rows' first steps are not damped (a small eps).
    """
    return _config(
        recipe,
        model,
        schemas.frappe(),
        DataConfig(),
        loader=LoaderConfig(batch_size=128, order="time"),
        sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
        epochs=3,
    )


def movielens(recipe: str, model: ModelConfig) -> TrainConfig:
    """Return a run on MovieLens-100K: the first 80 % of the ratings train, the rest test.

    Most users of the test rows are new, so the head drops units: what is known of the films and of
    groups of users has to carry a prediction alone.
    """
    head = dataclasses.replace(model.head, dropout=0.2)
    return _config(
        recipe,
        dataclasses.replace(model, head=head),
        schemas.movielens(),
        DataConfig(train_rows="0:0.8", test_rows="0.8:1"),
        loader=LoaderConfig(batch_size=128, order="time"),
        sparse=SparseOptimizerConfig(kind="adagrad", learning_rate=0.02),
    )


def _config(
    recipe: str,
    model: ModelConfig,
    schema: Schema,
    data: DataConfig,
    *,
    loader: LoaderConfig,
    sparse: SparseOptimizerConfig,
    dense_learning_rate: float = 1e-3,
    epochs: int = 1,
) -> TrainConfig:
    """Return a configuration with what all protocols share.

    The tables' rate does not decay, the dense one falls to zero.
    """
    return TrainConfig(
        recipe=recipe,
        schema=schema,
        data=data,
        loader=loader,
        model=model,
        dense=DenseOptimizerConfig(
            learning_rate=dense_learning_rate,
            schedule=ScheduleConfig(warmup_steps=10, decay="linear", scale_sparse=False),
        ),
        sparse=sparse,
        precision=PrecisionConfig(max_norm=1.0),
        telemetry=TelemetryConfig(interval_steps=20),
        epochs=epochs,
    )

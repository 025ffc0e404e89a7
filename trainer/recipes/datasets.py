# SPDX-License-Identifier: MIT
"""How each log is trained on: schema, days, batch size and optimizers, the same for every tower.

`datasets.globo(towers.specformer())` is the recipe `specformer.globo`. A log has one protocol,
because a change of optimizer can move a model further than a change of tower does; papers'
comparisons suffer from it. `DATASETS` has one line a log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.schema import Schema
from models.ranking import ModelConfig
from models.tower import StreamTowerConfig
from trainer.config.config import DataConfig, TrainConfig
from trainer.data.loader import LoaderConfig
from trainer.distributed.optimizer import DenseOptimizerConfig, ScheduleConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.recipes import schemas
from trainer.telemetry.telemetry import TelemetryConfig

_GLOBO_STREAM = ("environment", "deviceGroup", "os", "country", "region")


def demo(model: ModelConfig) -> TrainConfig:
    """Return a run on the generated log: three days to train on, the fourth to test."""
    return dataclasses.replace(
        _protocol(schemas.demo(), model, learning_rate=2e-3),
        data=DataConfig(train_days="2026-01-01:2026-01-03", test_days="2026-01-04"),
        loader=LoaderConfig(batch_size=0, global_batch_size=512, order="time"),
        sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=1e-7),
    )


def globo(model: ModelConfig, schema: Schema | None = None) -> TrainConfig:
    """Return a run on Globo's sessions: eleven days to train on, in order, the twelfth to test.

    The tables' eps is large on purpose: it damps the first steps of rows seen once or twice. Users
    learn slowly: most have one row, and a tower that reads an untouched row too strongly mistakes
    all rows of tomorrow's new users for their first ones.

    Args:
        model: tower, tokenizer, head.
        schema: another schema of the same log.
    """
    if isinstance(model.tower, StreamTowerConfig) and not model.tokenizer.stream_fields:
        tokenizer = dataclasses.replace(model.tokenizer, stream_fields=_GLOBO_STREAM)
        model = dataclasses.replace(model, tokenizer=tokenizer)
    return dataclasses.replace(
        _protocol(schema or schemas.globo(), model),
        data=DataConfig(train_days="2017-10-01:2017-10-11", test_days="2017-10-12"),
        loader=LoaderConfig(batch_size=0, global_batch_size=2048, order="time"),
        sparse=SparseOptimizerConfig(
            kind="rowwise_adagrad",
            learning_rate=0.02,
            eps=3e-5,
            table_learning_rates={"user": 0.01},
        ),
    )


def criteo(model: ModelConfig) -> TrainConfig:
    """Return a run on a Criteo log without days: the first three quarters train, the rest tests.

    Rows are read as they lie, the newest last. Clicks are rare, so heads start at their share.
    """
    head = dataclasses.replace(model.head, prior=(0.03,))
    return dataclasses.replace(
        _protocol(schemas.criteo(), dataclasses.replace(model, head=head)),
        data=DataConfig(train_rows="0:0.75", test_rows="0.75:1"),
        loader=LoaderConfig(batch_size=0, global_batch_size=512, order="none"),
        sparse=SparseOptimizerConfig(kind="adagrad", learning_rate=0.05),
    )


def frappe(model: ModelConfig) -> TrainConfig:
    """Return a run on Frappe: data.path is the training file, data.test_path the test file.

    Apps and users come back often, so their rows' first steps are not damped (a small eps).
    """
    return dataclasses.replace(
        _protocol(schemas.frappe(), model),
        loader=LoaderConfig(batch_size=0, global_batch_size=256, order="time"),
        sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
        epochs=3,
    )


def movielens(model: ModelConfig) -> TrainConfig:
    """Return a run on MovieLens-100K: the first 80 % of the ratings train, the rest test.

    Most users of the test rows are new, so the head drops units: what is known of the films and of
    groups of users has to carry a prediction alone.
    """
    head = dataclasses.replace(model.head, dropout=0.2)
    return dataclasses.replace(
        _protocol(schemas.movielens(), dataclasses.replace(model, head=head)),
        data=DataConfig(train_rows="0:0.8", test_rows="0.8:1"),
        loader=LoaderConfig(batch_size=0, global_batch_size=256, order="time"),
        sparse=SparseOptimizerConfig(kind="adagrad", learning_rate=0.02),
    )


class Entry(NamedTuple):
    """A log in recipes.

    Attributes:
        title: its name in the list of recipes.
        run: returns the run of a model on it.
    """

    title: str
    run: Callable[[ModelConfig], TrainConfig]


# One line a log.
DATASETS = {
    "demo": Entry("the generated log: minutes on 2 cores", demo),
    "globo": Entry("Globo's sessions, train 2017-10-01..11, test 2017-10-12", globo),
    "criteo": Entry("a Criteo log", criteo),
    "frappe": Entry("Frappe's contexts", frappe),
    "movielens": Entry("MovieLens-100K", movielens),
}


def _protocol(schema: Schema, model: ModelConfig, learning_rate: float = 1e-3) -> TrainConfig:
    """Return a configuration with what all logs share.

    The tables' rate does not decay, the dense one falls to zero. A stream is as long as the longest
    history of the log.
    """
    if isinstance(model.tower, StreamTowerConfig):
        lengths = (one.max_length for one in schema.sparse if one.kind == "sequence")
        tower = dataclasses.replace(model.tower, max_length=max(lengths, default=1))
        model = dataclasses.replace(model, tower=tower)
    return TrainConfig(
        recipe="",
        schema=schema,
        model=model,
        dense=DenseOptimizerConfig(
            learning_rate=learning_rate,
            schedule=ScheduleConfig(warmup_steps=10, decay="linear", scale_sparse=False),
        ),
        precision=PrecisionConfig(max_norm=1.0),
        telemetry=TelemetryConfig(interval_steps=20),
    )

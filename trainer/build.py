# SPDX-License-Identifier: MIT
"""Build the loaders and the distributed model of this rank from a configuration.

Training, evaluation and comparison all build them here, so they cannot differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from embeddings.schema.schema import Schema
from models.fields import DenseExpansion
from models.ranking import RankingModel
from models.tower import StreamTowerConfig
from trainer.config.config import TrainConfig
from trainer.data.discovery import printable
from trainer.data.files import (
    LogFile,
    check_families,
    contents,
    differences,
    discover,
    keep_rows,
)
from trainer.data.loader import Loader
from trainer.data.splits import check_overlap, parse_days, parse_rows
from trainer.data.transforms import dense_moments
from trainer.distributed.compile import compile_tower
from trainer.distributed.dense import Dense
from trainer.distributed.parallelize import Parallel, build_dense, parallelize
from trainer.distributed.precision import Precision
from trainer.distributed.train_pipeline import Pipeline
from trainer.runtime.runtime import Runtime

# Of training, validation (if there are such rows) and test rows.
Loaders = tuple[Loader, Loader | None, Loader]


class Training(NamedTuple):
    """A distributed model with its dense optimizer, its precision and its step pipeline."""

    parallel: Parallel
    dense: Dense
    precision: Precision
    pipeline: Pipeline


def open_loader(config: TrainConfig, runtime: Runtime, train: bool) -> Loader:
    """Return this rank's loader of the training or the test rows.

    Args:
        config: the run's configuration.
        runtime: this process among the ranks.
        train: whether to read the training rows; otherwise the test rows.

    Raises:
        ValueError: there is no path or no row, a file does not fit the schema, or ranks see
            different logs.
    """
    data = config.data
    if not data.path:
        raise ValueError(
            "data.path: expected the log's folder or file, got none; pass --data.path PATH"
        )
    name = "train" if train else "test"
    path = data.path if train else data.test_path or data.path
    loader = config.loader if train else dataclasses.replace(config.loader, order="none")
    days, shares = getattr(data, f"{name}_days"), parse_rows(getattr(data, f"{name}_rows"))
    files, problem = (), ""
    epochs: Sequence[Sequence[LogFile]] = ()
    try:
        files = discover(path, parse_days(days), config.schema)
        files = files if shares == (0.0, 1.0) else keep_rows(files, shares)
        if data.progressive:
            later = discover(path, parse_days(data.test_days), config.schema) if train else ()
            epochs = progressive_epochs(files, later, train)
            files = tuple(file for epoch in epochs for file in epoch)
    except ValueError as error:
        problem = str(error)
        if runtime.world_size == 1:
            raise
    if runtime.world_size > 1:
        _check_ranks(files, problem, f"{printable(path)}, {name} rows", runtime)
    return loader.build(
        files,
        config.schema,
        rank=runtime.rank,
        world_size=runtime.world_size,
        seed=config.runtime.seed,
        epochs=epochs,
    )


def progressive_epochs(
    files: Sequence[LogFile], later: Sequence[LogFile], train: bool
) -> Sequence[Sequence[LogFile]]:
    """Return the files of each epoch of test-then-train.

    Args:
        files: of the days that are trained first, or of the test days.
        later: of the test days, for training.
        train: whether training is meant: the days before, then each test day but the last.
            Otherwise each test day is an epoch.

    Raises:
        ValueError: there are no days, or a test day is not after the days before it.
    """
    # A day without rows has no step, so nothing would come after it.
    tested = [file for file in (later if train else files) if file.num_rows]
    days = sorted({file.day for file in tested})
    if "" in days or not days:
        raise ValueError("data.progressive: expected a log with days, dt=YYYY-MM-DD/")
    last = max((file.day for file in files), default="") if train else ""
    if last >= days[0]:
        raise ValueError(
            f"data.progressive: expected test days after the training days, got {days[0]} and "
            f"training until {last}"
        )
    by_day = [[file for file in tested if file.day == day] for day in days]
    return [files, *by_day[:-1]] if train else by_day


def open_validation_loader(config: TrainConfig, runtime: Runtime) -> Loader | None:
    """Return this rank's loader of the validation rows; None if there are none.

    Raises:
        ValueError: as `open_loader`.
    """
    data = config.data
    if not data.validates:
        return None
    rows = dataclasses.replace(
        data, test_path="", test_days=data.validation_days, test_rows=data.validation_rows
    )
    return open_loader(dataclasses.replace(config, data=rows), runtime, train=False)


def open_loaders(config: TrainConfig, runtime: Runtime) -> Loaders:
    """Return this rank's loaders of training, validation (if any) and test rows, which differ.

    Raises:
        ValueError: as `open_loader`, or rows are in two of them, or ids have two meanings.
    """
    train = open_loader(config, runtime, train=True)
    validation = open_validation_loader(config, runtime)
    test = open_loader(config, runtime, train=False)
    if not config.data.allow_overlap:
        check_overlap(train.files_of(0), test.files)
        if validation is not None:
            check_overlap(train.files_of(0), validation.files, ("train", "validation"))
            check_overlap(validation.files, test.files, ("validation", "test"))
    check_families((*train.files, *(validation.files if validation else ()), *test.files))
    return train, validation, test


def _check_ranks(files: Sequence[LogFile], problem: str, what: str, runtime: Runtime) -> None:
    """Check that all ranks see the same log. Collective.

    Each rank computes its share of the rows from its own file listing, so the listings must agree.

    Args:
        files: the files that this rank found.
        problem: why this rank could not read the log; empty if it could.
        what: the path and the rows, for the message.
        runtime: this process among the ranks.

    Raises:
        ValueError: a rank has a problem or sees another log; raised on all ranks.
    """
    names = contents(files)
    seen = hashlib.sha256(repr(list(names.items())).encode()).hexdigest()
    found: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(found, (problem, seen), group=runtime.group)
    problems = {text: rank for rank, (text, _) in reversed([*enumerate(found)]) if text}
    if len(problems) == 1 and all(text for text, _ in found):
        raise ValueError(next(iter(problems)))
    if problems:
        text, rank = next(iter(problems.items()))
        raise ValueError(f"rank {rank}: {text}; other ranks see another log: mount it on all nodes")
    if len({one for _, one in found}) == 1:
        return
    logs: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(logs, names, group=runtime.group)
    other = next(rank for rank, one in enumerate(logs) if list(one.items()) != [*logs[0].items()])
    raise ValueError(
        f"{what}: rank {other} sees another log than rank 0 ({differences(logs[0], logs[other])}); "
        "all ranks read one log: give every node the same files under the same path"
    )


def settle(config: TrainConfig, runtime: Runtime) -> TrainConfig:
    """Return a configuration in which this machine has decided what was `auto`. Collective.

    So a run's record names its number format, and a checkpoint is served in the one it learnt in.
    """
    precision = config.precision.settled(runtime)
    return dataclasses.replace(config, precision=precision)


def build_training(config: TrainConfig, runtime: Runtime) -> Training:
    """Build the model identically on all ranks, shard it and create its optimizers. Collective."""
    config = settle(config, runtime)
    model = RankingModel(config.schema, config.model, torch.device("meta"), config.runtime.seed)
    batch_size = config.loader.on(runtime.world_size).batch_size
    parallel = parallelize(model, config.parallel, config.sparse, runtime, batch_size)
    if config.parallel.compile:
        ragged = isinstance(config.model.tower, StreamTowerConfig)
        compile_tower(parallel.model.get_submodule("tower"), ragged)
    optimizer = config.dense.build(parallel.dense_parameters)
    dense = build_dense(parallel, optimizer, runtime, config.precision.dtype, batch_size)
    precision = config.precision.build(
        parallel.model, dense, config.sparse.zero_is_no_update, parallel.exchange
    )
    return Training(parallel, dense, precision, Pipeline(parallel, precision, runtime.device))


def standardize(
    model: nn.Module, files: Sequence[LogFile], schema: Schema, runtime: Runtime
) -> None:
    """Set the means and deviations of the dense columns that the schema standardises. Collective.

    Rank 0 computes them from the first training rows and broadcasts them, so they do not depend on
    the number of ranks or workers. They are buffers of the model, so checkpoints keep them. A run
    that resumes, or inherits dense weights, keeps the moments that its weights were trained with.

    Args:
        model: the model whose `DenseExpansion` modules are filled.
        files: the training files.
        schema: names the dense columns and which of them are standardised.
        runtime: this process among the ranks.

    Raises:
        ValueError: a file cannot be read; raised on the first rank.
    """
    if not any(feature.standardize for feature in schema.dense):
        return
    moments = torch.zeros(2, len(schema.dense), dtype=torch.float64)
    if runtime.is_first:
        moments = dense_moments(files, schema)
    moments = moments.to(runtime.device)
    dist.broadcast(moments, group=runtime.group, group_src=0)
    mean, std = moments.float()
    for module in model.modules():
        if isinstance(module, DenseExpansion):
            module.standardize(mean, std)

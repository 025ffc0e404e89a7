# SPDX-License-Identifier: MIT
"""Train the tiny model for some steps on this rank, and say what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.schema import Schema
from embeddings.sharding.sharding import ShardingConfig
from models.batch import Batch
from tests.support.tiny import SCHEMA, TinyRanker, make_batch
from trainer.distributed.dense import Replicated
from trainer.distributed.loss_scale import Step
from trainer.distributed.optimizer import DenseOptimizerConfig
from trainer.distributed.parallelize import Parallel, ParallelConfig, parallelize
from trainer.distributed.precision import Precision, PrecisionConfig
from trainer.distributed.train_pipeline import Pipeline
from trainer.runtime.runtime import Runtime

Shards = dict[tuple[str, int, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train: `global_batch` examples a step, divided evenly among the ranks."""

    num_steps: int = 4
    global_batch: int = 16
    pipelined: bool = True
    sparse: SparseOptimizerConfig = field(
        default_factory=lambda: SparseOptimizerConfig(learning_rate=0.1)
    )
    dense: DenseOptimizerConfig = field(
        default_factory=lambda: DenseOptimizerConfig(learning_rate=0.01)
    )
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    schema: Schema = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A rank's view after training. Tables are (name, first row, first column) -> shard."""

    steps: list[Step]
    start: Shards
    tables: Shards
    states: Shards
    dense: dict[str, Tensor]
    num_pipelined: int
    num_sharded: int

    @property
    def losses(self) -> list[float]:
        """The global loss of each step."""
        return [step.loss for step in self.steps]


class Session:
    """A parallel tiny model with optimizer and precision, to be stepped by hand."""

    def __init__(self, runtime: Runtime, recipe: Recipe) -> None:
        torch.manual_seed(0)
        self.runtime, self.recipe = runtime, recipe
        self.parallel: Parallel = parallelize(
            TinyRanker(torch.device("meta"), recipe.schema),
            ParallelConfig(sharding=recipe.sharding, find_unused_parameters=True),
            recipe.sparse,
            runtime,
            batch_size=16,
        )
        self.optimizer = recipe.dense.build(self.parallel.dense_parameters)
        self.replicas = Replicated(self.parallel.dense_parameters, self.optimizer, runtime.group)
        self.precision: Precision = recipe.precision.build(
            self.parallel.model,
            self.replicas,
            recipe.sparse.zero_is_no_update,
            self.parallel.exchange,
        )

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the global batch of `step`."""
        size, rank = self.recipe.global_batch // self.runtime.world_size, self.runtime.rank
        return make_batch(self.recipe.global_batch, step, rank * size, (rank + 1) * size)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's batches."""
        return (self.batch(step) for step in range(self.recipe.num_steps))

    def backward(self, batch: Batch) -> None:
        """Run forward and phase 1."""
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss, output = self.parallel.module(batch)
        self.precision.backward(loss, output.weight_sum)

    def tables(self) -> Shards:
        """Return copies of this rank's shards."""
        layer = self.parallel.model.get_submodule("embeddings")
        assert isinstance(layer, EmbeddingLayer)
        return _copy(layer.table_weights())

    def states(self) -> Shards:
        """Return copies of the fused optimizer's states on this rank."""
        state: dict[str, Any] = self.parallel.fused_optimizer.state_dict()["state"]
        return _copy({key: value for parts in state.values() for key, value in parts.items()})

    def dense(self) -> dict[str, Tensor]:
        """Return copies of the dense weights and of their optimizer's states."""
        found = {k: p.detach().clone() for k, p in self.parallel.dense_parameters.items()}
        for name, parameter in self.parallel.dense_parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = value.detach().clone()
        return found


def train(runtime: Runtime, recipe: Recipe) -> Outcome:
    """Train from scratch."""
    session = Session(runtime, recipe)
    start, steps = session.tables(), []
    pipeline = Pipeline(session.parallel, session.precision, runtime.device)
    batches = session.batches()
    if recipe.pipelined:
        for _ in range(recipe.num_steps):
            pipeline.progress(batches)
            steps.append(pipeline.last_step)
    else:
        for batch in batches:
            session.backward(batch)
            steps.append(session.precision.apply())
    return Outcome(
        steps=steps,
        start=start,
        tables=session.tables(),
        states=session.states(),
        dense=session.dense(),
        num_pipelined=pipeline.num_pipelined,
        num_sharded=len(session.parallel.sharded_modules),
    )


def whole_tables(outcomes: list[Outcome], start: bool = False) -> dict[str, Tensor]:
    """Put the shards of all ranks together."""
    shards: Shards = {}
    for outcome in outcomes:
        shards.update(outcome.start if start else outcome.tables)
    tables: dict[str, Tensor] = {}
    for name in sorted({key[0] for key in shards}):
        parts = {key[1:]: shard for key, shard in shards.items() if key[0] == name}
        rows = max(row + part.shape[0] for (row, _), part in parts.items())
        columns = max(column + part.shape[1] for (_, column), part in parts.items())
        tables[name] = torch.full((rows, columns), float("nan"))
        for (row, column), part in parts.items():
            tables[name][row : row + part.shape[0], column : column + part.shape[1]] = part
    return tables


def _copy(tensors: dict[str, Any]) -> Shards:
    return {
        (name, row, column): shard.detach().clone()
        for name, tensor in tensors.items()
        for shard, row, column in local_shards(tensor)
    }


def train_whole(recipe: Recipe) -> TinyRanker:
    """Train the same model without shards, ranks or phases, and return it."""
    torch.manual_seed(0)
    model = TinyRanker(schema=recipe.schema)
    fuse_optimizer(model.embeddings, recipe.sparse)
    rest = {f"rest.{name}": p for name, p in model.rest.named_parameters()}
    optimizer = recipe.dense.build(rest)
    for step in range(recipe.num_steps):
        optimizer.zero_grad()
        model(make_batch(recipe.global_batch, step))[0].backward()
        optimizer.step()
    return model

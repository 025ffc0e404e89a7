# SPDX-License-Identifier: MIT
"""Dynamic tables on several ranks: the same ids, rows, vectors and states as on one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embeddings.collection import EmbeddingLayer
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.lifetime import DynamicConfig
from embeddings.sharding.counters import Counters
from embeddings.sharding.sharding import ShardingConfig
from tests.support.dynamic import Parts, parts_of, schema_of, whole
from tests.support.processes import Processes
from tests.support.tables import shard_tables
from tests.support.tiny import make_batch
from tests.support.training import Recipe, Session, train_whole
from trainer.distributed.train_pipeline import Pipeline
from trainer.runtime.runtime import Runtime

# Small enough that ids have to leave.
DYNAMIC = {
    "item": DynamicConfig(eviction="lru", initial_rows=20),
    "user": DynamicConfig(min_occurrences=2, eviction="lfu"),
    "action": DynamicConfig(admission="probability", probability=0.5),
}
ROWS = {"item": 40, "user": 36, "action": 64}


RECIPE = Recipe(num_steps=6, schema=schema_of(DYNAMIC, ROWS))


def train(runtime: Runtime, recipe: Recipe) -> tuple[Parts, list[float], int]:
    """Train in a pipeline and return this rank's tables, the losses, and what was pipelined."""
    session = Session(runtime, recipe)
    pipeline = Pipeline(session.parallel, session.precision, runtime.device)
    batches, losses = session.batches(), []
    for _ in range(recipe.num_steps):
        pipeline.progress(batches)
        assert pipeline.last_step is not None
        losses.append(pipeline.last_step.loss)
    return parts_of(session.parallel.model), losses, pipeline.num_pipelined


def assert_same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> None:
    """Check ids exactly and numbers up to rounding."""
    assert a.keys() == b.keys()
    for name in a:
        for key, value in a[name].items():
            other = b[name][key].reshape(value.shape)
            if value.dtype.is_floating_point:
                torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")
            else:
                assert torch.equal(value, other), f"{name} {key}"


@pytest.mark.dist
def test_two_ranks_in_a_pipeline_hold_what_one_layer_without_ranks_holds(
    processes: Processes,
) -> None:
    expected = whole([parts_of(train_whole(RECIPE))])
    assert all(table["totals"][4] > 0 for table in expected.values())
    assert expected["item"]["totals"][5] > 0  # ids had to leave
    for world_size, dedup in ((1, True), (2, False)):
        recipe = dataclasses.replace(RECIPE, sharding=ShardingConfig(dedup=dedup))
        results = processes.run(train, recipe, world_size=world_size)
        assert_same(whole([parts for parts, _, _ in results]), expected)
        # bags of tags, and dynamic tables of two widths
        assert all(pipelined == 3 for _, _, pipelined in results)


STEPS, EXAMPLES = 5, 48


def with_and_without_dedup(runtime: Runtime) -> list[tuple[Parts, list[Tensor], dict[str, int]]]:
    """Train tables alone; return what is held, every step's vectors, and the last one's counts.

    Gradients are whole numbers, so that their sums are exact in any order.
    """
    found = []
    size, rank = EXAMPLES // runtime.world_size, runtime.rank
    for dedup in (False, True):
        layer = EmbeddingLayer(RECIPE.schema, torch.device("meta"), seed=3)
        fuse_optimizer(layer, SparseOptimizerConfig(learning_rate=0.1))
        model = nn.ModuleDict({"embeddings": layer})
        sharded = shard_tables(model, ShardingConfig(dedup=dedup), runtime, size)
        tables: nn.Module = sharded.module.get_submodule("embeddings")
        vectors: list[Tensor] = []

        def step(number: int, tables: Any = tables, vectors: list[Tensor] = vectors) -> None:
            features = make_batch(EXAMPLES, number, rank * size, (rank + 1) * size).sparse
            read = tables(features)
            vectors += [read.pooled, *(rows.values() for rows in read.sequences.values())]
            # TorchRec divides the gradients of tables by the number of ranks.
            loss = torch.stack([part.sum() for part in vectors[-3:]]).sum()
            (runtime.world_size * loss).backward()

        for number in range(STEPS - 1):
            step(number)
        with Counters(tables) as counts:
            step(STEPS - 1)
        found.append((parts_of(tables), [one.detach() for one in vectors], counts.to_dict()))
    return found


@pytest.mark.dist
def test_ids_that_travel_once_are_counted_admitted_and_trained_as_often_as_they_occur(
    processes: Processes,
) -> None:
    held = []
    for world_size in (1, 2, 3):
        ranks = processes.run(with_and_without_dedup, world_size=world_size)
        (plain, dedup) = (whole([rank[i][0] for rank in ranks]) for i in (0, 1))
        for name in plain:
            for key, value in plain[name].items():
                assert torch.equal(dedup[name][key], value), (world_size, name, key)
        for before, after in ranks:
            assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
            assert before[2]["ids_in"] == before[2]["ids_sent"] == after[2]["ids_in"]
            assert after[2]["ids_sent"] < before[2]["ids_sent"]
            assert after[2]["bytes_sent"] < before[2]["bytes_sent"] or world_size == 1
        held.append(dedup)
    keys = ("ids", "seen", "hits", "totals")
    for others in held[1:]:
        for name, table in held[0].items():
            assert all(torch.equal(others[name][key], table[key]) for key in keys)
    assert all(table["totals"][4] > 0 for table in held[0].values())
    assert held[0]["item"]["totals"][5] > 0 and held[0]["user"]["totals"][3] > 0

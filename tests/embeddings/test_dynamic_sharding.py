# SPDX-License-Identifier: MIT
"""Dynamic tables on several ranks: the same ids, rows, vectors and states as on one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from embeddings.lifetime import DynamicConfig
from tests.support.dynamic import Parts, parts_of, schema_of, whole
from tests.support.processes import Processes
from tests.support.training import Recipe, Session, train_whole
from trainer.pipeline import Pipeline
from trainer.runtime import Runtime

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
    for world_size in (1, 2):
        results = processes.run(train, RECIPE, world_size=world_size)
        assert_same(whole([parts for parts, _, _ in results]), expected)
        # bags of tags, and dynamic tables of two widths
        assert all(pipelined == 3 for _, _, pipelined in results)

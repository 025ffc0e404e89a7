# SPDX-License-Identifier: MIT
"""AdamW's groups, and the schedule of dense weights and tables."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from embeddings.optimizer import SparseOptimizerConfig
from tests.support.processes import Processes
from tests.support.training import Recipe, Session
from trainer.distributed.optimizer import (
    DenseOptimizerConfig,
    ScheduleConfig,
    learning_rates,
    optimizer_tensors,
)
from trainer.runtime.runtime import Runtime


def test_decay_falls_on_matrices_only() -> None:
    layer = nn.Linear(3, 2)
    nn.init.ones_(layer.bias)
    nn.init.ones_(layer.weight)
    optimizer = DenseOptimizerConfig(learning_rate=0.1, weight_decay=0.5).build(
        dict(layer.named_parameters())
    )
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 3), 0.95))
    assert torch.equal(layer.bias.detach(), torch.ones(2))


def test_frozen_weights_are_not_optimized() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    optimizer = DenseOptimizerConfig().build(dict(layer.named_parameters()))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_warmup_rises_by_a_line_to_the_full_rate() -> None:
    schedule = ScheduleConfig(warmup_steps=4)
    factors = [schedule.factor(step, 10) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_decay_starts_full_and_ends_at_the_final_factor_on_the_last_step(decay: Any) -> None:
    schedule = ScheduleConfig(warmup_steps=2, decay=decay, final_factor=0.1)
    factors = [schedule.factor(step, 13) for step in range(13)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[-1] == pytest.approx(0.1)
    assert factors[7] == pytest.approx(0.55)
    assert all(a > b for a, b in itertools.pairwise(factors[2:]))
    assert schedule.factor(99, 13) == pytest.approx(0.1)


def test_a_run_of_one_step_is_not_divided_by_zero() -> None:
    assert ScheduleConfig(decay="linear").factor(0, 1) == 1.0


def _rates(runtime: Runtime, scale_sparse: bool) -> Any:
    """Take a step with SGD at three factors and return how far a row moved for its gradient."""
    schedule_config = ScheduleConfig(warmup_steps=2, scale_sparse=scale_sparse)
    dense = DenseOptimizerConfig(schedule=schedule_config)
    sparse = SparseOptimizerConfig(kind="sgd", learning_rate=2.0)
    session = Session(runtime, Recipe(dense=dense, sparse=sparse))
    schedule = schedule_config.build(3, session.optimizer, session.parallel.fused_optimizer)
    moved, factors = [], []
    for step in range(3):
        factors.append(schedule.apply(step))
        session.backward(session.batch(0))
        before = session.tables()
        gradient = session.precision._leaves[-1].grad
        assert gradient is not None
        size = gradient[:, 16:24].norm().item()
        session.precision.apply()
        change = session.tables()["user", 0, 0] - before["user", 0, 0]
        moved.append(change.norm().item() / size)
    return factors, moved, learning_rates(session.optimizer)


@pytest.mark.dist
@pytest.mark.parametrize("scale_sparse", [True, False])
def test_the_schedule_reaches_the_tables_if_asked(processes: Processes, scale_sparse: bool) -> None:
    ((factors, moved, rates),) = processes.run(_rates, scale_sparse, world_size=1)
    assert factors == [0.5, 1.0, 1.0]
    assert rates[0] == 1e-3
    expected = 0.5 if scale_sparse else 1.0
    assert moved[0] / moved[1] == pytest.approx(expected, rel=0.05)
    assert moved[1] / moved[2] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"decay": "step"}, "decay"),
        ({"decay": "linear", "final_factor": 2.0}, "final_factor"),
        ({"final_factor": 0.5}, "no effect on decay 'constant'"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"learning_rate": 0.0}, {"eps": 0.0}, {"beta1": 1.0}, {"weight_decay": -1.0}]
)
def test_an_optimizer_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        dataclasses.replace(DenseOptimizerConfig(), **settings)


def test_an_adam_state_exists_before_the_first_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    state = optimizer_tensors(optimizer, {"w": parameter})
    assert set(state["w"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert list(state) == ["w"]

# SPDX-License-Identifier: MIT
"""What a run gathers between reports, and its random numbers, go on where they were."""

import json
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from embeddings.schema.schema import Label
from trainer.checkpoint.state import RandomState
from trainer.runtime.runtime import Runtime
from trainer.telemetry.alerts import LabelWeights
from trainer.telemetry.telemetry import StepReport, TelemetryConfig


def report(step: int) -> StepReport:
    generator = torch.Generator().manual_seed(step)
    predictions = torch.rand(8, 1, generator=generator)
    labels = (torch.rand(8, 1, generator=generator) < predictions).float()
    loss = torch.tensor(float("nan") if step == 2 else 1 / step)
    return StepReport(
        step=step,
        rows=8,
        loss=loss,
        predictions=predictions,
        labels=labels,
        weights=torch.ones(8, 1),
    )


def curve(folder) -> list[dict]:
    lines = (folder / "curves.jsonl").read_text().splitlines()
    clocks = ("seconds", "rows_per_second", "input_wait")
    return [{k: v for k, v in json.loads(line).items() if k not in clocks} for line in lines]


@pytest.mark.parametrize("cut", [1, 2, 4, 5])
def test_a_report_after_a_resume_covers_the_steps_before_it_too(tmp_path, cut):
    config = TelemetryConfig(interval_steps=3, mode="quiet", window_examples=20)
    with config.build(tmp_path / "whole", 0, 6) as whole:
        for step in range(1, 7):
            whole.update(report(step))
    first = config.build(tmp_path / "cut", 0, 6)
    first.start()
    for step in range(1, cut + 1):
        first.update(report(step))
    state, examples = json.loads(json.dumps(first.state_dict())), first.examples().clone()
    second = config.build(tmp_path / "cut", 0, 6)
    second.start(cut, 8 * cut)
    second.load_state_dict(state, examples)
    with second:
        for step in range(cut + 1, 7):
            second.update(report(step))
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_an_epoch_that_is_resumed_where_nothing_counts_any_more_has_still_counted_before():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        labels = [Label(name="click")]
        first = LabelWeights(labels, dist.group.WORLD)
        first.begin_epoch(0)
        first.add(torch.ones(4, 1), torch.eye(4)[:, :1])
        state = json.loads(json.dumps(first.state_dict()))
        second = LabelWeights(labels, dist.group.WORLD)
        second.load_state_dict(state)
        second.begin_epoch(1)
        second.add(torch.zeros(4, 1), torch.zeros(4, 1))
        assert len(second.interval(2)) == 1
        second.check_epoch(2)
        second.begin_epoch(2)
        second.add(torch.zeros(4, 1), torch.zeros(4, 1))
        second.interval(3)
        with pytest.raises(ValueError, match="steps 3 to 3 has weight 0"):
            second.check_epoch(3)
    finally:
        dist.destroy_process_group()


def test_every_generator_goes_on_where_it_was():
    runtime = Runtime(
        rank=2,
        local_rank=0,
        world_size=3,
        local_world_size=1,
        device=torch.device("cpu"),
        seed=0,
    )
    generators = RandomState(runtime)
    np.random.standard_normal()  # half of a pair is kept for the next call
    random.gauss(0, 1)
    state = {name: tensor.clone() for name, tensor in generators.tensors().items()}
    assert set(state) == {"rank2", "rank2_numpy", "rank2_python"}

    def draw() -> list[float]:
        own = [random.random(), random.gauss(0, 1), random.gauss(0, 1)]
        return [*own, *np.random.standard_normal(3), *torch.rand(3).tolist()]

    expected = draw()
    draw()
    generators.restore(state)
    assert draw() == expected
    generators.restore({})

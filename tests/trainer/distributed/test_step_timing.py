# SPDX-License-Identifier: MIT
"""The parts of a sampled step are all of it, and a step that is not sampled pays nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm_ops import Request

from trainer.distributed.step_timing import Phases


@dataclass
class Clock:
    """A clock that only moves when told to."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow(nn.Module):
    """An embedding layer that takes 4 seconds, one of them for an exchange."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self) -> None:
        self.clock.now += 3
        dist.all_reduce(torch.zeros(1))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("trainer.distributed.step_timing.time", clock)

    def exchange(*_):
        clock.now += 1

    monkeypatch.setattr(dist, "all_reduce", exchange)
    return clock


@pytest.fixture
def phases(clock):
    return Phases(Slow(clock), torch.device("cpu"))


def a_step(phases: Phases, clock: Clock) -> None:
    clock.now += 0.5
    with phases.part("host_to_device"):
        clock.now += 0.25
        with phases.part("input_wait"):
            clock.now += 2
        clock.now += 0.25
    with phases.part("dense_forward"):
        clock.now += 5
        phases._embeddings()
    with phases.part("backward"):
        clock.now += 7
    with phases.part("update"):
        dist.all_reduce(torch.zeros(1))
        clock.now += 1.5


def test_each_second_belongs_to_the_innermost_part(phases, clock):
    before = clock.now
    with phases.step(1, 1):
        a_step(phases, clock)
    assert phases.seconds == {
        "input_wait": 2,
        "host_to_device": 0.5,
        "communication": 2,
        "lookup": 3,
        "dense_forward": 5,
        "backward": 7,
        "update": 1.5,
        "other": 0.5,
    }
    assert sum(phases.seconds.values()) == clock.now - before
    assert phases.samples == 1 and phases.own_seconds == 7.5


@pytest.mark.parametrize(
    ("interval", "sampled"), [(1, [1, 2, 3, 4, 5, 6, 7, 8]), (2, [2, 4, 6, 8]), (4, [3, 7])]
)
def test_one_step_an_interval_is_sampled(phases, clock, interval, sampled):
    found = []
    for step in range(1, 9):
        before = phases.samples
        with phases.step(step, interval):
            a_step(phases, clock)
        found += [step] if phases.samples > before else []
    assert found == sampled


def test_outside_a_sample_nothing_is_in_the_way(phases, clock):
    functions = dist.all_reduce, Request._wait_impl
    with phases.step(1, 1):
        assert dist.all_reduce is not functions[0] and Request._wait_impl is not functions[1]
    assert (dist.all_reduce, Request._wait_impl) == functions
    with pytest.raises(KeyError), phases.step(1, 1):
        raise KeyError
    assert (dist.all_reduce, Request._wait_impl) == functions
    layer = phases._embeddings
    assert not layer._forward_hooks and not layer._forward_pre_hooks
    with phases.step(1, 50):
        a_step(phases, clock)
    assert phases.samples == 1


def test_exchanges_of_other_threads_are_no_part_of_the_step(phases, clock):
    with phases.step(1, 1):
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.zeros(1)))
        thread.start()
        thread.join()
    assert phases.seconds["communication"] == 0 and phases.seconds["other"] == 1

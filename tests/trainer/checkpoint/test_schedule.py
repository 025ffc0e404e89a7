# SPDX-License-Identifier: MIT
"""A killed run loses minutes; saving costs a short run nothing and a long one little."""

import math

import pytest

from trainer.checkpoint.schedule import Cadence, CheckpointConfig
from trainer.runtime.runtime import Runtime


class Alone:
    """A group of one."""

    def size(self):
        return 1


def saves(config, seconds_per_step, steps, seconds_to_save=0.0):
    """Return the steps after which a run saves."""
    now = 0.0
    cadence = Cadence(config, Alone(), clock=lambda: now)
    found = []
    for step in range(1, steps + 1):
        now += seconds_per_step
        if cadence.due(step):
            started, now = now, now + seconds_to_save
            cadence.saved(started)
            found.append(step)
    return found


def test_by_default_a_run_of_minutes_is_not_interrupted_and_a_long_one_saves_every_ten():
    assert saves(CheckpointConfig(), 0.1, 5000) == []
    assert saves(CheckpointConfig(), 1.0, 1900) == [600, 1200, 1800]
    # A step of a minute: the clock is looked at every tenth.
    assert saves(CheckpointConfig(), 60.0, 25) == [10, 20]


def test_steps_and_seconds_can_be_set_together_or_alone():
    both = CheckpointConfig(interval_steps=25, interval_seconds=10.0)
    assert saves(both, 1.0, 60) == [10, 20, 25, 40, 50, 60]
    assert saves(CheckpointConfig(interval_steps=25, interval_seconds=0), 99.0, 60) == [25, 50]
    assert saves(CheckpointConfig(interval_seconds=0), 99.0, 60) == []


def test_by_the_clock_none_is_begun_while_one_is_written():
    cadence = Cadence(
        CheckpointConfig(interval_seconds=1.0), Alone(), clock=iter(range(99)).__next__
    )
    assert not cadence.due(10, busy=True)
    assert cadence.due(20, busy=False)


def test_saving_takes_a_twentieth_of_the_time_at_most():
    steps = saves(CheckpointConfig(interval_seconds=10.0), 1.0, 3000, seconds_to_save=30.0)
    assert steps == [10, 610, 1210, 1810, 2410]


@pytest.mark.parametrize(
    "settings",
    [{"keep": 0}, {"interval_steps": -1}, {"keep_best": -1}, {"best_metric": "calibration"}]
    + [{"interval_seconds": s} for s in (-1.0, math.nan, math.inf)]
    + [{"keep_every_hours": -1.0}],
    ids=str,
)
def test_bad_intervals_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CheckpointConfig(**settings)


@pytest.mark.dist
def test_ranks_whose_clocks_differ_save_after_the_same_step(processes):
    assert processes.run(_saves) == [[20, 40], [20, 40]]


def _saves(runtime: Runtime) -> list[int]:
    """Return the steps after which this rank saves; rank 1's clock stands still."""
    now = 0.0
    cadence = Cadence(CheckpointConfig(interval_seconds=15), runtime.group, clock=lambda: now)
    found = []
    for step in range(1, 51):
        now += runtime.rank == 0
        if cadence.due(step):
            cadence.saved(now)
            found.append(step)
    return found

# SPDX-License-Identifier: MIT
"""Progress counts rows once, keeps the place in an epoch, and continues from its own state."""

from __future__ import annotations

import json

import pytest

from trainer.progress import Progress, plan_steps


class Loaded:
    """A loader of `steps` steps of which `done` are taken."""

    def __init__(self, steps: int, done: int = 0) -> None:
        self.steps, self.step = steps, done

    num_epochs = 0

    def __len__(self) -> int:
        return self.steps

    def steps_of(self, epoch: int) -> int:
        return 5


class Settings:
    """The settings of a run that decide its length."""

    def __init__(self, epochs: int, max_steps: int = 0, stop_epoch: int = 0) -> None:
        self.epochs, self.max_steps, self.stop_epoch = epochs, max_steps, stop_epoch


def epoch_of(progress: Progress, num_rows: int, batch: int) -> list[int]:
    """Train an epoch in full batches; return the rows of each step."""
    steps = -(-num_rows // batch)
    progress.begin_epoch(0)
    rows = [progress.add_step(batch, (progress.epoch + 1) * num_rows) for _ in range(steps)]
    progress.end_epoch(steps)
    return rows


@pytest.mark.parametrize(("num_rows", "batch"), [(10, 4), (8, 4), (3, 8), (7, 7)])
def test_padding_is_counted_apart_from_rows_in_every_epoch(num_rows: int, batch: int) -> None:
    progress = Progress()
    padding = -num_rows % batch
    for epoch in range(3):
        assert sum(epoch_of(progress, num_rows, batch)) == num_rows
        assert progress.epoch == epoch + 1
    assert progress.rows == 3 * num_rows and progress.padded_rows == 3 * padding


def test_an_epoch_that_a_limit_cut_is_not_over() -> None:
    progress = Progress()
    progress.begin_epoch(0)
    progress.add_step(4, 12)
    progress.end_epoch(3)
    assert progress.epoch == 0 and progress.step == 1


def test_progress_continues_from_its_state_and_repeats_the_evaluation_of_its_step() -> None:
    progress = Progress()
    epoch_of(progress, 10, 4)
    progress.ranks = [{"step": 1, "erank": 2.0}, {"step": 3, "erank": 3.0}]
    progress.inherited = {"embeddings": "a"}
    saved = json.loads(json.dumps(progress.state_dict()))
    again = Progress()
    again.load_state_dict(saved)
    again.begin_epoch(0)
    assert again.ranks == [{"step": 1, "erank": 2.0}]
    assert again.state_dict() == {**saved, "ranks": again.ranks}
    assert epoch_of(again, 10, 4) == epoch_of(progress, 10, 4)


@pytest.mark.parametrize(
    ("settings", "place", "expected"),
    [
        (Settings(epochs=2), (0, 0, Loaded(5)), (10, 10)),
        (Settings(epochs=2, max_steps=7), (0, 0, Loaded(5)), (7, 7)),
        (Settings(epochs=3, stop_epoch=1), (0, 0, Loaded(5)), (15, 5)),
        (Settings(epochs=3, stop_epoch=2), (7, 1, Loaded(5, 2)), (15, 10)),
        # The rest of the first epoch takes 9 steps of smaller batches, later ones 5.
        (Settings(epochs=2), (2, 0, Loaded(11, 2)), (16, 16)),
    ],
)
def test_the_steps_of_a_run_follow_from_its_place(settings, place, expected) -> None:
    step, epoch, loader = place
    progress = Progress(step=step, epoch=epoch)
    assert plan_steps(settings, progress, loader, inherits=False) == expected


def test_a_position_that_leaves_no_step_is_refused_to_an_heir_alone() -> None:
    progress = Progress(step=5, epoch=1)
    settings, loader = Settings(epochs=1), Loaded(5)
    with pytest.raises(ValueError, match="leaves none to train; raise epochs"):
        plan_steps(settings, progress, loader, inherits=True)  # pyright: ignore
    plan_steps(settings, progress, loader, inherits=False)  # pyright: ignore


def test_seconds_add_up_over_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 13.0, 14.0, 100.0, 101.0])
    monkeypatch.setattr("trainer.progress.time.perf_counter", lambda: next(now))
    progress = Progress()
    progress.count_seconds(7.0)  # a checkpoint of a run that has not trained yet
    assert (progress.train_seconds, progress.wait_seconds) == (0.0, 0.0)
    progress.start_clock(0.5)
    progress.count_seconds(1.5)
    progress.stop_clock(1.5)
    progress.count_seconds(9.0)  # a checkpoint beside an evaluation, which is no training
    progress.start_clock(9.0)
    progress.stop_clock(9.5)
    assert (progress.train_seconds, progress.wait_seconds) == (5.0, 1.5)

# SPDX-License-Identifier: MIT
"""Early stopping counts validations without improvement, and goes on from its state."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.early_stopping import (
    BEST,
    EarlyStopping,
    EarlyStoppingConfig,
    best,
    newest_or_best,
)
from trainer.checkpoint.layout import MANIFEST


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One rank, whose values every rank has."""
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)


class OneRank:
    """As much of a runtime as is needed."""

    device, group, patient, is_first = "cpu", None, None, True


def watching(folder: Path, patience: int = 2, min_change: float = 0.0, metric: str = "auc"):
    config = EarlyStoppingConfig(patience=patience, min_change=min_change)
    return EarlyStopping(config, metric, folder, OneRank())


def after(stopping: EarlyStopping, values: list[float], kept: bool = True) -> EarlyStopping:
    """Validate until it is over, at steps 10, 20, ..."""
    for number, value in enumerate(values, start=stopping.validations + 1):
        if stopping.over:
            break
        stopping.validated(10 * number, {stopping.metric: value}, kept)
    return stopping


@pytest.mark.parametrize(
    ("values", "settings", "validations", "best_step"),
    [
        ([0.6, 0.7, 0.65, 0.69, 0.8], {}, 4, 20),
        ([0.6, 0.7, 0.65, 0.71, 0.6], {}, 5, 40),
        ([0.6, 0.6, 0.6, 0.9], {}, 3, 10),  # equal is no improvement
        ([0.6, 0.605, 0.609, 0.8], {"min_change": 0.01}, 3, 30),  # the best, but not much better
        ([0.6, 0.605, 0.612, 0.613], {"min_change": 0.01}, 4, 40),
        ([0.5, 0.4, 0.45, 0.41], {"metric": "logloss"}, 4, 20),
        ([math.nan, math.nan, 0.7], {}, 2, -1),
        ([math.nan, 0.7, math.nan, 0.6], {}, 4, 20),
    ],
)
def test_training_ends_after_so_many_validations_without_improvement(
    values, settings, validations, best_step, tmp_path
):
    stopping = after(watching(tmp_path, **settings), values)
    assert (stopping.validations, stopping.best_step) == (validations, best_step)
    assert stopping.over == (stopping.stale >= 2)
    assert (tmp_path / BEST).exists() == (best_step >= 0)


@given(st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8, math.nan]), min_size=1), st.data())
def test_a_state_written_anywhere_goes_on_as_if_it_had_never_been_left(values, data):
    folder = Path("/nonexistent")
    cut = data.draw(st.integers(0, len(values)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyStopping, "_name_best", lambda _: None)
        whole = after(watching(folder, 3), values)
        first = after(watching(folder, 3), values[:cut])
        second = watching(folder, 3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after(second, values[cut:])
    assert second.state_dict() == whole.state_dict() and second.over == whole.over


def test_a_model_without_a_checkpoint_is_not_the_best(tmp_path):
    stopping = after(watching(tmp_path), [0.6])
    after(stopping, [0.9], kept=False)
    assert stopping.best_step == 10 and stopping.stale == 0


def test_a_step_waits_for_its_validation(tmp_path):
    stopping = watching(tmp_path)
    assert stopping.waits(10)
    after(stopping, [0.6])
    assert not stopping.waits(10) and stopping.waits(20)
    assert not watching(tmp_path, patience=0).waits(10)


def test_another_metric_than_before_is_refused_by_name(tmp_path):
    state = after(watching(tmp_path), [0.6]).state_dict()
    with pytest.raises(ValueError, match=r"checkpoint\.best_metric: expected auc.*got logloss"):
        watching(tmp_path, metric="logloss").load_state_dict(state)


@pytest.mark.parametrize("damage", [None, [], {"metric": "auc"}, {"stale": "1"}, {"stale": True}])
def test_a_damaged_state_is_refused(damage, tmp_path):
    state = after(watching(tmp_path), [0.6]).state_dict()
    if isinstance(damage, dict) and "stale" in damage:
        damage = {**state["early_stopping"], **damage}
    with pytest.raises(ValueError, match=r"damaged \(key 'early_stopping'"):
        watching(tmp_path).load_state_dict({"early_stopping": damage})


@pytest.mark.parametrize(
    "settings", [{"patience": -1}, {"patience": 1, "min_change": math.nan}, {"min_change": 0.1}]
)
def test_settings_without_meaning_are_refused(settings):
    with pytest.raises(ValueError, match=r"early_stopping\."):
        EarlyStoppingConfig(**settings)


def test_a_folder_leads_to_its_best_checkpoint_if_that_is_there_and_else_to_its_newest(tmp_path):
    assert newest_or_best(tmp_path) is None
    for step in (10, 20):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / MANIFEST).touch()
    assert newest_or_best(tmp_path) == tmp_path / "step-20"
    for named, expected in [('{"step": 10}', 10), ('{"step": 30}', 20), ('{"step": -10}', 20)]:
        (tmp_path / BEST).write_text(named)
        assert newest_or_best(tmp_path) == tmp_path / f"step-{expected}"


@pytest.mark.parametrize("content", ["", "[]", '{"step": "../x"}', '{"step": true}', "9" * 5000])
def test_what_a_stranger_has_written_leads_nowhere(content, tmp_path):
    (tmp_path / BEST).write_text(content)
    assert best(tmp_path) is None
    (tmp_path / BEST).unlink()
    (tmp_path / BEST).symlink_to("/dev/zero")
    assert best(tmp_path) is None

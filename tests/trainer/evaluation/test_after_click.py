# SPDX-License-Identifier: MIT
"""The metrics of a conversion after a click are those of its rate on the clicked rows alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.heads import HeadConfig
from trainer.config.config import TrainConfig
from trainer.evaluation.evaluate import AfterClick
from trainer.metrics.metrics import Metrics
from trainer.recipes.load import load_recipe

ROWS = 500


def config(head: HeadConfig) -> TrainConfig:
    own = load_recipe("dlrm.demo")
    return dataclasses.replace(own, model=dataclasses.replace(own.model, head=head))


def test_they_are_those_of_the_rate_on_clicked_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    click, rate = torch.rand(2, ROWS, generator=generator)
    labels = (torch.rand(ROWS, 2, generator=generator) < 0.5).float()
    labels[:, 1] *= labels[:, 0]
    weights = torch.rand(ROWS, 2, generator=generator) + 0.1
    weights[::7, 0], weights[::5, 1] = 0.0, 0.0  # null clicks, null conversions
    groups = torch.randint(1, 30, (ROWS,), generator=generator)
    after = AfterClick(config(HeadConfig(kind="esmm")))
    after.update(torch.stack([click, click * rate], 1), labels, weights, groups)
    found = after.compute()
    alone = Metrics(["rate"], grouped=True)
    kept = (labels[:, 0] == 1) & (weights[:, 0] > 0)
    alone.update(rate[kept, None], labels[kept, 1:], weights[kept, 1:], groups[kept])
    expected = alone.compute_labels()[0]
    assert found == pytest.approx(
        {f"like_after_click_{key}": value for key, value in expected.items()}, rel=1e-5
    )


def test_other_heads_have_none_and_a_click_of_probability_zero_is_no_division() -> None:
    row = torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, dtype=torch.int64)
    other, after = AfterClick(config(HeadConfig())), AfterClick(config(HeadConfig(kind="esmm")))
    other.update(*row)
    after.update(*row)
    assert other.compute() == {} and after.compute()["like_after_click_rows"] == 1

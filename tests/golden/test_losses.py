# SPDX-License-Identifier: MIT
"""Golden losses: ten steps of each tower on a fixed stream of batches, in float32.

A change that moves them changes what is trained: a start, a draw of random numbers, an equation or
the order of parameters. If that is meant, put the losses that a failure prints in their place and
say in the commit what moved them. The tolerance leaves room for the kernels of any CPU, whose
losses of ten steps differ by about 1e-7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from embeddings.schema.schema import DenseFeature
from models.batch import Batch
from models.ranking import RankingModel
from tests.support.compiled import with_compiled
from tests.support.tiny import SCHEMA, make_batch
from trainer.recipes.towers import TOWERS

STEPS, EXAMPLES = 10, 32
LOSSES = {
    "dlrm": [
        *(0.69249594, 0.69266230, 0.69126159, 0.69165355, 0.69351095),
        *(0.69045323, 0.69360399, 0.69136906, 0.68977809, 0.69246447),
    ],
    "specformer": [
        *(0.66309977, 0.71213263, 0.70558697, 0.66816080, 0.71707273),
        *(0.69351369, 0.67170388, 0.70878321, 0.66297233, 0.66629201),
    ],
    "rankelastor": [
        *(0.71626198, 0.68824291, 0.68465668, 0.69615614, 0.69312787),
        *(0.67843950, 0.72189063, 0.67535383, 0.68650848, 0.70021230),
    ],
    "tokenformer": [
        *(0.70701379, 0.71404922, 0.70580351, 0.67962158, 0.71359926),
        *(0.66124988, 0.71864444, 0.70475334, 0.64357775, 0.68675423),
    ],
}


@pytest.fixture
def compiled() -> Iterator[None]:
    """Use the spectral operator's compiled form."""
    yield from with_compiled()


def batch_of(step: int) -> Batch:
    """Return the batch of a step; items of the upper half are clicked."""
    batch = make_batch(EXAMPLES, seed=step)
    return dataclasses.replace(batch, labels=(batch.sparse["item"].values() >= 30).float()[:, None])


def losses_of(tower: str) -> list[float]:
    """Train all parameters of a tower, as recipes have it, by SGD; return the loss of every step.

    Adagrad's first steps have the sign of a gradient for their size, which rounding can turn.
    """
    torch.manual_seed(1)
    dense = tuple(DenseFeature(name=name) for name in ("price", "age"))
    schema = dataclasses.replace(SCHEMA, dense=dense)
    model = RankingModel(schema, TOWERS[tower].model(), torch.device("cpu"), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        model.tower.set_progress(step / STEPS)
        loss, _ = model(batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.golden
@pytest.mark.parametrize("tower", ["dlrm", "specformer", "rankelastor", "tokenformer"])
def test_ten_steps_of_a_tower_lose_what_they_lost_before(tower: str) -> None:
    losses = losses_of(tower)
    assert losses == pytest.approx(LOSSES[tower], rel=1e-5), losses


@pytest.mark.golden
def test_specformer_loses_the_same_by_compiled_code(compiled: None) -> None:
    losses = losses_of("specformer")
    assert losses == pytest.approx(LOSSES["specformer"], rel=1e-5), losses


@pytest.mark.golden
def test_the_tolerance_sees_a_start_that_moves_by_a_thousandth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, **more: 1.001 * draw(*args, **more))
    assert losses_of("specformer") != pytest.approx(LOSSES["specformer"], rel=1e-5)

# SPDX-License-Identifier: MIT
"""What the published baselines' L2 term does to a table, and what decoupled decay does not.

Leaderboard figures of CTR models come from Adam with an L2 term on the whole table in the loss.
Adam divides that term by its own size: rows that no example names shrink at nearly the learning
rate. A comparison must know this, since AdamW with the same number leaves them where they are.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

RATE, DECAY = 1e-3, 1e-5
PUBLISHED = {1: 9.901e-2, 10: 9.014e-2, 50: 5.415e-2, 100: 2.309e-2, 200: 1.767e-3}


def test_the_term_reaches_every_row_also_those_that_no_example_names() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, dtype=torch.float64)
    ids = torch.tensor([3, 3, 7])

    def data() -> torch.Tensor:
        return table(ids).square().sum(1).sin().sum()

    (of_data,) = torch.autograd.grad(data(), table.weight)
    loss = data() + DECAY / 2 * table.weight.square().sum()
    (of_both,) = torch.autograd.grad(loss, table.weight)
    assert torch.allclose(of_both - of_data, DECAY * table.weight, rtol=0, atol=1e-9)
    unseen = torch.ones(20, dtype=torch.bool)
    unseen[ids] = False
    assert not of_data[unseen].any()
    assert torch.allclose(of_both[unseen], DECAY * table.weight[unseen], rtol=1e-9, atol=0)


def drift(optimizer: type[torch.optim.Optimizer]) -> dict[int, float]:
    """A row of .1 that no example ever names, after so many steps."""
    row = nn.Parameter(torch.full((1,), 0.1, dtype=torch.float64))
    steps = optimizer([row], lr=RATE, weight_decay=DECAY)  # pyright: ignore[reportCallIssue]
    seen = {}
    for step in range(1, max(PUBLISHED) + 1):
        row.grad = torch.zeros_like(row)
        steps.step()
        seen[step] = float(row.detach())
    return {step: seen[step] for step in PUBLISHED}


def test_under_adam_an_unseen_row_drifts_as_published() -> None:
    assert drift(torch.optim.Adam) == pytest.approx(PUBLISHED, abs=1e-5)
    # From the definition of Adam.
    row, first, second = 0.1, 0.0, 0.0
    for step in range(1, 201):
        gradient = DECAY * row
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        size = math.sqrt(second / (1 - 0.999**step)) + 1e-8
        row -= RATE * first / (1 - 0.9**step) / size
        if step in PUBLISHED:
            assert row == pytest.approx(PUBLISHED[step], abs=1e-5)


def test_under_decoupled_decay_it_stays_where_it_is() -> None:
    assert drift(torch.optim.AdamW)[200] == pytest.approx(0.1, rel=1e-5)

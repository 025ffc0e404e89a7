# SPDX-License-Identifier: MIT
"""Heads and losses: weighted means that combine exactly, and labels as bits of action classes."""

from __future__ import annotations

import math

import pytest
import torch

from models.heads import HeadConfig
from models.losses import action_classes, action_cross_entropy, task_logits, weighted_bce


def test_head_maps_any_leading_dimensions_to_logits() -> None:
    head = HeadConfig(hidden_units=(7, 5)).build(6, 3)
    assert head(torch.randn(2, 6)).shape == (2, 3)
    assert head(torch.randn(2, 4, 6)).shape == (2, 4, 3)
    assert HeadConfig(hidden_units=()).build(6, 3)(torch.randn(2, 6)).shape == (2, 3)
    with pytest.raises(ValueError, match="dropout"):
        HeadConfig(dropout=1.0)


def test_a_head_starts_at_the_prior_of_every_task() -> None:
    zero = torch.zeros(2, 6)
    shares = HeadConfig(prior=(0.03, 0.4)).build(6, 2)(zero).sigmoid()
    assert torch.allclose(shares, torch.tensor([0.03, 0.4]).expand(2, 2))
    shares = HeadConfig(prior=(0.2,)).build(6, 3)(zero).sigmoid()
    assert torch.allclose(shares, torch.full((2, 3), 0.2))
    assert not HeadConfig().build(6, 3)(zero).any()


@pytest.mark.parametrize("prior", [(0.0,), (0.5, 1.0), (float("nan"),)])
def test_a_prior_that_is_no_share_is_refused(prior: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="share of positives between 0 and 1"):
        HeadConfig(prior=prior)


def test_a_prior_for_another_number_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="one for each of 3 logits"):
        HeadConfig(prior=(0.1, 0.2)).build(6, 3)


def test_bce_is_the_weighted_mean_of_log_likelihoods() -> None:
    logits = torch.tensor([[0.3, -1.0], [2.0, 0.5]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    weights = torch.tensor([[1.0, 2.0], [0.5, 0.0]])
    p = logits.sigmoid()
    losses = -(labels * p.log() + (1 - labels) * (1 - p).log())
    loss, total = weighted_bce(logits, labels, weights)
    assert torch.allclose(loss, (losses * weights).sum() / 3.5) and float(total) == 3.5


def test_means_of_parts_combine_to_the_mean_of_the_whole() -> None:
    logits, labels = torch.randn(9, 2), torch.randint(0, 2, (9, 2)).float()
    weights = torch.rand(9, 2)
    weights[4] = 0
    whole, total = weighted_bce(logits, labels, weights)
    parts = [weighted_bce(logits[s], labels[s], weights[s]) for s in (slice(4), slice(4, None))]
    combined = sum(loss * weight for loss, weight in parts) / total
    assert torch.allclose(torch.as_tensor(combined), whole)


def test_all_zero_weights_give_zero_loss_and_zero_gradient() -> None:
    logits = torch.tensor([[math.inf, 1.0]], requires_grad=True)
    labels = torch.tensor([[math.nan, 1.0]])
    loss, total = weighted_bce(logits, labels, torch.zeros(1, 2))
    loss.backward()
    assert float(loss.detach()) == 0 and float(total) == 0
    assert logits.grad is not None and logits.grad[0, 1] == 0
    classes = torch.randn(3, 4, requires_grad=True)
    loss, total = action_cross_entropy(classes, torch.tensor([0, 1, 2]), torch.zeros(3))
    loss.backward()
    assert float(loss.detach()) == 0 and classes.grad is not None
    assert classes.grad.abs().max() == 0


def test_action_loss_of_no_positions_is_zero() -> None:
    logits = torch.randn(0, 4, requires_grad=True)
    loss, total = action_cross_entropy(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0 and float(total) == 0


def test_action_loss_is_the_weighted_cross_entropy() -> None:
    logits, actions = torch.randn(5, 4), torch.randint(0, 4, (5,))
    weights = torch.rand(5)
    expected = -(logits.log_softmax(-1)[torch.arange(5), actions] * weights).sum() / weights.sum()
    loss, total = action_cross_entropy(logits, actions, weights)
    assert torch.allclose(loss, expected) and torch.allclose(total, weights.sum())


def test_class_bits_are_labels() -> None:
    labels = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]])
    assert action_classes(labels.float()).tolist() == [0, 1, 2, 5]


def test_task_probability_is_the_sum_over_classes_with_its_bit() -> None:
    logits = torch.randn(6, 8) * 3
    p = logits.softmax(-1)
    expected = torch.stack(
        [p[:, [c for c in range(8) if c >> k & 1]].sum(1) for k in range(3)], dim=1
    )
    assert torch.allclose(task_logits(logits, 3).sigmoid(), expected, atol=1e-6)
    extreme = task_logits(torch.tensor([[200.0, 0.0]]), 1)
    assert float(extreme) == -200.0
    with pytest.raises(ValueError, match="make 8 classes, got 4"):
        task_logits(torch.zeros(1, 4), 3)


def test_half_precision_logits_are_read_in_float32() -> None:
    logits = torch.randn(4, 1).bfloat16().requires_grad_()
    loss, _ = weighted_bce(logits, torch.ones(4, 1), torch.ones(4, 1))
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16

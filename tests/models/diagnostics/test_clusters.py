# SPDX-License-Identifier: MIT
"""Clusters of a representation and what they know of the label."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import mutual_info_score

from models.diagnostics.clusters import kmeans, mutual_information


def test_separated_groups_are_found_whatever_the_order() -> None:
    torch.manual_seed(0)
    truth = torch.arange(4).repeat(50)
    points = torch.randn(200, 3) * 0.1 + 10.0 * torch.eye(4, 3)[truth] + 5.0 * (truth[:, None] == 3)
    for order in (torch.arange(200), torch.randperm(200)):
        clusters = kmeans(points[order], 4)
        information, entropy = mutual_information(clusters, truth[order])
        assert information == pytest.approx(math.log(4), abs=1e-12)
        assert entropy == pytest.approx(math.log(4), abs=1e-12)


def test_information_equals_an_independent_count() -> None:
    torch.manual_seed(1)
    clusters, labels = torch.randint(7, (500,)), torch.randint(2, (500,))
    information, entropy = mutual_information(clusters, labels)
    assert information == pytest.approx(mutual_info_score(clusters, labels), abs=1e-12)
    rate = labels.double().mean().item()
    assert entropy == pytest.approx(-rate * math.log(rate) - (1 - rate) * math.log(1 - rate))


def test_a_collapsed_representation_has_no_information() -> None:
    labels = torch.arange(100) % 2
    assert mutual_information(kmeans(torch.ones(100, 5), 4), labels)[0] < 0.02


def test_more_clusters_than_points_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and the number of points, 3, got 4"):
        kmeans(torch.randn(3, 2), 4)

# SPDX-License-Identifier: MIT
"""Random numbers of tests: two tests in any order start from the same state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings


@pytest.mark.parametrize("time", ["once", "again"])
def test_every_test_draws_the_same_numbers(time: str) -> None:
    drawn = random.random(), float(np.random.rand()), float(torch.rand(1))
    assert drawn == pytest.approx((0.8444218515, 0.5488135039, 0.4962565899))


def test_hypothesis_derives_its_examples_from_the_test() -> None:
    assert settings().derandomize

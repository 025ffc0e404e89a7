# SPDX-License-Identifier: MIT
"""Fixtures of all tests.

Every test draws the same random numbers at every run and on every machine: the generators of
Python, NumPy and torch start from one seed before each test, and Hypothesis derives its examples
from the test itself. Tests therefore compare bits only where one kernel reads one input twice;
two kernels, shapes or orders of summation are compared with a tolerance.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import settings

from tests.support.processes import processes as processes

settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed every global generator; torch's only where a test has imported torch."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)

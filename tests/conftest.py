# SPDX-License-Identifier: MIT
"""Fixtures of all tests."""

from tests.support.processes import processes as processes

# SPDX-License-Identifier: MIT
"""Every fault there is: each module has added its own to the list by being imported."""

from __future__ import annotations

from tests.faults import contents, disks, processes, surroundings
from tests.faults.fault import FAULTS, Fault

MODULES = (processes, disks, contents, surroundings)

__all__ = ["FAULTS", "MODULES", "Fault"]

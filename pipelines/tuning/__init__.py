# SPDX-License-Identifier: MIT
"""Settings with ranges, and trials of them."""

# SPDX-License-Identifier: MIT
"""A/B tests on users: who gets which arm, what the arms differ by, and how many users that takes.

Imports trainer.data, trainer.runtime and pipelines.orchestration.
"""

# SPDX-License-Identifier: MIT
"""Metrics have names and units as Prometheus wants them, and their table is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.telemetry.prometheus_metrics import METRICS, document

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_of_metrics_is_what_the_code_has():
    assert (ROOT / "deploy" / "METRICS.md").read_text("utf-8") == document()


def test_no_two_metrics_share_a_name():
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    # Base units alone, and the unit at the end.
    assert not re.search(r"(milli|micro|minutes|hours|kilo|mega|percent|_ms\b|_mb\b)", metric.name)
    for unit in ("seconds", "bytes", "ratio"):
        if f"_{unit}" in metric.name:
            assert re.search(rf"_{unit}(_total)?$", metric.name)
    assert metric.help and not metric.help.endswith(".")
    assert {"run", "rank"}.isdisjoint(metric.labels)

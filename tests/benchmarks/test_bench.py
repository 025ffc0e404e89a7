# SPDX-License-Identifier: MIT
"""The runner of benchmarks: sides take turns, busy pairs are marked, nothing is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.benchmarks import bench
from tests.benchmarks.bench import Benchmark, Result, benchmarks, measure, page, row
from tests.benchmarks.sides import SIDES

TWO = Benchmark(name="a / b", ours=("a", {}), theirs=("b", {}), target=2.0)


class Fake:
    """A side whose work takes a fixed time of the test's own clock."""

    order: ClassVar[list[str]] = []
    busy = 0.0
    foreign = 0.0

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name

    def work(self) -> dict[str, float]:
        Fake.order.append(self.name)
        Fake.busy += 1.0 + Fake.foreign
        return {"units": 30 if self.name == "a" else 10, "wall": 1.0, "cpu": 1.0}

    def stop(self) -> None:
        Fake.order.append(f"{self.name} ends")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.order, Fake.busy, Fake.foreign = [], 0.0, 0.0
    monkeypatch.setattr(bench, "Side", Fake)
    monkeypatch.setattr(bench, "busy_seconds", lambda: Fake.busy)
    monkeypatch.setattr(bench.time, "monotonic", lambda: Fake.busy)
    monkeypatch.setattr(bench.psutil, "cpu_count", lambda: 1)
    return Fake


def test_the_sides_take_turns_in_both_orders_and_are_ended(fake: type[Fake]) -> None:
    result = measure(TWO, 7)
    assert "".join(fake.order[:14]) == "abba" * 3 + "ab"
    assert fake.order[14:] == ["a ends", "b ends"]
    assert result.ratios == [3.0] * 7 and result.busy == 0
    assert row(TWO, result).startswith("| a / b | 3.00 | 3.00 to 3.00 | 2 met | 0 of 7")


def test_a_pair_beside_other_work_is_marked(fake: type[Fake]) -> None:
    fake.foreign = 0.1
    result = measure(TWO, 7)
    assert result.busy == 7
    assert "7 of 7, to 9 %" in row(TWO, result)


def test_what_cannot_be_run_is_in_the_table_with_its_reason(tmp_path: Path) -> None:
    found = benchmarks(tmp_path / "none", tmp_path / "none")
    missing = [one for one in found if one.missing]
    assert len(missing) == len(found) - 3, "only the spectral operator needs no log"
    assert all("not run: " in row(one, None) for one in missing)
    assert all(one.ours[0] in SIDES and one.theirs[0] in SIDES for one in found)


def test_the_page_says_where_and_how_it_was_measured() -> None:
    found = {**bench.machine(), "date": "2000-01-01"}
    json.dumps(found)
    text = page(found, [row(TWO, Result(ratios=[1.0] * 7, foreign=[0.0] * 7))], "the command")
    assert "`the command`" in text and found["cpu"] in text
    assert f"torch {found['versions']['torch']}" in text
    assert "| a / b | 1.00 | 1.00 to 1.00 | 2 missed | 0 of 7, to 0 % |" in text

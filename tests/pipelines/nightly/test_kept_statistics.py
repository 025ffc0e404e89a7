# SPDX-License-Identifier: MIT
"""Statistics that a night has kept are used while they are whole and of the same day."""

from __future__ import annotations

import json
import os

import pytest

from pipelines.nightly.drift import DayStatistics
from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from trainer.recipes.schemas import demo

DAY = "2026-01-01"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    clicks = ClickConfig(num_users=50, num_items=60)
    synthesize(folder, SynthesisConfig(days=1, rows_per_day=100, clicks=clicks))
    return folder


@pytest.fixture
def reader(log, tmp_path):
    return DayStatistics(log=log, schema=demo(), cache=tmp_path / "statistics")


def test_they_are_taken_once(reader, monkeypatch):
    found = reader.read(DAY)
    assert found["rows"] == 100 and found["columns"]["click"]["cardinality"] == 2
    monkeypatch.setattr(DayStatistics, "_take", lambda *_: pytest.fail("taken twice"))
    assert reader.read(DAY) == json.loads(json.dumps(found))


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: None,
        lambda kept: [],
        lambda kept: {**kept, "columns": []},
        lambda kept: {**kept, "columns": {"click": 3}},
        lambda kept: {**kept, "columns": {"click": {"count": 1, "nulls": 0}}},
        lambda kept: {**kept, "columns": {"click": {**kept["columns"]["click"], "nulls": "no"}}},
        lambda kept: {
            **kept,
            "columns": {"click": {"count": 1, "nulls": 0, "cardinality": 1, "mean": 1}},
        },
        lambda kept: {**kept, "rows": "many"},
        lambda kept: {"rows": 1, "columns": {}},
        lambda kept: {**kept, "made_from": ["another day"]},
    ],
)
def test_damaged_ones_are_taken_again(damage, reader):
    found = reader.read(DAY)
    path = reader.cache / f"{DAY}.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert reader.read(DAY) == found


def test_a_pipe_in_their_place_does_not_hang(reader):
    found = reader.read(DAY)
    (reader.cache / f"{DAY}.json").unlink()
    os.mkfifo(reader.cache / f"{DAY}.json")
    assert reader.read(DAY) == found

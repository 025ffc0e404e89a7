# SPDX-License-Identifier: MIT
"""Tables through checkpoints: another plan, another number of ranks, and ids nobody has seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.sharding.sharding import ShardingConfig
from models.batch import Batch
from tests.support.processes import Processes
from tests.support.tiny import SCHEMA, make_batch
from tests.support.training import Recipe, Session
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import read_manifest
from trainer.checkpoint.state import TrainState
from trainer.runtime.runtime import Runtime

NAMES = tuple(table.name for table in SCHEMA.tables)
Parts = dict[tuple[str, int, int], Tensor]


def _all(kind: Any, optimizer: str = "rowwise_adagrad") -> Recipe:
    sparse = SparseOptimizerConfig(kind=optimizer, learning_rate=0.1)  # type: ignore
    tables = {name: kind for name in NAMES}
    return Recipe(sharding=ShardingConfig(tables=tables), sparse=sparse)


def _step(session: Session, number: int) -> None:
    session.backward(session.batch(number))
    session.precision.apply()


def _state(session: Session, runtime: Runtime) -> TrainState:
    return TrainState(session.parallel, session.replicas, runtime)


def _save(runtime: Runtime, recipe: Recipe, folder: Path) -> tuple[Parts, Parts, Parts]:
    """Take two steps, save; return tables and states as saved, and tables after a third step."""
    session = Session(runtime, recipe)
    for number in range(2):
        _step(session, number)
    saved = session.tables(), session.states()
    dcp.save(_state(session, runtime).tensors(), folder, 2, {})
    _step(session, 2)
    return *saved, session.tables()


def _load(runtime: Runtime, recipe: Recipe, path: Path) -> tuple[Parts, Parts, Parts]:
    """Load, and do as `_save` does."""
    session = Session(runtime, recipe)
    _state(session, runtime).load(path)
    loaded = session.tables(), session.states()
    _step(session, 2)
    return *loaded, session.tables()


def _whole(outcomes: list[Any], what: int) -> dict[str, Tensor]:
    """Put the parts of all ranks together, by rows and columns."""
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for outcome in outcomes:
        for (name, row, column), part in outcome[what].items():
            name = name.rsplit("embeddings.", 1)[-1]
            found.setdefault(name, {})[row, column] = part
    return {
        name: torch.cat(
            [
                torch.cat([parts[key] for key in sorted(parts) if key[0] == row], dim=-1)
                for row in sorted({row for row, _ in parts})
            ]
        )
        for name, parts in found.items()
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("old", "new", "ranks", "optimizer"),
    [
        *(
            (*change, optimizer)
            for optimizer in ("rowwise_adagrad", "adagrad")
            for change in (
                ("table_wise", "row_wise", (2, 2)),
                ("row_wise", "table_wise", (2, 2)),
                ("row_wise", "table_wise", (2, 1)),
                ("table_wise", "row_wise", (1, 2)),
            )
        ),
        ("row_wise", "table_wise", (2, 2), "sgd"),
    ],
)
def test_under_another_plan_every_row_and_its_state_come_back_and_the_next_step_is_equal(
    processes: Processes, tmp_path: Path, old: str, new: str, ranks: Any, optimizer: str
) -> None:
    saved = processes.run(_save, _all(old, optimizer), tmp_path, world_size=ranks[0])
    path = tmp_path / "step-2"
    found = processes.run(_load, _all(new, optimizer), path, world_size=ranks[1])
    for what in (0, 1):
        expected, loaded = _whole(saved, what), _whole(found, what)
        assert expected.keys() == loaded.keys()
        assert len(expected) == (0 if what and optimizer == "sgd" else len(NAMES))
        for name, part in expected.items():
            assert torch.equal(part, loaded[name]), name
    # The states matter: without them the third step would be a first one, and larger.
    for name, weight in _whole(saved, 2).items():
        torch.testing.assert_close(_whole(found, 2)[name], weight, rtol=1e-5, atol=1e-6)


def _save_twice(runtime: Runtime, recipe: Recipe, folder: Path) -> None:
    session = Session(runtime, recipe)
    _step(session, 0)
    dcp.save(_state(session, runtime).tensors(), folder / "one", 1, {})
    other = Session(runtime, recipe)
    _state(other, runtime).load(folder / "one" / "step-1")
    dcp.save(_state(other, runtime).tensors(), folder / "two", 1, {})


@pytest.mark.dist
def test_saved_loaded_and_saved_again_tables_are_the_same_bytes(
    processes: Processes, tmp_path: Path
) -> None:
    processes.run(_save_twice, _all("row_wise"), tmp_path)
    one, two = (read_manifest(tmp_path / name / "step-1") for name in ("one", "two"))
    assert one["files"] == two["files"] and len(one["files"]) == 3
    for name in one["files"]:
        first = (tmp_path / "one" / "step-1" / name).read_bytes()
        assert first == (tmp_path / "two" / "step-1" / name).read_bytes()


def _with_ids(batch: Batch, ids: Tensor) -> Batch:
    sparse = type(batch.sparse)(
        keys=batch.sparse.keys(), values=ids, lengths=batch.sparse.lengths()
    )
    return dataclasses.replace(batch, sparse=sparse)


def _missing_only(runtime: Runtime, recipe: Recipe) -> tuple[bool, Parts, Parts]:
    session = Session(runtime, recipe)
    batch = make_batch(8, runtime.rank)
    batch = _with_ids(batch, torch.zeros_like(batch.sparse.values()))
    before = session.tables()
    session.backward(batch)
    step = session.precision.apply()
    return step.loss == step.loss, before, session.tables()


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_a_batch_of_unseen_ids_alone_trains_the_row_of_missing_ids_and_no_other(
    processes: Processes, kind: str
) -> None:
    outcomes = processes.run(_missing_only, _all(kind))
    assert all(finite for finite, _, _ in outcomes)
    before, after = _whole(outcomes, 1), _whole(outcomes, 2)
    for name, weight in before.items():
        assert not torch.equal(after[name][0], weight[0]), name
        assert torch.equal(after[name][1:], weight[1:]), name


def _out_of_range(runtime: Runtime, recipe: Recipe, row: int) -> str:
    session = Session(runtime, recipe)
    batch = make_batch(8, 0)
    ids = batch.sparse.values().clone()
    ids[0] = row  # of feature `item`, whose table has 60 rows
    try:
        session.backward(_with_ids(batch, ids))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("row", [60, 10**9, -1])
def test_a_row_that_a_table_does_not_have_stops_the_step_instead_of_reading_another(
    processes: Processes, row: int
) -> None:
    (message,) = processes.run(_out_of_range, _all("table_wise"), row, world_size=1)
    assert "idx" in message or str(row) in message, message

# SPDX-License-Identifier: MIT
"""Dynamic tables over time: saved, moved to other numbers of ranks, resumed, grown, evaluated."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.lifetime import DynamicConfig
from tests.support import runs
from tests.support.dynamic import Parts, parts_of, schema_of, vectors, whole
from tests.support.processes import Processes
from tests.support.training import Recipe, Session
from trainer.checkpoint import dcp
from trainer.checkpoint.state import TrainState
from trainer.config.config import TrainConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.distributed.train_pipeline import Pipeline
from trainer.metrics.validity import ADVICE as DOUBTS
from trainer.runtime.runtime import Runtime
from trainer.trainer import Trainer

RECIPE = Recipe(
    schema=schema_of(
        {
            "item": DynamicConfig(initial_rows=20),
            "user": DynamicConfig(min_occurrences=2, eviction="ttl", ttl_steps=3),
        },
        {"item": 64, "user": 64},
    )
)


class Steps(Session):
    """A session that can be saved and loaded."""

    def __init__(self, runtime: Runtime, recipe: Recipe = RECIPE) -> None:
        super().__init__(runtime, recipe)
        self.state = TrainState(self.parallel, self.replicas, runtime)
        self.pipeline = Pipeline(self.parallel, self.precision, runtime.device)

    def train(self, first: int, last: int) -> None:
        batches = (self.batch(step) for step in range(first, last))
        for _ in range(first, last):
            self.pipeline.progress(batches)

    def save(self, folder: Path) -> Path:
        return dcp.save(self.state.tensors(), folder, 1, {})

    def parts(self) -> Parts:
        return parts_of(self.parallel.model)


def begin(runtime: Runtime, folder: Path, steps: int) -> Parts:
    session = Steps(runtime)
    session.train(0, steps)
    session.save(folder)
    return session.parts()


def copy(runtime: Runtime, source: Path, folder: Path) -> tuple[Parts, dict[str, Any]]:
    """Load a checkpoint and save it again; return what was loaded, and the files' checksums."""
    session = Steps(runtime)
    session.state.load(source)
    path = session.save(folder)
    return session.parts(), json.loads((path / "manifest.json").read_text("utf-8"))["files"]


def go_on(runtime: Runtime, source: Path) -> Parts:
    session = Steps(runtime)
    session.state.load(source)
    session.train(4, 8)
    return session.parts()


def straight_on(runtime: Runtime) -> Parts:
    session = Steps(runtime)
    session.train(0, 8)
    return session.parts()


def bits(tables: dict[str, dict[str, torch.Tensor]], skip: tuple[str, ...] = ("totals",)) -> Any:
    return {n: {k: v.tolist() for k, v in t.items() if k not in skip} for n, t in tables.items()}


@pytest.mark.dist
def test_one_ranks_tables_are_the_same_id_by_id_on_two_three_and_one_again(
    processes: Processes, tmp_path: Path
) -> None:
    saved = whole(processes.run(begin, tmp_path / "1", 4, world_size=1))
    assert len(vectors(saved["item"])) > 40 and len(vectors(saved["user"])) > 10
    source, sums = tmp_path / "1" / "step-1", {}
    for before, ranks in ((1, 2), (2, 2), (2, 3), (3, 1)):
        results = processes.run(copy, source, tmp_path / f"{before}{ranks}", world_size=ranks)
        loaded = whole([parts for parts, _ in results])
        for name in saved:  # vectors and states of the optimizer
            assert vectors(loaded[name]) == vectors(saved[name])
        assert bits(loaded) == bits(saved)
        source, sums[before, ranks] = tmp_path / f"{before}{ranks}" / "step-1", results[0][1]
    # Saved by two, loaded by two and saved again: the same bytes.
    assert sums[2, 2] == sums[1, 2]
    resumed = whole(processes.run(go_on, tmp_path / "31" / "step-1"))
    straight = whole(processes.run(straight_on))
    for name in straight:
        ids = straight[name]["ids"]
        assert torch.equal(resumed[name]["ids"], ids) and (ids != 0).any()


@pytest.mark.dist
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    processes: Processes, tmp_path: Path
) -> None:
    processes.run(begin, tmp_path, 4)
    resumed = processes.run(go_on, tmp_path / "step-1")
    assert bits(whole(resumed)) == bits(whole(processes.run(straight_on)))


def overflow(runtime: Runtime) -> tuple[Parts, Parts, bool]:
    """Train a step, then one whose gradients are infinite and whose ids are partly new."""
    recipe = dataclasses.replace(
        RECIPE, precision=PrecisionConfig(dtype="fp16", initial_scale=2.0**32)
    )
    session = Steps(runtime, recipe)
    session.backward(session.batch(0))
    before = session.parts()
    step = session.precision.apply()
    return before, session.parts(), bool(step.skipped)


@pytest.mark.dist
def test_a_skipped_fp16_step_admits_ids_and_changes_no_vector(processes: Processes) -> None:
    for before, after, skipped in processes.run(overflow):
        assert skipped
        assert bits(whole([before])) == bits(whole([after]))
        held = vectors(whole([after])["item"])
        assert held and all(state[-1] == 0 for state in held.values())


def half(runtime: Runtime) -> tuple[list[float], Parts, Parts, bool]:
    """Train tables in FP16 on four batches, again and again, and then a step that overflows."""
    recipe = dataclasses.replace(
        RECIPE,
        sparse=SparseOptimizerConfig(learning_rate=0.1, weights="fp16"),
        precision=PrecisionConfig(dtype="fp16", initial_scale=2.0**10),
    )
    session, losses = Steps(runtime, recipe), []
    for step in range(32):
        session.backward(session.batch(step % 4))
        losses.append(session.precision.apply().loss)
    session.precision.loss_scale = 2.0**40
    session.backward(session.batch(0))
    before = session.parts()  # ids come and go in forward
    step = session.precision.apply()
    return losses, before, session.parts(), bool(step.skipped)


@pytest.mark.dist
def test_tables_in_fp16_learn_and_a_skipped_step_leaves_every_vector(processes: Processes) -> None:
    results = processes.run(half)
    for losses, _, _, skipped in results:
        assert skipped and all(map(math.isfinite, losses))
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    before, after = (whole([result[i] for result in results]) for i in (1, 2))
    for table in before.values():
        assert table["weight"].dtype == torch.float16 and torch.isfinite(table["weight"]).all()
        assert len(vectors(table)) > 10
    assert bits(before) == bits(after)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.generate(tmp_path_factory.mktemp("logs"))


def dynamic(config: TrainConfig, rows: int, **settings: Any) -> TrainConfig:
    """Return `config` with dynamic tables of items and users."""
    chosen = DynamicConfig(**settings)
    tables = tuple(
        dataclasses.replace(table, num_embeddings=rows, dynamic=chosen)
        if table.name in ("item", "user")
        else table
        for table in config.schema.tables
    )
    return dataclasses.replace(config, schema=dataclasses.replace(config.schema, tables=tables))


def night(runtime: Runtime, config: TrainConfig, output: Path) -> tuple[Parts, Parts, Parts]:
    """Train; return the tables at the start, before the last evaluation and after it."""
    trainer = Trainer(config, output, runtime)
    start = parts_of(trainer.parallel.model)
    evaluate, before = trainer._evaluate, []

    def noting(*words: Any, **named: Any) -> dict[str, Any]:
        before.append(parts_of(trainer.parallel.model))
        return evaluate(*words, **named)

    trainer._evaluate = noting
    trainer.fit()
    return start, before[-1], parts_of(trainer.parallel.model)


@pytest.mark.dist
def test_a_table_grows_and_shrinks_between_nights_and_ids_keep_vector_and_state(
    processes: Processes, logs: Path, tmp_path: Path
) -> None:
    config = dynamic(runs.small("dlrm.demo", logs), 256, eviction="ttl", ttl_days=30)
    results = processes.run(night, config, tmp_path / "first")
    first, evaluated = (whole([r[i] for r in results]) for i in (1, 2))
    assert bits(first, ()) == bits(evaluated, ())  # another day's new ids leave no trace
    assert int(first["item"]["seen"].max()) >> 40 == 20_454  # 2026-01-01
    held = vectors(first["item"])
    assert len(held) > 100
    for rows, ranks in ((1024, 1), (128, 2)):
        other = dynamic(
            runs.small(
                *("dlrm.demo", logs, "--inherit.path", str(tmp_path / "first")),
                *("--inherit.policy", "nightly"),
            ),
            rows,
            eviction="ttl",
            ttl_days=30,
        )
        results = processes.run(night, other, tmp_path / str(rows), world_size=ranks)
        start = whole([r[0] for r in results])
        taken = vectors(start["item"])
        assert all(held[i] == v for i, v in taken.items())
        assert len(taken) == len(held) if rows > 256 else len(taken) > 90
        record = json.loads((tmp_path / str(rows) / "inherit.json").read_text("utf-8"))
        maps = record["tensors"]["id_maps"]
        (status, detail) = next(v for name, v in maps.items() if name.endswith("item.ids"))
        assert status == "resized" and f"256 to {rows:,} rows" in detail


@pytest.mark.dist
def test_counts_and_alerts_of_tables_go_on_where_a_run_was_interrupted(
    processes: Processes, logs: Path, tmp_path: Path
) -> None:
    words = ("--checkpoint.interval-steps", "4", "--telemetry.interval-steps", "2")
    config = dynamic(runs.small("dlrm.demo", logs, *words), 16, eviction="none")
    metrics = processes.run(runs.train, config, tmp_path / "whole", world_size=1)[0]
    of_training = set(metrics["alerts"]) - set(DOUBTS)  # ten steps make no good model
    assert of_training == {"failed_inserts"}
    processes.run(runs.train_until, config, tmp_path / "cut", 7, world_size=1)
    resumed = processes.run(runs.train, config, tmp_path / "cut", world_size=1)[0]
    assert resumed["alerts"] == metrics["alerts"]
    lines = [
        json.loads((tmp_path / name / "tables.jsonl").read_text("utf-8").splitlines()[-1])["tables"]
        for name in ("whole", "cut")
    ]
    for table in ("item", "user"):
        counts, other = ({k: v for k, v in line[table].items() if "dynamic" in k} for line in lines)
        assert counts == other and counts["dynamic_failed"] > 50

# SPDX-License-Identifier: MIT
"""Compiled towers: the same training, and no compiling once a run is in its stride.

With back ends that trace (`eager`) and derive gradients (`aot_eager`), which is where shapes become
numbers or symbols; the one whose C++ takes a minute to build is measured, and compared, in
`tests/benchmarks/compile.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models.towers.tokenformer import TokenFormerConfig
from tests.support import runs
from tests.support.processes import Processes
from tests.support.streams import stream_of
from trainer.build import build_training, open_loader
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.distributed import compile as compiled
from trainer.distributed.deepspeed_zero import ZeroConfig
from trainer.distributed.parallelize import ParallelConfig
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime
from trainer.trainer import Trainer


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.generate(tmp_path_factory.mktemp("logs"))


def test_a_tower_of_ragged_histories_is_compiled_for_all_lengths_after_two_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch.manual_seed(0)
    tower = TokenFormerConfig(num_layers=2, num_full_layers=1, windows=(4,)).build(3, 8)
    streams = [
        stream_of(lengths, num_actions=0, seed=seed)
        for seed, lengths in enumerate(([3, 5, 2], [1, 0, 7, 2], [64, 2, 9], [0, 0], [8] * 11))
    ]
    streams = [
        one._replace(
            fields=one.fields.float(), events=one.events.float(), targets=one.targets.float()
        )
        for one in streams
    ]
    expected = [tower(one) for one in streams]
    names, before = sorted(tower.state_dict()), compiled.num_graphs()
    assert compiled.compile_tower(tower, ragged=True) == 2
    graphs = []
    for one, exact in zip(streams, expected, strict=True):
        output = tower(one)
        output.sum().backward()
        assert torch.allclose(output, exact, atol=1e-6)
        graphs.append(compiled.num_graphs())
    # What comes out of attention is a view of one of two forms, whatever the lengths.
    assert before < graphs[0] <= graphs[1] == graphs[-1]
    assert sorted(tower.state_dict()) == names
    with compiled.uncompiled(True):
        assert torch.equal(tower(streams[0]), expected[0])


def _losses(runtime: Runtime, config: TrainConfig, backend: str) -> dict[str, Any]:
    """Train an epoch of small batches; return losses, graphs after each step, names of weights."""
    compiled.BACKEND = backend
    torch._dynamo.reset()
    torch.manual_seed(runtime.seed)
    training = build_training(config, runtime)
    loader = open_loader(config, runtime, train=True)
    batches = iter(loader)
    losses, graphs = [], []
    for _ in range(len(loader)):
        training.pipeline.progress(batches)
        assert training.pipeline.last_step is not None
        losses.append(training.pipeline.last_step.loss)
        graphs.append(compiled.num_graphs())
    loader.close()
    compiled.BACKEND = "inductor"
    names = sorted(training.parallel.module.state_dict())
    return {"losses": losses, "graphs": graphs, "names": names}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        ("tokenformer.demo", ParallelConfig()),
        ("specformer.demo", ParallelConfig(dense="fsdp2")),
        ("dlrm.demo", ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=2))),
    ],
)
def test_a_compiled_tower_trains_alike_and_compiles_no_more_on_ragged_batches(
    recipe: str, parallel: ParallelConfig, logs: Path, processes: Processes
) -> None:
    config = runs.small(recipe, logs, "--loader.batch-size", "80")
    plain = dataclasses.replace(config, parallel=parallel)
    quick = dataclasses.replace(config, parallel=dataclasses.replace(parallel, compile=True))
    expected = processes.run(_losses, plain, "eager", timeout_seconds=280)
    found = processes.run(_losses, quick, "eager", timeout_seconds=280)
    for rank in range(2):
        assert found[rank]["losses"] == pytest.approx(expected[rank]["losses"], rel=1e-5)
        assert found[rank]["names"] == expected[rank]["names"]
        before, graphs = expected[rank]["graphs"][-1], found[rank]["graphs"]
        assert graphs[0] > before
        assert graphs[1:] == [graphs[1]] * (len(graphs) - 1)


def _run(runtime: Runtime, config: TrainConfig, output: Path) -> dict[str, Any]:
    compiled.BACKEND = "eager"
    try:
        return Trainer(config, output, runtime).fit()
    finally:
        compiled.BACKEND = "inductor"


@pytest.mark.dist
def test_a_compiled_run_is_evaluated_diagnosed_and_saved_like_another(
    logs: Path, processes: Processes, tmp_path: Path
) -> None:
    config = runs.small("specformer.demo", logs, "--max-steps", "4")
    quick = dataclasses.replace(config, parallel=ParallelConfig(compile=True))
    expected = processes.run(_run, config, tmp_path / "plain", world_size=1)[0]
    found = processes.run(_run, quick, tmp_path / "compiled", world_size=1)[0]
    assert found["auc"] == pytest.approx(expected["auc"], rel=1e-5)
    assert found["compiled_graphs"] > 0
    assert expected["compiled_graphs"] == 0
    plain, looked_into = (
        json.loads((tmp_path / name / "ranks.json").read_text("utf-8"))
        for name in ("plain", "compiled")
    )
    places = [[(one["module"], one["path"]) for one in part] for part in (plain, looked_into)]
    assert places[0] == places[1]


def _die(runtime: Runtime, config: TrainConfig, output: Path) -> None:
    compiled.BACKEND = "eager"
    try:
        runs.train_until(runtime, config, output, 3)
    finally:
        compiled.BACKEND = "inductor"


@pytest.mark.dist
def test_a_run_that_was_compiled_goes_on_without(
    logs: Path, processes: Processes, tmp_path: Path
) -> None:
    config = runs.small("dlrm.demo", logs, "--checkpoint.interval-steps", "2")
    quick = dataclasses.replace(config, parallel=ParallelConfig(compile=True))
    processes.run(_die, quick, tmp_path / "run", world_size=1)
    resumed = processes.run(runs.train, config, tmp_path / "run", world_size=1)[0]
    assert (resumed["compiled_graphs"], resumed["steps"]) == (0, 10)


def test_compiling_where_weights_are_gathered_within_a_block_is_refused() -> None:
    words = ("--parallel.dense", "deepspeed", "--parallel.zero.stage", "3", "--parallel.compile")
    message = "parallel.compile: stage 3 gathers weights by hooks inside the blocks"
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_overrides(load_recipe("specformer.demo"), list(words))

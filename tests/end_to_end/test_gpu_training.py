# SPDX-License-Identifier: MIT
"""Training on one GPU: NCCL, CUDA kernels of tables under FP16, DeepSpeed's FP16 engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.optimizer import SparseOptimizerConfig
from tests.support import runs
from tests.support.training import Recipe, Session
from trainer.build import build_training, open_loader
from trainer.distributed.deepspeed_zero import ZeroConfig
from trainer.distributed.parallelize import ParallelConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.runtime.runtime import Runtime, RuntimeConfig, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP16 = PrecisionConfig(dtype="fp16", initial_scale=128.0)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    started = start(RuntimeConfig(device="cuda"))
    yield started
    started.stop()


def test_nccl_sums_on_one_gpu(runtime: Runtime) -> None:
    value = torch.ones(3, device=runtime.device)
    dist.all_reduce(value)
    assert value.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_an_overflow_changes_no_bit_of_a_table_in_hbm(
    runtime: Runtime, kind: Any, weights: Any
) -> None:
    # What is rounded stochastically to fp16 was fp16 before, if zero was added to it.
    sparse = SparseOptimizerConfig(kind=kind, learning_rate=0.1, weights=weights)
    session = Session(runtime, Recipe(sparse=sparse, precision=FP16))
    skipped = []
    for number in range(3):
        session.backward(session.batch(number).to(runtime.device))
        if number == 1:
            gradient = session.precision._leaves[-1].grad
            assert gradient is not None
            gradient[0, 0] = float("inf")
        before = {**session.tables(), **session.states(), **session.dense()}
        skipped.append(session.precision.apply().skipped)
        after = {**session.tables(), **session.states(), **session.dense()}
        same = all(torch.equal(before[key], after[key]) for key in before)
        assert same == (number == 1)
    assert skipped == [False, True, False]


def test_a_step_waits_for_the_device_nowhere_in_its_decision(runtime: Runtime) -> None:
    session = Session(runtime, Recipe(precision=FP16))
    for number in range(4):
        session.backward(session.batch(number).to(runtime.device))
        torch.cuda.synchronize()
        if number < 2:  # what is created once may wait
            session.precision.apply()
            continue
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.precision.apply()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_steps_below_the_resolution_of_an_fp16_table_count_on_average(runtime: Runtime) -> None:
    sparse = SparseOptimizerConfig(kind="sgd", learning_rate=1e-4, weights="fp16")
    session = Session(runtime, Recipe(sparse=sparse))
    before = session.tables()
    for number in range(20):
        session.backward(session.batch(number).to(runtime.device))
        session.precision.apply()
    assert any(not torch.equal(before[key], after) for key, after in session.tables().items())


@pytest.mark.parametrize("recipe", ["specformer.demo", "tokenformer.demo"])
def test_a_compiled_tower_trains_like_the_written_one(
    runtime: Runtime, tmp_path: Path, recipe: str
) -> None:
    config = runs.small(recipe, runs.generate(tmp_path / "logs"))
    found = []
    for compiles in (False, True):
        config = dataclasses.replace(config, parallel=ParallelConfig(compile=compiles))
        torch.manual_seed(0)
        training = build_training(config, runtime)
        loader = open_loader(config, runtime, train=True)
        batches, losses = iter(loader), []
        for _ in range(5):
            training.pipeline.progress(batches)
            assert training.pipeline.last_step is not None
            losses.append(training.pipeline.last_step.loss)
        loader.close()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_fp16_skips_together_with_the_tables(
    runtime: Runtime, tmp_path: Path, stage: Any
) -> None:
    parallel = ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=stage))
    config = runs.small("specformer.demo", runs.generate(tmp_path / "logs"))
    config = dataclasses.replace(config, parallel=parallel, precision=FP16)
    training = build_training(config, runtime)
    loader = open_loader(config, runtime, train=True)
    batches, backward = iter(loader), training.precision.backward

    def state() -> list[Tensor]:
        weights = training.dense.whole()
        assert weights is not None
        shards = [
            shard.tensor
            for value in training.parallel.module.state_dict().values()
            if hasattr(value, "local_shards")
            for shard in value.local_shards()
        ]
        return [tensor.detach().clone() for tensor in (*weights.values(), *shards)]

    def spoilt(loss: Tensor, weight_sum: Tensor) -> None:
        backward(loss, weight_sum)
        gradient = training.precision._leaves[-1].grad
        assert gradient is not None
        gradient.view(-1)[0] = float("inf")

    for spoil in (False, True, False):
        training.precision.backward = spoilt if spoil else backward
        before = state()
        training.pipeline.progress(batches)
        assert training.pipeline.last_step is not None
        assert training.pipeline.last_step.skipped == spoil
        same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        assert same == spoil
    loader.close()

# SPDX-License-Identifier: MIT
"""Dense weights under DDP, FSDP2 and DeepSpeed: one training, however they are held.

Short here; `python -m tests.benchmarks.dense` takes 50 steps and measures memory.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from embeddings.collection import local_shards
from tests.support import runs
from tests.support.processes import Processes
from trainer.build import Training, build_training, open_loader
from trainer.checkpoint import dcp
from trainer.checkpoint.dcp import flatten
from trainer.checkpoint.state import TrainState, fused_tensors
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.distributed.deepspeed_zero import ZeroConfig
from trainer.distributed.parallelize import ParallelConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.distributed.train_pipeline import Pipeline
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime
from trainer.trainer import Trainer

STEPS = 6
# Of stage 3 only what is tiny stays whole, as in a large model.
PARALLEL = {
    "ddp": ParallelConfig(),
    "fsdp2": ParallelConfig(dense="fsdp2"),
    "zero0": ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=0)),
    "zero1": ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=1)),
    "zero2": ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=2)),
    "zero3": ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=3, whole_elements=32)),
    "offload": ParallelConfig(dense="deepspeed", zero=ZeroConfig(stage=2, offload="optimizer")),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.generate(tmp_path_factory.mktemp("logs"))


def _config(recipe: str, logs: Path, name: str, *overrides: str) -> TrainConfig:
    config = runs.small(recipe, logs, "--loader.batch-size", "16", *overrides)
    return dataclasses.replace(config, parallel=PARALLEL[name])


def _start(runtime: Runtime, config: TrainConfig) -> Training:
    torch.manual_seed(runtime.seed)  # as a fresh process would
    return build_training(config, runtime)


def _train(runtime: Runtime, configs: dict[str, TrainConfig]) -> dict[str, list[float]]:
    """Train each configuration on the same batches and return its losses."""
    loader = open_loader(next(iter(configs.values())), runtime, train=True)
    epochs = []
    for epoch in range(-(-STEPS // len(loader))):
        loader.set_epoch(epoch)
        epochs += list(loader)
    loader.close()
    found: dict[str, list[float]] = {}
    for name, config in configs.items():
        pipeline = _start(runtime, config).pipeline
        batches, found[name] = iter(epochs[:STEPS]), []
        for _ in range(STEPS):
            pipeline.progress(batches)
            assert pipeline.last_step is not None
            found[name].append(pipeline.last_step.loss)
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("specformer.demo", tuple(PARALLEL)),
        ("rankelastor.demo", ("ddp", "fsdp2", "zero3")),
        ("tokenformer.demo", ("ddp", "fsdp2", "zero3")),
    ],
)
def test_losses_are_the_same_however_dense_weights_are_held(
    recipe: str, names: tuple[str, ...], logs: Path, processes: Processes
) -> None:
    configs = {name: _config(recipe, logs, name) for name in names}
    found = processes.run(_train, configs, timeout_seconds=280)[0]
    expected = found.pop("ddp")
    assert expected[0] != expected[-1]
    for name, losses in found.items():
        assert losses == pytest.approx(expected, rel=1e-5), name


def _everything(training: Training) -> dict[str, Tensor]:
    """Return copies of all state on this rank: tables, whole dense weights, optimizer states."""
    weights = training.dense.whole() or training.parallel.dense_parameters
    parts = {
        "tables": {n: t for n, t in training.parallel.module.state_dict().items()},
        "fused": fused_tensors(training.parallel.fused_optimizer),
        "states": training.dense.tensors(),
    }
    found = {f"dense.{name}": value.detach().clone() for name, value in weights.items()}
    for name, value in flatten(parts):
        if name.startswith("tables.") and not isinstance(value, ShardedTensor):
            continue  # dense weights, which are compared whole
        value = value.full_tensor() if isinstance(value, DTensor) else value
        for shard, row, column in local_shards(value):
            found[f"{name}/{row}/{column}"] = shard.detach().clone()
    return found


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def _overflow(runtime: Runtime, configs: dict[str, TrainConfig]) -> dict[str, Any]:
    """Spoil the gradient of one rank, of a dense weight and of a table; say what has changed."""
    found = {}
    for name, config in configs.items():
        training = _start(runtime, config)
        loader = open_loader(config, runtime, train=True)
        batches = iter(loader)
        training.pipeline.progress(batches)
        outcome = []
        for where in ("dense", "table"):
            backward = training.precision.backward

            def spoilt(loss: Tensor, weight_sum: Tensor, where: str = where) -> None:
                backward(loss, weight_sum)  # noqa: B023
                gradients = training.precision._leaves  # noqa: B023
                targets = [leaf.grad for leaf in gradients if leaf.grad is not None]
                if where == "dense":
                    targets = gradients_of(training)  # noqa: B023
                if runtime.rank == 1:
                    targets[-1].view(-1)[0] = float("inf")  # the last layer's, or a table's

            before = _everything(training)
            training.precision.backward = spoilt
            training.pipeline.progress(batches)
            training.precision.backward = backward
            assert training.pipeline.last_step is not None
            changed = _changed(before, _everything(training))
            outcome.append((training.pipeline.last_step.skipped, changed))
        training.pipeline.progress(batches)
        moved = _changed(before, _everything(training))
        outcome.append((training.pipeline.last_step.skipped, bool(moved)))
        found[name] = outcome
        loader.close()
    return found


def gradients_of(training: Training) -> list[Tensor]:
    """Return what a rank holds of the dense gradients, to be spoilt."""
    dense: Any = training.dense
    found = dense._gradients() if hasattr(dense, "_gradients") else dense.gradients()
    return [gradient for gradient in found if gradient.numel()]


@pytest.mark.dist
def test_an_overflow_on_one_rank_changes_no_bit_however_dense_weights_are_held(
    logs: Path, processes: Processes
) -> None:
    names = ("zero0", "zero2", "zero3")
    configs = {name: _config("specformer.demo", logs, name) for name in names}
    half = PrecisionConfig(dtype="bf16")
    configs["zero1"] = dataclasses.replace(
        configs["zero2"], parallel=PARALLEL["zero1"], precision=half
    )
    scaled = PrecisionConfig(dtype="fp16", initial_scale=128.0)
    configs["fsdp2"] = dataclasses.replace(
        configs["zero2"], parallel=PARALLEL["fsdp2"], precision=scaled
    )
    for found in processes.run(_overflow, configs, timeout_seconds=280):
        for name, outcome in found.items():
            assert outcome == [(True, []), (True, []), (False, True)], name


def _pass_on(runtime: Runtime, configs: dict[str, TrainConfig], folder: Path) -> list[Any]:
    """Train a step under the first choice; hand its state from choice to choice, a step in each."""
    loader = open_loader(next(iter(configs.values())), runtime, train=True)
    batches, outcome = list(loader), []
    loader.close()
    state: dict[str, Tensor] = {}
    for number, (name, config) in enumerate(configs.items()):
        training = _start(runtime, config)
        saved = TrainState(training.parallel, training.dense, runtime)
        if number:
            saved.load(folder / f"step-{number}")
            outcome.append((name, _changed(state, _everything(training))))
        else:
            training.pipeline.progress(iter(batches[:1]))
            state = _everything(training)
        dcp.save(saved.tensors(), folder, number + 1, {})
        pipeline = Pipeline(training.parallel, training.precision, runtime.device)
        pipeline.progress(iter(batches[1:2]))
        assert pipeline.last_step is not None
        outcome.append(pipeline.last_step.loss)
    return outcome


@pytest.mark.dist
def test_a_checkpoint_of_one_choice_is_read_bit_by_bit_under_every_other(
    logs: Path, processes: Processes, tmp_path: Path
) -> None:
    names = ("ddp", "zero2", "fsdp2", "zero3", "offload", "zero0")
    configs = {name: _config("specformer.demo", logs, name) for name in names}
    configs["ddp again"] = configs["ddp"]
    outcome = processes.run(_pass_on, configs, tmp_path, timeout_seconds=280)[0]
    losses = [part for part in outcome if isinstance(part, float)]
    assert losses == pytest.approx([losses[0]] * len(names) + [losses[0]], rel=1e-6)
    assert [part for part in outcome if isinstance(part, tuple)] == [
        (name, []) for name in [*names[1:], "ddp again"]
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("--parallel.dense", "fsdp2", "--parallel.zero.stage", "3"),
            "parallel.zero: has no effect",
        ),
        (
            ("--parallel.dense", "deepspeed", "--parallel.find-unused-parameters"),
            "parallel.find_unused_parameters: has no effect",
        ),
        (("--parallel.dense", "fsdp2", "--parallel.bucket-megabytes", "1"), "bucket_megabytes"),
        (("--parallel.dense", "horovod"), "expected one of 'ddp', 'fsdp2', 'deepspeed'"),
        (
            ("--parallel.dense", "deepspeed", "--parallel.zero.offload", "all"),
            "'all' needs stage 3 or higher, got stage 2",
        ),
        (
            ("--parallel.dense", "deepspeed", "--parallel.zero.whole-elements", "9"),
            "whole_elements: has no effect on stage 2",
        ),
        (
            ("--parallel.dense", "deepspeed", "--precision.dtype", "fp16"),
            "DeepSpeed's FP16 engine runs on GPUs only",
        ),
        (
            (
                *("--parallel.dense", "deepspeed", "--parallel.zero.stage", "0"),
                *("--precision.dtype", "bf16"),
            ),
            "stage 0 with precision.dtype 'bf16'",
        ),
    ],
)
def test_a_choice_that_cannot_work_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_overrides(load_recipe("specformer.demo"), ["--runtime.device", "cpu", *settings])


def _begin(runtime: Runtime, configs: dict[str, TrainConfig], folder: Path) -> None:
    """Begin each run with what it inherits, and save it before its first step."""
    for name, config in configs.items():
        trainer = Trainer(config, folder / name, runtime)
        trainer._save()
        trainer.saver.wait(last=True)
        trainer.train_loader.close()
        trainer.test_loader.close()


@pytest.mark.dist
def test_a_run_inherits_the_same_however_its_dense_weights_are_held(
    logs: Path, processes: Processes, tmp_path: Path
) -> None:
    words = ("--epochs", "2", "--loader.order", "none")
    for number, name in enumerate(("warmup", "ddp")):
        config = _config("dlrm.demo", logs, name="ddp")
        source = apply_overrides(
            config, [*words, "--stop-epoch", "1", "--runtime.seed", str(number)]
        )
        processes.run(runs.train, source, tmp_path / name)
    source = ("--inherit.path", str(tmp_path / "ddp"), "--inherit.policy")
    policies = {
        "progressive": ("progressive", "--inherit.warmup", str(tmp_path / "warmup")),
        "continue": ("continue",),
    }
    configs = {
        f"{policy} {name}": _config("dlrm.demo", logs, name, *words, *source, *rest)
        for policy, rest in policies.items()
        for name in ("ddp", "fsdp2", "zero2", "zero3")
    }
    processes.run(_begin, configs, tmp_path, timeout_seconds=280)
    for policy in policies:
        expected = runs.saved(tmp_path / f"{policy} ddp")
        for name in ("fsdp2", "zero2", "zero3"):
            found = runs.saved(tmp_path / f"{policy} {name}")
            assert found.keys() == expected.keys()
            assert [n for n in found if not torch.equal(found[n], expected[n])] == [], name

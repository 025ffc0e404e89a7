# SPDX-License-Identifier: MIT
"""The two-phase backward: what reaches the tables, and that an overflow reaches nothing."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embeddings.optimizer import SparseOptimizerConfig
from tests.support.processes import Processes
from tests.support.training import Recipe, Session, train, whole_tables
from trainer.build import settle
from trainer.distributed.precision import PrecisionConfig
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime, RuntimeConfig, start

SGD = SparseOptimizerConfig(kind="sgd", learning_rate=1.0)
ADAGRAD = SparseOptimizerConfig(learning_rate=0.1)


def _spoil_step(runtime: Runtime, sparse: SparseOptimizerConfig, where: str, dtype: Any) -> Any:
    """Take a good step, then one with a gradient of rank 1 spoilt; say what changed."""
    session = Session(runtime, Recipe(sparse=sparse, precision=PrecisionConfig(dtype=dtype)))
    session.backward(session.batch(0))
    first = session.precision.apply()
    before = (session.tables(), session.states(), session.dense())
    session.backward(session.batch(1))
    if where == "dense":
        spoilt = session.parallel.dense_parameters["rest.out.weight"]
    else:
        spoilt = session.precision._leaves[0 if where == "sequence" else -1]
    if runtime.rank == 1:
        assert spoilt.grad is not None
        spoilt.grad[0, 0] = float("nan")
    skip = session.precision.apply()
    after = (session.tables(), session.states(), session.dense())
    changed = [
        key
        for old, new in zip(before, after, strict=True)
        for key in old
        if not torch.equal(old[key], new[key])
    ]
    session.backward(session.batch(2))
    last = session.precision.apply()
    moved = any(not torch.equal(after[0][key], value) for key, value in session.tables().items())
    return changed, moved, [step.skipped for step in (first, skip, last)], last


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sparse", "where", "dtype"),
    [
        (ADAGRAD, "pooled", "fp16"),
        (SGD, "sequence", "fp16"),
        (ADAGRAD, "dense", "fp16"),
        (SGD, "pooled", "fp32"),
        (ADAGRAD, "pooled", "bf16"),
    ],
)
def test_one_bad_gradient_on_one_rank_changes_no_bit_on_any(
    processes: Processes, sparse: SparseOptimizerConfig, where: str, dtype: str
) -> None:
    scale = 65536.0 if dtype == "fp16" else 1.0
    for changed, moved, skipped, last in processes.run(_spoil_step, sparse, where, dtype):
        assert changed == []
        assert moved
        assert skipped == [False, True, False]
        assert last.loss_scale == (scale / 2 if dtype == "fp16" else scale)
        assert last.num_skipped == 1


def _everything(session: Session) -> dict[Any, torch.Tensor]:
    return {**session.tables(), **session.states(), **session.dense()}


def _spoil_at_random(runtime: Runtime, sparse: SparseOptimizerConfig, patterns: int) -> Any:
    """Take `patterns` steps, most with gradients spoilt somewhere on some rank; say what broke."""
    precision = PrecisionConfig(dtype="fp16", initial_scale=256.0, growth_interval=3)
    session = Session(runtime, Recipe(sparse=sparse, precision=precision))
    draw = random.Random(5)  # the same on all ranks
    faults: list[str] = []
    scale, good, skips = 256.0, 0, 0
    for number in range(patterns):
        session.precision.loss_scale = scale = max(scale, 2.0)
        session.backward(session.batch(number))
        weights = list(session.parallel.dense_parameters.values())
        targets = [p for p in weights if p.grad is not None] + session.precision._leaves
        ranks = draw.choice([(), (0,), (1,), (0, 1)])
        for rank in ranks:
            target = targets[draw.randrange(len(targets))]
            value, position = (
                draw.choice([float("nan"), float("inf"), -float("inf")]),
                draw.random(),
            )
            if rank == runtime.rank:
                assert target.grad is not None
                flat = target.grad.view(-1)
                flat[int(position * flat.numel())] = value
        before = _everything(session)
        step = session.precision.apply()
        after = _everything(session)
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        if step.skipped != bool(ranks) or bool(changed) == bool(ranks):
            faults.append(f"pattern {number} on ranks {ranks}: {step.skipped=}, {changed=}")
        good = 0 if ranks else good + 1
        skips += bool(ranks)
        scale = scale / 2 if ranks else scale * (2 if good == 3 else 1)
        good %= 3
        if session.precision.loss_scale != scale or step.num_skipped != skips:
            faults.append(f"pattern {number}: scale {session.precision.loss_scale}, not {scale}")
    finite = all(bool(value.isfinite().all()) for value in _everything(session).values())
    return faults, skips, finite


@pytest.mark.dist
def test_200_random_overflows_change_nothing_and_halve_the_scale_once(
    processes: Processes,
) -> None:
    for faults, skips, finite in processes.run(_spoil_at_random, ADAGRAD, 200):
        assert faults == []
        assert 100 < skips < 200
        assert finite


class _HostReads(TorchDispatchMode):
    """Counts the numbers that the host takes off the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def _count_host_reads(runtime: Runtime, zero_is_no_update: bool) -> list[int]:
    precision = PrecisionConfig(dtype="fp16", max_norm=0.1, clip="all")
    session = Session(runtime, Recipe(sparse=ADAGRAD, precision=precision))
    session.precision._zero_is_no_update = zero_is_no_update
    counts = []
    for number in range(3):
        session.backward(session.batch(number))
        with _HostReads() as reads:
            session.precision.apply()
        counts.append(reads.count)
    return counts


@pytest.mark.dist
def test_a_decision_is_not_read_on_the_host(processes: Processes) -> None:
    # From the second step on, the count of skips of the step before is read: it has arrived.
    assert processes.run(_count_host_reads, True)[0] == [0, 1, 1]
    # An optimizer that moves at a gradient of zeros has to be told by the host.
    assert processes.run(_count_host_reads, False)[0] == [1, 2, 2]


def _overflow_for_real(runtime: Runtime) -> Any:
    """Start at a scale beyond fp16 and train until it fits."""
    config = PrecisionConfig(dtype="fp16", initial_scale=2.0**31)
    session = Session(runtime, Recipe(precision=config, sparse=ADAGRAD))
    before = (session.tables(), session.states(), session.dense())
    scales: list[float] = []
    for step in itertools.count():
        session.backward(session.batch(0))
        result = session.precision.apply()
        scales.append(result.loss_scale)
        after = (session.tables(), session.states(), session.dense())
        same = all(
            torch.equal(old[key], new[key])
            for old, new in zip(before, after, strict=True)
            for key in old
        )
        assert same == result.skipped
        if not result.skipped:
            finite = all(
                bool(torch.isfinite(value).all()) for part in after for value in part.values()
            )
            return scales, finite, result.num_skipped, step


@pytest.mark.dist
def test_a_scale_beyond_fp16_halves_until_it_fits_and_nothing_moves_before(
    processes: Processes,
) -> None:
    outcomes = processes.run(_overflow_for_real)
    scales, finite, skipped, step = outcomes[0]
    assert scales[:3] == [2.0**31, 2.0**30, 2.0**29]
    assert finite
    assert 1 <= skipped == step < 31
    assert outcomes[0] == outcomes[1]


def _train_at_scale(runtime: Runtime, scale: float, sparse: SparseOptimizerConfig) -> Any:
    session = Session(runtime, Recipe(sparse=sparse))
    session.precision.loss_scale = scale
    for batch in session.batches():
        session.backward(batch)
        session.precision.apply()
    return session.tables()


@pytest.mark.dist
@pytest.mark.parametrize("sparse", [SGD, ADAGRAD])
def test_the_loss_scale_does_not_reach_the_tables(
    processes: Processes, sparse: SparseOptimizerConfig
) -> None:
    plain = processes.run(_train_at_scale, 1.0, sparse)
    scaled = processes.run(_train_at_scale, 65536.0, sparse)
    for expected, found in zip(plain, scaled, strict=True):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=0)


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_trains_the_same_tables_within_its_rounding(
    processes: Processes, dtype: Any, tolerance: float
) -> None:
    recipe = Recipe(sparse=dataclasses.replace(SGD, learning_rate=0.5))
    full = processes.run(train, recipe)
    half = processes.run(train, dataclasses.replace(recipe, precision=PrecisionConfig(dtype=dtype)))
    assert [step.skipped for step in half[0].steps] == [False] * 4
    assert half[0].losses == pytest.approx(full[0].losses, rel=tolerance)
    start, after, expected = whole_tables(full, start=True), whole_tables(half), whole_tables(full)
    for name, table in after.items():
        change, wanted = table - start[name], expected[name] - start[name]
        assert (change - wanted).norm() < 5 * tolerance * wanted.norm(), name


def _norms(runtime: Runtime, precision: PrecisionConfig) -> Any:
    session = Session(runtime, Recipe(sparse=SGD, precision=precision))
    session.backward(session.batch(0))
    step = session.precision.apply()
    kept = [p.grad for p in session.parallel.dense_parameters.values() if p.grad is not None]
    return step.gradient_norm, torch.stack([g.norm() for g in kept]).norm().item()


@pytest.mark.dist
def test_clipping_is_by_the_norm_of_the_whole_batch_at_any_number_of_ranks(
    processes: Processes,
) -> None:
    for clip in ("dense", "all"):
        config = PrecisionConfig(max_norm=1e-3, clip=clip)  # type: ignore
        (one,) = processes.run(_norms, config, world_size=1)
        two = processes.run(_norms, config)
        assert two[0] == two[1]
        assert two[0] == pytest.approx(one, rel=1e-5)
        norm, clipped = one
        assert norm > 1e-3
        if clip == "dense":
            dense_norm = norm
            assert clipped == pytest.approx(1e-3, rel=1e-5)
        else:
            assert norm > dense_norm
            assert clipped == pytest.approx(1e-3 * dense_norm / norm, rel=1e-4)


@pytest.mark.dist
def test_clipping_the_dense_gradient_leaves_the_tables_gradients_as_they_are(
    processes: Processes,
) -> None:
    def tables(**settings: Any) -> dict[str, torch.Tensor]:
        recipe = Recipe(num_steps=1, sparse=SGD, precision=PrecisionConfig(**settings))
        return whole_tables(processes.run(train, recipe))

    free, dense, whole = tables(), tables(max_norm=1e-3), tables(max_norm=1e-3, clip="all")
    for name, table in free.items():
        assert torch.equal(dense[name], table), name
    assert any(not torch.equal(whole[name], table) for name, table in free.items())


def _grow_and_resume(runtime: Runtime, config: PrecisionConfig) -> Any:
    """Train 5 steps; hand the state to a second session after it."""
    session = Session(runtime, Recipe(num_steps=5, precision=config))
    scales = []
    for batch in session.batches():
        session.backward(batch)
        scales.append(session.precision.apply().loss_scale)
    resumed = Session(runtime, Recipe(precision=config)).precision
    resumed.load_state_dict(session.precision.state_dict())
    return scales, resumed.state_dict() == session.precision.state_dict(), resumed.loss_scale


@pytest.mark.dist
def test_the_scale_doubles_after_the_growth_interval_and_survives_a_resume(
    processes: Processes,
) -> None:
    config = PrecisionConfig(dtype="fp16", initial_scale=1024.0, growth_interval=2)
    ((scales, same, resumed_scale),) = processes.run(_grow_and_resume, config, world_size=1)
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 4096.0]
    assert same and resumed_scale == 4096.0


def _never_finite(runtime: Runtime, config: PrecisionConfig) -> str:
    session = Session(runtime, Recipe(precision=config))
    try:
        for _ in range(5):
            session.backward(session.batch(0))
            next(iter(session.precision._leaves)).grad.fill_(float("nan"))  # type: ignore
            session.precision.apply()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_run_without_finite_gradients_fails_on_all_ranks(processes: Processes) -> None:
    messages = processes.run(_never_finite, PrecisionConfig(max_consecutive_skips=3))
    assert messages[0] == messages[1]
    assert "no finite gradient in 3 steps in a row" in messages[0]


def _train_without_embeddings(runtime: Runtime) -> str:
    session = Session(runtime, Recipe())
    try:
        session.parallel.model.get_submodule("tokenizer")(torch.zeros(1), torch.zeros(1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_tokenizer_that_gets_no_embeddings_is_refused(processes: Processes) -> None:
    (message,) = processes.run(_train_without_embeddings, world_size=1)
    assert "expected the tokenizer to be called with Embeddings" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp8"}, "precision.dtype: expected one of"),
        ({"clip": "none"}, "precision.clip: expected 'dense' or 'all'"),
        ({"clip": "all"}, "no effect without max_norm"),
        ({"dtype": "fp16", "initial_scale": 0.0}, "precision.initial_scale"),
        ({"dtype": "fp16", "growth_interval": 0}, "must be at least 1"),
        ({"initial_scale": 1024.0}, "no effect on dtype 'fp32'"),
        ({"dtype": "bf16", "growth_interval": 5}, "no effect on dtype 'bf16'"),
        ({"max_norm": -1.0}, "precision.max_norm"),
        ({"max_consecutive_skips": 0}, "must be at least 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionConfig(**settings)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx2": True}, "fp32")],
    ids=["avx512_bf16", "amx", "neither"],
)
def test_auto_is_what_the_cpu_multiplies_in_and_is_written_down(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    runtime = start(RuntimeConfig(device="cpu"))
    try:
        assert PrecisionConfig(dtype="auto").settled(runtime).dtype == dtype
        config = dataclasses.replace(
            load_recipe("dlrm.demo"), precision=PrecisionConfig(dtype="auto")
        )
        assert settle(config, runtime).precision == PrecisionConfig(dtype=dtype)
        assert PrecisionConfig(dtype="fp16").settled(runtime).dtype == "fp16"
    finally:
        runtime.stop()


def _settle_apart(runtime: Runtime) -> str:
    features = {"avx512_bf16": runtime.rank == 0}
    with patch.object(torch.cpu, "get_capabilities", return_value=features):
        return PrecisionConfig(dtype="auto").settled(runtime).dtype


@pytest.mark.dist
def test_auto_is_fp32_where_one_rank_s_cpu_cannot(processes: Processes) -> None:
    assert processes.run(_settle_apart) == ["fp32", "fp32"]

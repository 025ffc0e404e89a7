# SPDX-License-Identifier: MIT
"""Vectors and gradients that travel in half precision: as near as that rounds, and never lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.sharding.exchange import Exchange, Narrow, WireFormat
from embeddings.sharding.sharding import ShardingConfig
from tests.support.processes import Processes
from tests.support.training import Outcome, Recipe, Session, train, whole_tables
from trainer.distributed.precision import PrecisionConfig
from trainer.runtime.runtime import Runtime

SGD = SparseOptimizerConfig(kind="sgd", learning_rate=0.5)
KINDS: dict[str, Any] = {
    "by table": {"sharding_types": ("table_wise",)},
    "by row": {"sharding_types": ("row_wise",), "tables": {"action": "table_wise"}},
    "ids once": {"sharding_types": ("table_wise",), "dedup": True},
}


def _backward(exchange: Exchange) -> Narrow:
    assert exchange.codecs is not None
    codec: Any = exchange.codecs["SEQUENCE_EMBEDDINGS_ALL_TO_ALL"].backward
    return codec


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e9])
def test_fp16_gradients_of_any_size_arrive_and_their_sums_do_too(size: float) -> None:
    exchange = Exchange("fp16")
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * size
    exchange.expect(gradient.double().norm())
    codec = _backward(exchange)
    arrived = codec.decode(codec.encode(gradient))
    assert float((arrived - gradient).norm() / gradient.norm()) < 5e-4
    # Of one id that a million places read, all with gradients of one sign.
    exchange.expect(torch.tensor(1000.0 * size, dtype=torch.float64))
    total = torch.tensor([1e6 * size])
    assert torch.allclose(codec.decode(codec.encode(total)), total, rtol=1e-3)


@pytest.mark.parametrize("norm", [0.0, float("inf"), float("nan")])
def test_a_step_that_is_skipped_sends_zeros(norm: float) -> None:
    exchange = Exchange("fp16")
    exchange.expect(torch.tensor(norm, dtype=torch.float64))
    codec = _backward(exchange)
    assert codec.decode(codec.encode(torch.zeros(3))).tolist() == [0.0, 0.0, 0.0]


def _recipes(kind: str, dtype: Any) -> dict[WireFormat, Recipe]:
    recipe = Recipe(
        sparse=SGD,
        precision=PrecisionConfig(dtype=dtype),
        sharding=ShardingConfig(**KINDS[kind]),
    )
    wires: tuple[WireFormat, ...] = ("fp32", "fp16", "bf16")
    return {
        wire: dataclasses.replace(
            recipe, sharding=dataclasses.replace(recipe.sharding, exchange=wire)
        )
        for wire in wires
    }


def _moved(outcomes: list[Outcome]) -> Tensor:
    before, after = whole_tables(outcomes, start=True), whole_tables(outcomes)
    return torch.cat([(after[name] - before[name]).flatten() for name in after])


def _train_all(runtime: Runtime, recipes: dict[WireFormat, Recipe]) -> dict[WireFormat, Outcome]:
    return {wire: train(runtime, recipe) for wire, recipe in recipes.items()}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, "fp32") for kind in KINDS] + [("by row", "fp16")]
)
def test_training_differs_by_no_more_than_the_format_rounds(
    kind: str, dtype: str, processes: Processes
) -> None:
    ranks = processes.run(_train_all, _recipes(kind, dtype))
    moved = {wire: _moved([rank[wire] for rank in ranks]) for wire in ranks[0]}
    exact, losses = moved["fp32"], ranks[0]["fp32"].losses
    for wire, rounding in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
        difference = float((moved[wire] - exact).norm() / exact.norm())
        assert 0 < difference < 4 * rounding * (1 if dtype == "fp32" else 4)
        assert ranks[0][wire].losses == pytest.approx(losses, rel=8 * rounding)


def _overflow(runtime: Runtime, recipe: Recipe) -> tuple[list[bool], list[bool]]:
    """Spoil a gradient of the second step on rank 1; return what was skipped and what stayed."""
    session, skipped, same = Session(runtime, recipe), [], []
    for number in range(3):
        session.backward(session.batch(number))
        if number == 1 and runtime.rank == 1:
            gradient = session.precision._leaves[-1].grad
            assert gradient is not None
            gradient[0, 0] = float("inf")
        before = session.tables()
        skipped.append(session.precision.apply().skipped)
        after = session.tables()
        same.append(all(torch.equal(before[key], after[key]) for key in before))
    return skipped, same


@pytest.mark.dist
def test_an_overflow_changes_no_bit_of_a_table_whose_gradients_travel_in_fp16(
    processes: Processes,
) -> None:
    for skipped, same in processes.run(_overflow, _recipes("by row", "fp16")["fp16"]):
        assert skipped == [False, True, False]
        assert same == [False, True, False]


def test_a_format_that_does_not_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange: expected one of"):
        ShardingConfig(exchange="int8")  # type: ignore

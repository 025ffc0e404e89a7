# SPDX-License-Identifier: MIT
"""Fused optimizers against their formulas, unsharded and sharded."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from embeddings.collection import EmbeddingLayer, local_shards
from embeddings.optimizer import DEFAULT_EPS, SparseOptimizerConfig, fuse_optimizer, state_bytes
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from models.batch import Batch
from tests.support.processes import Processes
from tests.support.tiny import make_batch
from tests.support.training import Recipe, Session
from trainer.distributed.optimizer import DenseOptimizerConfig
from trainer.runtime.runtime import Runtime

SCHEMA = Schema(
    tables=(Table(name="t", num_embeddings=6, embedding_dim=4),),
    sparse=(SparseFeature(name="a", table="t", kind="sequence", max_length=4, history="h"),),
    labels=(Label(name="click"),),
)
KINDS = ("rowwise_adagrad", "adagrad", "sgd")


def _expect(weight: Tensor, state: Tensor, gradient: Tensor, config: SparseOptimizerConfig) -> Any:
    """Return weight and state after one step of the optimizer's formula."""
    if config.kind == "sgd":
        return weight - config.learning_rate * gradient, state
    square = gradient.square()
    if config.kind == "rowwise_adagrad":
        square = square.mean(1, keepdim=True).expand_as(gradient)
    state = state + square
    return weight - config.learning_rate * gradient / (state.sqrt() + config.eps), state


@pytest.mark.parametrize("kind", KINDS)
def test_an_unsharded_table_follows_the_formula_and_leaves_other_rows_alone(kind: Any) -> None:
    config = SparseOptimizerConfig(kind=kind, learning_rate=0.1)
    layer = EmbeddingLayer(SCHEMA, seed=1)
    fuse_optimizer(layer, config)
    (weight,) = layer.parameters()
    expected, state = weight.detach().clone(), torch.zeros(6, 4)
    direction = torch.arange(12.0).view(3, 4) - 3
    for _ in range(3):
        features = SCHEMA.sparse[0].name
        rows = torch.tensor(
            [2, 5, 2]
        )  # a repeated id: its gradients add up before they are squared
        sequence = layer(_kjt(features, rows)).sequences["a"].values()
        (sequence * direction).sum().backward()
        gradient = torch.zeros(6, 4).index_add(0, rows, direction)
        expected, state = _expect(expected, state, gradient, config)
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(
        weight[[0, 1, 3, 4]], EmbeddingLayer(SCHEMA, seed=1).state_dict().popitem()[1][[0, 1, 3, 4]]
    )


def _kjt(name: str, rows: Tensor) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=[name], values=rows, lengths=torch.tensor([len(rows)]))


def _one_sharded_step(runtime: Runtime, config: SparseOptimizerConfig) -> Any:
    """Take two steps and return, of the `user` table, weights and gradients by the chain rule."""
    session = Session(runtime, Recipe(sparse=config))
    history = []
    for step in range(2):
        batch = session.batch(step)
        before = _table(session)
        session.backward(batch)
        leaf = session.precision._leaves[-1]  # the pooled columns; 16 to 23 are the user's
        scale = 1.0 / session.precision._usual_weight
        assert leaf.grad is not None
        pooled = leaf.grad[:, 16:24] / scale / batch.weights.sum()
        gradient = torch.zeros(50, 8).index_add(0, batch.sparse["user"].values(), pooled)
        session.precision.apply()
        history.append((before, gradient, _table(session)))
    return history


def _table(session: Session) -> Tensor:
    layer = session.parallel.model.get_submodule("embeddings")
    assert isinstance(layer, EmbeddingLayer)
    ((shard, _, _),) = local_shards(layer.table_weights()["user"])
    return shard.detach().clone()


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_table_follows_the_formula(processes: Processes, kind: Any) -> None:
    config = SparseOptimizerConfig(kind=kind, learning_rate=0.1)
    (history,) = processes.run(_one_sharded_step, config, world_size=1)
    state = torch.zeros(50, 8)
    for before, gradient, after in history:
        expected, state = _expect(before, state, gradient, config)
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)
        untouched = (gradient == 0).all(1)
        assert untouched.any() and torch.equal(after[untouched], before[untouched])


def _eps_is_felt(runtime: Runtime, eps: dict[str, Any]) -> float:
    session = Session(runtime, Recipe(sparse=SparseOptimizerConfig(learning_rate=0.1, **eps)))
    before = _table(session)
    batch: Batch = make_batch(8, 0)
    session.backward(batch)
    session.precision.apply()
    return (_table(session) - before).abs().max().item()


@pytest.mark.dist
def test_eps_reaches_the_fused_kernel(processes: Processes) -> None:
    changes = [
        processes.run(_eps_is_felt, eps, world_size=1)[0]
        for eps in (
            {},
            {"eps": 1e-8},
            {"eps": 1.0},
            {"table_eps": {"user": 1.0}},
            {"table_eps": {"item": 1.0}},
        )
    ]
    default, small, large, own, others = changes
    assert default == small == others > 0.05
    assert own == large < 0.02


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad"])
def test_one_eps_is_the_default_of_tables_and_dense_weights_sharded_or_not(kind: Any) -> None:
    config = SparseOptimizerConfig(kind=kind)
    assert config.eps == DenseOptimizerConfig().eps == DEFAULT_EPS
    layer = EmbeddingLayer(SCHEMA, seed=1)
    fuse_optimizer(layer, config)
    (weight,) = layer.parameters()
    # What the unsharded optimizer runs with, and what a sharded table's kernel is given.
    assert cast(Any, weight)._in_backward_optimizers[0].defaults["eps"] == DEFAULT_EPS
    assert cast(Any, weight)._optimizer_kwargs == [{"lr": 0.02, "eps": DEFAULT_EPS}]


def test_what_an_optimizer_runs_with_is_said_in_one_line() -> None:
    config = SparseOptimizerConfig(table_learning_rates={"t": 0.1}, table_eps={"u": 1e-4})
    assert config.describe() == (
        "rowwise_adagrad, learning rate 0.02, eps 1e-08, learning rate 0.1 of 't', eps 0.0001 of "
        "'u'"
    )
    assert SparseOptimizerConfig(kind="sgd").describe() == "sgd, learning rate 0.02"
    assert "betas 0.9 and 0.999" in SparseOptimizerConfig(kind="adam").describe()


def _adam(runtime: Runtime) -> str:
    try:
        Session(runtime, Recipe(sparse=SparseOptimizerConfig(kind="adam")))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_adam_is_refused_where_it_has_no_kernel_and_the_device_is_named(
    processes: Processes,
) -> None:
    (message,) = processes.run(_adam, world_size=1)
    assert message == (
        "sparse.kind: 'adam' has no fused kernel on cpu, only on cuda; use one of "
        "['rowwise_adagrad', 'adagrad', 'sgd'], or train there"
    )
    SparseOptimizerConfig(kind="adam").check_device("cuda")


def test_adam_is_planned_with_two_numbers_a_weight_and_its_kernel_gets_its_settings() -> None:
    config = SparseOptimizerConfig(kind="adam", learning_rate=0.1, beta1=0.8)
    layer = EmbeddingLayer(SCHEMA, torch.device("meta"))
    fuse_optimizer(layer, config)
    (weight,) = layer.parameters()
    options = cast(Any, weight)._optimizer_kwargs[0]
    assert options == {"lr": 0.1, "eps": DEFAULT_EPS, "beta1": 0.8, "beta2": 0.999}
    kernel: Any = optimizer_type_to_emb_opt_type(cast(Any, weight)._optimizer_classes[0])
    assert kernel.value == "adam"
    per_row = {kind: state_bytes(kind, 16) for kind in (*KINDS, "adam")}
    assert per_row == {"rowwise_adagrad": 4, "adagrad": 64, "sgd": 0, "adam": 128}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "adamax"}, "kind: expected one of"),
        ({"beta1": 0.8}, "beta1 and beta2: have no effect on kind 'rowwise_adagrad'"),
        ({"kind": "adam", "beta2": 1.0}, "beta1 and beta2: expected numbers"),
        ({"table_eps": {"t": 0.0}}, "eps of table 't': expected a number > 0, got 0.0"),
        ({"kind": "sgd", "table_eps": {"t": 1e-6}}, "eps: has no effect on kind 'sgd'"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number > 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"eps": 0.0}, "eps: expected a number > 0"),
        ({"kind": "sgd", "eps": 1e-6}, "eps: has no effect on kind 'sgd'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseOptimizerConfig(**settings)


def test_a_table_with_a_rate_of_its_own_moves_by_that_rate() -> None:
    table = SCHEMA.tables[0].name
    config = SparseOptimizerConfig(
        kind="sgd", learning_rate=1.0, table_learning_rates={table: 0.25}
    )
    layer = EmbeddingLayer(SCHEMA, seed=1)
    fuse_optimizer(layer, config)
    (weight,) = layer.parameters()
    before = weight.detach().clone()
    sequence = layer(_kjt(SCHEMA.sparse[0].name, torch.tensor([2]))).sequences["a"].values()
    sequence.sum().backward()
    torch.testing.assert_close(weight.detach()[2], before[2] - 0.25)
    with pytest.raises(ValueError, match="learning_rate"):
        SparseOptimizerConfig(table_learning_rates={table: 0.0})

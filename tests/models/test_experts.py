# SPDX-License-Identifier: MIT
"""Heads of several tasks against derivations in NumPy's float64, one row at a time."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.schema import Label
from models.batch import Batch
from models.experts import chained_logits
from models.heads import HeadConfig
from models.losses import TaskLoss, weighted_bce
from models.ranking import ModelConfig, RankingModel
from tests.support.derivation import Array, array, randomize, relu, softmax
from tests.support.processes import Processes
from tests.support.tiny import SCHEMA, make_batch
from trainer.distributed.dense import Replicated
from trainer.distributed.parallelize import ParallelConfig, parallelize
from trainer.distributed.precision import PrecisionConfig
from trainer.recipes.towers import TOWERS
from trainer.runtime.runtime import Runtime

D, ROWS = 6, 16
HEADS = {
    "mmoe": HeadConfig(kind="mmoe", hidden_units=(5, 4), num_experts=3, task_units=(3,)),
    "cgc": HeadConfig(kind="ple", hidden_units=(5,), num_experts=2, task_units=(3,)),
    "ple": HeadConfig(kind="ple", hidden_units=(5, 4), num_experts=2, num_levels=3),
    "esmm": HeadConfig(kind="esmm", hidden_units=(5, 4)),
}
TWO_LABELS = dataclasses.replace(SCHEMA, labels=(Label(name="click"), Label(name="buy")))


def layers(module: Any, number: int, x: Array) -> Array:
    """Return what the MLP with this number makes of one vector."""
    for linear in module.linears:
        x = relu(x @ array(linear.weight)[number] + array(linear.bias)[number])
    return x


def own_logit(tasks: Any, task: int, x: Array) -> float:
    hidden = layers(tasks.hidden, task, x)
    weight, bias = array(tasks.logits.weight)[task], array(tasks.logits.bias)[task]
    return float((hidden @ weight + bias)[0])


def mixed(gate: Array, experts: list[Array]) -> Array:
    return sum((w * one for w, one in zip(softmax(gate), experts, strict=True)), np.zeros(()))


def mixture(head: Any, config: HeadConfig, x: Array, tasks: int) -> list[Array]:
    """Return what MMoE or PLE gives to each task for one row."""
    if config.kind == "mmoe":
        gates = array(head.mixture.gates.weight)
        experts = [layers(head.mixture.experts, e, x) for e in range(config.num_experts)]
        return [mixed(x @ gates[k], experts) for k in range(tasks)]
    size, streams = config.num_experts, [x] * (tasks + 1)
    for level in head.mixture.levels:
        groups = [
            [layers(level.experts, g * size + e, streams[g]) for e in range(size)]
            for g in range(tasks + 1)
        ]
        gates = array(level.gates.weight)
        after = [mixed(streams[k] @ gates[k], groups[k] + groups[tasks]) for k in range(tasks)]
        if level.shared_gate is not None:
            gate = streams[tasks] @ array(level.shared_gate.weight)[0]
            after.append(mixed(gate, [one for group in groups for one in group]))
        streams = after
    return streams


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("tasks", [2, 3])
def test_a_head_is_what_its_paper_says(name: str, tasks: int) -> None:
    config = HEADS[name]
    tasks = 2 if name == "esmm" else tasks
    head: Any = config.build(D, tasks).double()
    randomize(head, 1)
    inputs = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = np.zeros((4, tasks))
    for row, x in enumerate(inputs.numpy()):
        if name == "esmm":
            own = [own_logit(head.tasks, k, layers(head.hidden, k, x)) for k in range(2)]
            click, conversion = (1 / (1 + math.exp(-one)) for one in own)
            expected[row] = click, click * conversion
        else:
            parts = mixture(head, config, x, tasks)
            logits = [own_logit(head.tasks, k, part) for k, part in enumerate(parts)]
            expected[row] = 1 / (1 + np.exp(-np.array(logits)))
    found = head(inputs).sigmoid().detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_the_product_of_probabilities_neither_under_nor_overflows() -> None:
    own = torch.tensor([[-90.0, -90.0], [90.0, 90.0], [90.0, -2.0], [0.0, 0.0]], requires_grad=True)
    found = chained_logits(own)
    expected = torch.tensor([-180.0, 90.0 - math.log(2), -2.0, -math.log(3)])
    torch.testing.assert_close(found[:, 1], expected)
    found.sum().backward()
    assert own.grad is not None and bool(own.grad.isfinite().all())


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_experts_starts_at_its_priors(name: str) -> None:
    head = dataclasses.replace(HEADS[name], prior=(0.3, 0.04)).build(D, 2)
    shares = head(torch.zeros(2, D)).sigmoid()
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.04]).expand(2, 2))


@pytest.mark.parametrize("name", HEADS)
def test_every_weight_of_a_head_is_trained_and_rows_are_independent(name: str) -> None:
    head = HEADS[name].build(D, 2)
    randomize(head, 1)
    inputs = torch.randn(64, D, generator=torch.Generator().manual_seed(3))
    out = head(inputs)
    torch.testing.assert_close(head(inputs[[5, 2]]), out[[5, 2]])
    assert head(inputs[:0]).shape == (0, 2)
    out.square().sum().backward()
    for path, parameter in head.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "esmm", "num_experts": 3}, "num_experts has no effect on kind 'esmm'"),
        ({"num_levels": 2}, "num_levels has no effect on kind 'shared_bottom'"),
        ({"kind": "mmoe", "hidden_units": ()}, "needs hidden_units"),
        ({"kind": "ple", "num_levels": 0}, "at least 1"),
        ({"task_weights": (1.0, 0.0)}, "positive and finite"),
        ({"kind": "moe"}, "kind must be one of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadConfig(**settings)


def test_labels_that_do_not_fit_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="two labels, click and conversion, got 3"):
        HEADS["esmm"].build(D, 3)
    with pytest.raises(ValueError, match="needs two or more, got 1"):
        HEADS["mmoe"].build(D, 1)
    with pytest.raises(ValueError, match="smaller share of conversions"):
        dataclasses.replace(HEADS["esmm"], prior=(0.1,)).build(D, 2)
    with pytest.raises(ValueError, match="one number for each of 2 labels"):
        HeadConfig(task_weights=(1.0,)).build_loss(2)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels with nulls, and weights, (9, 2)."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 2, generator=generator)
    labels = torch.randint(0, 2, (9, 2), generator=generator).float()
    weights = torch.rand(9, 2, generator=generator)
    weights[2, 1] = weights[4] = 0
    labels[2, 1] = math.nan
    return logits, labels, weights


def test_the_loss_of_tasks_is_the_scaled_likelihood_and_nulls_are_masked() -> None:
    logits, labels, weights = drawn()
    loss = TaskLoss(2, (2.0, 0.5), uncertainty=True)
    assert loss.log_variance is not None
    loss.log_variance.data = torch.tensor([0.4, -0.7])
    expected, total = 0.0, 0.0
    for row in range(9):
        for k, (factor, spread) in enumerate([(2.0, 0.4), (0.5, -0.7)]):
            weight = float(weights[row, k])
            if weight:
                sign = 1 if labels[row, k] else -1
                entropy = math.log1p(math.exp(-sign * float(logits[row, k])))
                expected += weight * factor * (entropy * math.exp(-spread) + spread / 2)
                total += weight
    found, found_total = loss(logits, labels, weights)
    assert float(found_total) == pytest.approx(total)
    assert float(found.detach()) == pytest.approx(expected / total, rel=1e-5)
    found.backward()
    assert loss.log_variance.grad is not None and bool(loss.log_variance.grad.isfinite().all())


def test_losses_of_parts_combine_and_no_setting_is_the_plain_loss() -> None:
    logits, labels, weights = drawn()
    assert torch.equal(
        TaskLoss(2)(logits, labels, weights)[0], weighted_bce(logits, labels, weights)[0]
    )
    loss = TaskLoss(2, (2.0, 0.5), uncertainty=True)
    whole, total = loss(logits, labels, weights)
    parts = [loss(logits[s], labels[s], weights[s]) for s in (slice(3), slice(3, None))]
    torch.testing.assert_close(sum(one * weight for one, weight in parts) / total, whole)


def test_uncertainty_settles_where_the_variance_is_twice_the_entropy() -> None:
    """The minimum of exp(-s) L + s / 2 is at exp(s) = 2 L."""
    logits, labels, weights = torch.zeros(4, 1), torch.ones(4, 1), torch.ones(4, 1)
    loss = TaskLoss(1, uncertainty=True)
    assert loss.log_variance is not None
    loss.log_variance.data.fill_(math.log(2 * math.log(2)))
    loss(logits, labels, weights)[0].backward()
    assert loss.log_variance.grad is not None
    assert float(loss.log_variance.grad) == pytest.approx(0, abs=1e-6)


def test_a_softmax_over_actions_refuses_settings_of_tasks() -> None:
    with pytest.raises(ValueError, match=r"model\.head\.uncertainty: mode 'user_centric'"):
        HeadConfig(uncertainty=True).check_classes()


def batch_of(step: int, first: int, last: int) -> Batch:
    """Return examples of a batch with two labels, the second null in every third row."""
    batch = make_batch(ROWS, step, first, last)
    rows = torch.arange(first, last)
    buys = batch.labels * (rows % 2 == 0)[:, None]
    known = (rows % 3 != 0).float()[:, None]
    labels = torch.cat([batch.labels, buys * known], 1)
    weights = torch.cat([batch.weights, batch.weights * known], 1)
    return dataclasses.replace(batch, labels=labels, weights=weights)


def _train(runtime: Runtime, name: str, resumed: bool) -> dict[str, Any]:
    """Train for four steps on this rank's share; with `resumed` through a saved state."""
    torch.manual_seed(0)
    head = dataclasses.replace(HEADS[name], task_weights=(1.0, 2.0), uncertainty=True)
    base = TOWERS["dcnv2"].model()
    config = ModelConfig(tower=base.tower, tokenizer=base.tokenizer, head=head)
    model = RankingModel(TWO_LABELS, config, torch.device("meta"), seed=0)
    sparse = SparseOptimizerConfig(kind="sgd", learning_rate=0.1)
    unused = ParallelConfig(find_unused_parameters=True)
    parallel = parallelize(model, unused, sparse, runtime, batch_size=ROWS)
    weights = parallel.dense_parameters
    optimizer = torch.optim.SGD(weights.values(), lr=0.05, momentum=0.9, fused=True)
    dense = Replicated(weights, optimizer, runtime.group)
    precision = PrecisionConfig().build(
        parallel.model, dense, sparse.zero_is_no_update, parallel.exchange
    )
    size, losses = ROWS // runtime.world_size, []
    for step in range(4):
        if resumed and step == 2:
            _through_a_file(weights, optimizer)
        batch = batch_of(step, runtime.rank * size, (runtime.rank + 1) * size)
        optimizer.zero_grad()
        loss, output = parallel.module(batch)
        precision.backward(loss, output.weight_sum)
        losses.append(precision.apply().loss)
    return {
        "losses": losses,
        "weights": {key: one.detach().clone() for key, one in weights.items()},
    }


def _through_a_file(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Save weights and optimizer, spoil the weights, and load both."""
    file = io.BytesIO()
    torch.save({"weights": dict(weights), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    held = torch.load(file, weights_only=True)
    with torch.no_grad():
        for key, one in weights.items():
            one.fill_(7).copy_(held["weights"][key])
    optimizer.load_state_dict(held["optimizer"])


@pytest.mark.dist
@pytest.mark.parametrize("name", HEADS)
def test_two_ranks_train_a_head_as_one_does_and_a_loaded_state_goes_on_bit_equal(
    name: str, processes: Processes
) -> None:
    one = processes.run(_train, name, False, world_size=1)[0]
    again = processes.run(_train, name, True, world_size=1)[0]
    assert one["losses"] == again["losses"]
    assert all(torch.equal(value, again["weights"][key]) for key, value in one["weights"].items())
    learnt = one["weights"]["objective.task_loss.log_variance"]
    assert bool((learnt != 0).all())
    two = processes.run(_train, name, False, world_size=2)
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)
    for key, value in two[0]["weights"].items():
        assert torch.equal(value, two[1]["weights"][key]), key
        torch.testing.assert_close(value, one["weights"][key], rtol=1e-3, atol=1e-4)

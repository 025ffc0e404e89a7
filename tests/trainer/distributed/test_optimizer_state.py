# SPDX-License-Identifier: MIT
"""Whatever optimizer steps the dense weights, a run that is resumed is the undisturbed one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint import dcp
from trainer.distributed.dense import Replicated
from trainer.distributed.optimizer import DenseOptimizerConfig, optimizer_tensors


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., 2023); leaves a step out where it is told."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "fused": True})

    @torch.no_grad()
    def step(self, closure=None):
        if bool(getattr(self, "found_inf", False)):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                update = average * beta1 + parameter.grad * (1 - beta1)
                parameter.sub_(group["lr"] * update.sign())
                average.lerp_(parameter.grad, 1 - beta2)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, fused=True),
    "lion": Lion,
}


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """Two layers, of which the second gets gradients from step `late` on.

    prepared: whether the state is made before the first step, as the trainer does.
    """

    def __init__(self, make, late: int = 2, prepared: bool = True):
        torch.manual_seed(1)
        self.model = nn.ModuleDict({"first": nn.Linear(3, 2), "late": nn.Linear(3, 2)})
        parameters = dict(self.model.named_parameters())
        optimizer = make(list(parameters.values()))
        group = dist.group.WORLD
        assert group is not None
        self.dense = Replicated(parameters, optimizer, group)
        self.steps, self.late = 0, late
        if prepared:
            self.dense.tensors()

    def train(self, until: int) -> "Run":
        while self.steps < until:
            rows = torch.sin(torch.arange(12.0).view(4, 3) + self.steps)
            used = ["first", "late"] if self.steps >= self.late else ["first"]
            loss = sum(self.model[name](rows).square().mean() for name in used)
            self.dense.zero_grad()
            loss.backward()
            self.dense.step(torch.ones(()), torch.zeros((), dtype=torch.bool))
            self.steps += 1
        return self

    def tensors(self) -> dict:
        return {"model": self.model.state_dict(), "dense": self.dense.tensors()}

    def bits(self) -> dict:
        return {name: tensor.clone() for name, tensor in dcp.flatten(self.tensors())}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_at", [0, 1, 3])
def test_a_run_that_is_resumed_is_the_undisturbed_one_bit_by_bit(tmp_path, name, saved_at):
    whole = Run(OPTIMIZERS[name]).train(5).bits()
    path = dcp.save(Run(OPTIMIZERS[name]).train(saved_at).tensors(), tmp_path, saved_at, {})
    resumed = Run(OPTIMIZERS[name])
    dcp.load(resumed.tensors(), path)
    resumed.steps = saved_at
    found = resumed.train(5).bits()
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_for_the_state_changes_no_step(name):
    found = Run(OPTIMIZERS[name], late=0).train(4).bits()
    whole = Run(OPTIMIZERS[name], late=0, prepared=False).train(4).bits()
    assert all(torch.equal(found[key], whole[key]) for key in whole)


def test_the_shipped_optimizer_has_its_state_before_the_first_step():
    weight, frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    frozen.requires_grad_(False)
    parameters = {"w": weight, "frozen": frozen}
    state = optimizer_tensors(DenseOptimizerConfig().build(parameters), parameters)
    assert {key: float(value.sum()) for key, value in state["w"].items()} == {
        "step": 0.0,
        "exp_avg": 0.0,
        "exp_avg_sq": 0.0,
    }
    assert set(state) == {"w"}


def test_a_state_that_no_checkpoint_can_begin_is_named():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="NAdam keeps 'mu_product', which a step without"):
        optimizer_tensors(torch.optim.NAdam([weight]), {"w": weight})
    with pytest.raises(RuntimeError, match="LBFGS keeps 'func_evals' as a int"):
        optimizer = torch.optim.LBFGS([weight])
        optimizer.state[weight]["func_evals"] = 3
        optimizer_tensors(optimizer, {"w": weight})

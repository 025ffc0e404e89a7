# SPDX-License-Identifier: MIT
"""Dense weights in a DeepSpeed engine: ZeRO stages 0 to 3, beside tables that it does not know.

The engine wraps a root module that owns the dense parts and whose forward runs the whole model. So
the engine's hooks see each forward begin and end, and the tables stay in DistributedModelParallel.
The engine reduces gradients and steps its partitions. `Precision` decides whether it steps:

- Its loss scale stays 1 in backward, whatever the loss was scaled by, and is set to one over the
  factor that `Precision` has decided on (unscaling and clipping) for the step.
- Where it would compute the norm by which it finds an overflow, it is given the shared decision.

So its FP16 engine, which holds FP16 weights and FP32 masters, skips when a table's gradient
overflows, and the tables skip when one of its own does.

Shapes: R ranks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainer.distributed.deepspeed_partitions import Partitions
from trainer.distributed.dense import apply_step
from trainer.distributed.optimizer import optimizer_tensors
from trainer.runtime.runtime import RunError, Runtime, prepare_deepspeed


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What DeepSpeed spreads over the ranks, and what it keeps in host memory.

    Attributes:
        stage: 0 spreads nothing, 1 optimizer states, 2 gradients too, 3 weights too.
        offload: `optimizer` keeps optimizer states in host memory (stages 1 to 3). `all` keeps the
            weights there too (stage 3). `none` keeps nothing there.
        whole_elements: weights of at most so many elements stay whole on every rank in stage 3,
            which avoids gathering them.
    """

    stage: Literal[0, 1, 2, 3] = 2
    offload: Literal["none", "optimizer", "all"] = "none"
    whole_elements: int = 10_000

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"zero.stage: expected 0, 1, 2 or 3, got {self.stage!r}")
        if self.offload not in ("none", "optimizer", "all"):
            raise ValueError(
                f"zero.offload: expected 'none', 'optimizer' or 'all', got {self.offload!r}"
            )
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.stage < least:
            raise ValueError(
                f"zero.offload: {self.offload!r} needs stage {least} or higher, got stage "
                f"{self.stage}; raise zero.stage, or set zero.offload none"
            )
        if self.whole_elements < 0:
            raise ValueError(
                f"zero.whole_elements: expected an integer >= 0, got {self.whole_elements}"
            )
        if self.stage != 3 and self.whole_elements != type(self).whole_elements:
            raise ValueError(
                f"zero.whole_elements: has no effect on stage {self.stage}; remove it, or set "
                "zero.stage 3"
            )

    def settings(self, dtype: str, bucket_bytes: int, batch_size: int) -> dict[str, Any]:
        """Return the engine's own configuration.

        Args:
            dtype: number format of computation.
            bucket_bytes: bytes of gradients reduced at once.
            batch_size: examples per rank.
        """
        bucket = bucket_bytes // (4 if dtype == "fp32" else 2)
        partition: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self.stage == 3:
            partition["stage3_param_persistence_threshold"] = self.whole_elements
        for name in ("optimizer", "param") if self.offload == "all" else ("optimizer",):
            if self.offload != "none":
                partition[f"offload_{name}"] = {"device": "cpu"}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch_size,
            "steps_per_print": 2**62,
            "zero_optimization": partition,
            # The optimizer is torch's own AdamW, as under every other choice.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if dtype == "fp16":
            found["fp16"] = {"enabled": True, "loss_scale": 1.0}
        if dtype == "bf16":
            found["bf16"] = {"enabled": True, "check_grad_overflow": True}
        return found


class _Root(nn.Module):
    """Owns the dense parts of a model; its forward is the whole model's."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, run: Any, batch: Any) -> Any:
        return run(batch)


class Zero:
    """Dense weights in an engine. Implements `trainer.distributed.dense.Dense`.

    Args:
        parts: the dense parts of the model, by name, alike on all ranks.
        optimizer: a fused AdamW over all of their weights that need a gradient.
        config: what is spread.
        settings: the engine's configuration, `ZeroConfig.settings`.
        runtime: the ranks.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        config: ZeroConfig,
        settings: dict[str, Any],
        runtime: Runtime,
    ) -> None:
        root = _Root(parts)
        self.parameters: Mapping[str, nn.Parameter] = dict(root.named_parameters())
        shapes = {name: weight.shape for name, weight in self.parameters.items()}
        self.optimizer, self.group, self.stage = optimizer, runtime.group, config.stage
        self.decides_on_host = config.stage > 0
        self._skip = False
        self.engine: Any = _start(root, optimizer, settings, runtime)
        self._partitions: Partitions | None = None
        if config.stage:
            holder: Any = self.engine.optimizer
            self._partitions = Partitions(holder, optimizer, self.parameters, shapes)
            holder.has_overflow = lambda *_, **__: False
            if config.stage == 3:
                holder._get_norm_groups = lambda: [self._norm()]
            else:
                holder.scaled_global_norm = lambda *_, **__: self._norm()

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Return what `module` returns for `batch`."""
        return self.engine(module, batch)

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients, averaged over ranks and partitioned."""
        self.engine.backward(loss)

    def square(self) -> Tensor:
        """Return this rank's share of the square: of its partition, or an R-th of the whole."""
        gradients = self._gradients()
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.engine.device)
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        total = torch.stack(norms).double().square().sum().to(self.engine.device)
        return total if self.stage else total / self.group.size()

    def step(self, factor: Tensor, skip: Tensor) -> None:
        """Let the engine step, or leave the step out as it does at an overflow of its own.

        Raises:
            RunError: the engine did otherwise.
        """
        if not self.stage:
            apply_step(self.optimizer, self._gradients(), factor, skip)
            self.engine.zero_grad()
            return
        self._skip = bool(skip)
        self.engine.optimizer.loss_scale = 1.0 if self._skip else 1.0 / float(factor)
        self.engine.step()
        self.engine.optimizer.loss_scale = 1.0
        if self.engine.was_step_applied() == self._skip:
            raise RunError(
                f"deepspeed: the ranks agreed to {'skip' if self._skip else 'take'} the step, the "
                "engine did not; pin the version of requirements/, or set parallel.dense ddp"
            )

    def zero_grad(self) -> None:
        """Do nothing: the engine forgets gradients when it has stepped."""

    def unused(self) -> list[str]:
        """Return no name: the engine has already freed the gradients."""
        return []

    def weights(self) -> dict[str, Tensor]:
        """Return every dense weight whole, in FP32; nothing in stage 0. Collective."""
        return self._partitions.weights() if self._partitions else {}

    def whole(self) -> dict[str, Tensor] | None:
        """Return every dense weight whole, in FP32; None in stage 0. Collective."""
        return self._partitions.weights() if self._partitions else None

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return whole optimizer states. Collective."""
        if self._partitions:
            return self._partitions.states()
        return optimizer_tensors(self.optimizer, self.parameters)

    def put(
        self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]
    ) -> set[str]:
        """Take over whole weights and optimizer states, each rank its partition; return names."""
        return self._partitions.put(weights, states) if self._partitions else set()

    def _gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients."""
        if self._partitions:
            return self._partitions.gradients()
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def _norm(self) -> Tensor:
        """Return in place of a norm what the engine skips at, or what it steps at."""
        return torch.tensor(float("nan") if self._skip else 1.0, device=self.engine.device)


def _start(
    root: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], runtime: Runtime
) -> Any:
    """Return the engine of `root`. Collective."""
    prepare_deepspeed(runtime)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
        from deepspeed.comm import comm
        from deepspeed.utils import groups
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its collective over shared memory is compiled where it is first used: minutes, for CPUs only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore
    # It keeps the process groups of an engine before, which may be gone.
    comm.cdb = None
    groups._release_process_group_references(group=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(
            model=root, optimizer=optimizer, config=settings, dist_init_required=False
        )
    return engine

# SPDX-License-Identifier: MIT
"""A single-device model becomes a distributed one.

The only file that names DistributedModelParallel (tables, sharded by a plan) and
DistributedDataParallel (everything else, replicated). Models know of neither.

Shapes: B examples per rank, R ranks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from embeddings.coalesce import unpool
from embeddings.collection import EmbeddingLayer
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.plans import Plan
from embeddings.sharders import sharders, sharding_plan
from embeddings.sharding import ShardingConfig, plan_tables
from models.batch import Batch
from trainer.clock import Clock
from trainer.dense import Dense, Replicated
from trainer.loss_scale import Step
from trainer.precision import Precision
from trainer.runtime import Runtime


class HasWeightSum(Protocol):
    """What a model returns beside its loss; `weight_sum`, 0-d, is what the loss is a mean over."""

    @property
    def weight_sum(self) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is distributed.

    sharding: what the planner may do with the tables.
    bucket_megabytes: dense gradients that are averaged over ranks in one collective.
    find_unused_parameters: whether dense weights may go without a gradient in some steps; costs a
      walk over the graph in every step.
    """

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    bucket_megabytes: int = 25
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.bucket_megabytes < 1:
            raise ValueError(
                f"parallel.bucket_megabytes: expected at least 1, got {self.bucket_megabytes}"
            )


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A distributed model.

    module: call it like the model. model: the same without wrappers, its tables sharded.
    dense_parameters: by name, equal on all ranks, not yet in any optimizer.
    fused_optimizer: of the tables, for state dicts and learning rates; it updates in backward.
    plan: where the tables are. config: how the model was distributed.
    """

    module: DistributedModelParallel
    model: nn.Module
    dense_parameters: dict[str, nn.Parameter]
    fused_optimizer: CombinedOptimizer
    plan: Plan
    config: ParallelConfig

    @property
    def sharded_modules(self) -> list[ShardedModule[Any, Any, Any, Any]]:
        """The modules that hold tables and exchange ids and vectors, each as a whole."""
        found = {n: m for n, m in self.model.named_modules() if isinstance(m, ShardedModule)}
        return [m for name, m in found.items() if name.rpartition(".")[0] not in found]


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    sparse_optimizer: SparseOptimizerConfig,
    runtime: Runtime,
    batch_size: int = 512,
) -> Parallel:
    """Shard the tables of `model`, replicate the rest, fuse the tables' optimizer.

    Args:
        model: holds one EmbeddingLayer called `embeddings` (build it on device `meta`: only the
          shards of this rank are then allocated) and is built alike on all ranks.
        config: of tables and dense weights.
        sparse_optimizer: of the tables.
        runtime: the ranks.
        batch_size: B, by which the planner estimates.

    Raises:
        ValueError: the tables' optimizer has no kernel on this device, or a setting no effect.
        RuntimeError: no plan fits, or a table was not sharded.
    """
    layer = model.get_submodule("embeddings")
    if not isinstance(layer, EmbeddingLayer):
        raise RuntimeError(
            f"parallelize: expected model.embeddings to be an EmbeddingLayer, got "
            f"{type(layer).__name__}"
        )
    if config.sharding.unpool_ids:
        layer = unpool(layer)
        model.add_module("embeddings", layer)
    if config.sharding.dedup and not layer.collections:
        raise ValueError(
            "parallel.sharding.dedup: has no effect, every table is pooled; set unpool_ids too "
            "where tables of single ids are to send each id once, or remove it"
        )
    sparse_optimizer.check_device(runtime.device.type)
    fuse_optimizer(layer, sparse_optimizer)
    topology = config.sharding.topology(
        runtime.world_size, runtime.local_world_size, runtime.device.type
    )
    plan = plan_tables(model, config.sharding, topology, batch_size)
    _ignore_renamings()
    module = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(runtime.group),
        device=runtime.device,
        plan=sharding_plan(plan),
        sharders=sharders(config.sharding.dedup),
        data_parallel_wrapper=DefaultDataParallelWrapper(
            bucket_cap_mb=config.bucket_megabytes,
            # A static graph would forbid a tower that changes its form after a warm-up.
            static_graph=False,
            find_unused_parameters=config.find_unused_parameters,
        ),
    )
    layer.reset_parameters()
    dense = dict(in_backward_optimizer_filter(module.named_parameters()))
    left = sorted(name for name in dense if name.startswith("embeddings."))
    if left:
        raise RuntimeError(
            f"parallelize: expected every table to be sharded, these are not: {left}"
        )
    runtime.seed_rank()
    return Parallel(
        module=module,
        model=module.module,
        dense_parameters=cast(dict[str, nn.Parameter], dense),
        fused_optimizer=cast(CombinedOptimizer, module.fused_optimizer),
        plan=plan,
        config=config,
    )


def build_dense(parallel: Parallel, optimizer: torch.optim.Optimizer, runtime: Runtime) -> Dense:
    """Return the dense weights of `parallel` with their optimizer, ready for steps.

    optimizer: of `parallel.dense_parameters`, fresh.
    """
    return Replicated(parallel.dense_parameters, optimizer, runtime.group)


def _ignore_renamings() -> None:
    """Ignore that torch has renamed what this TorchRec calls; they are pinned together."""
    renamed = "broadcast_buffers|torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)"
    warnings.filterwarnings("ignore", message=f"`({renamed})`", category=FutureWarning)
    # And that the tracer TorchRec uses will one day answer another question.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


class Pipeline(TrainPipelineSparseDist[Batch, Any]):
    """Training steps whose exchange of ids overlaps with computing the batch before.

    `progress` does what TorchRec's does, with the two-phase backward of `Precision` in place of
    backward and optimizer step. In evaluation mode it only predicts.

    Args:
        parallel: the model.
        precision: of the same model, with its dense weights.
        device: where to compute.
    """

    def __init__(
        self,
        parallel: Parallel,
        precision: Precision,
        device: torch.device,
    ) -> None:
        super().__init__(
            parallel.module,
            cast(Any, precision.dense),  # of which only zero_grad is called
            device,
            custom_model_fwd=cast(Any, self._forward),
        )
        self.parallel = parallel
        self.precision = precision
        group = cast(Any, parallel.module)._env.process_group
        self._clock = Clock(parallel.model, group, device)
        self._weight_sum: Tensor | None = None
        self.last_step: Step | None = None

    @property
    def num_pipelined(self) -> int:
        """How many sharded modules exchange their ids ahead of time; all of them, once started."""
        return len(self._pipelined_modules)

    def progress(self, dataloader_iter: Iterator[Batch]) -> Any:
        """Train on (or predict) one batch and return its predictions. The step is in `last_step`.

        Raises:
            StopIteration: no batch is left.
            RuntimeError: a module of tables is not pipelined, or a dense weight is not used.
        """
        return super().progress(dataloader_iter)

    def _forward(self, batch: Batch | None) -> tuple[Tensor, HasWeightSum]:
        if batch is not None:
            self._clock.set(batch)
        with self.precision.autocast():
            loss, predictions = self.precision.dense.forward(self.parallel.module, batch)
        self._weight_sum = predictions.weight_sum
        return loss, predictions

    def _backward(self, losses: Tensor) -> None:
        assert self._weight_sum is not None
        self.precision.backward(losses, self._weight_sum)
        if self.last_step is None and not self.parallel.config.find_unused_parameters:
            unused = self.precision.dense.unused()
            if unused:
                raise RuntimeError(
                    f"parallel: expected a gradient of every dense weight, got none of {unused}; "
                    "remove them, freeze them, or set parallel.find_unused_parameters"
                )

    def _optimizer_step(self) -> None:
        self.last_step = self.precision.apply()

    def _pipeline_model(self, batch: Any, context: Any, pipelined_forward: Any = None) -> None:
        super()._pipeline_model(
            batch, context, pipelined_forward or type(self)._pipelined_forward_type
        )
        expected = len(self.parallel.sharded_modules)
        if self.num_pipelined != expected:
            raise RuntimeError(
                f"pipeline: expected all {expected} modules of tables to exchange ids ahead of "
                f"time, got {self.num_pipelined}; pass batch.sparse to the EmbeddingLayer without "
                "any operation on it"
            )

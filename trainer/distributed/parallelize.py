# SPDX-License-Identifier: MIT
"""A single-device model becomes a distributed one.

Tables are sharded by a plan (DistributedModelParallel). The configuration decides whether all other
weights are replicated (DDP, here), sharded (`fsdp.py`) or held by an engine (`deepspeed_zero.py`).
Models contain no code for any of this.

Shapes: B examples per rank, R ranks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import nn
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from embeddings.collection import EmbeddingLayer
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.sharding.coalesce import unpool
from embeddings.sharding.exchange import Exchange
from embeddings.sharding.plans import Plan
from embeddings.sharding.sharders import sharders, sharding_plan
from embeddings.sharding.sharding import ShardingConfig, plan_tables
from trainer.distributed.deepspeed_zero import Zero, ZeroConfig
from trainer.distributed.dense import Dense, Replicated, align, copy_parts, dense_parts, fill_copy
from trainer.distributed.fsdp import ShardDense, Sharded
from trainer.runtime.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is distributed.

    Attributes:
        sharding: what the planner may do with the tables.
        dense: who holds the weights outside the tables. `ddp`: every rank holds all of them.
            `fsdp2`: every rank holds a share, gathered block by block. `deepspeed`: as `zero` says.
            All train alike.
        zero: settings of `deepspeed`; without effect on others, where it must stay at its defaults.
        bucket_megabytes: dense gradients averaged over ranks in one collective. Not used by
            `fsdp2`, which averages a block at a time.
        find_unused_parameters: whether dense weights may go without a gradient in some steps. Costs
            a walk over the graph in every step; `ddp` only.
        compile: whether the tower's blocks go through `torch.compile`
            (`trainer/distributed/compile.py`).
    """

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    dense: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    bucket_megabytes: int = 25
    find_unused_parameters: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.bucket_megabytes < 1:
            raise ValueError(
                f"parallel.bucket_megabytes: expected at least 1, got {self.bucket_megabytes}"
            )
        if self.dense not in ("ddp", "fsdp2", "deepspeed"):
            raise ValueError(
                f"parallel.dense: expected 'ddp', 'fsdp2' or 'deepspeed', got {self.dense!r}"
            )
        idle = {
            "zero": self.dense != "deepspeed" and self.zero != ZeroConfig(),
            "find_unused_parameters": self.dense != "ddp" and self.find_unused_parameters,
            "bucket_megabytes": self.dense == "fsdp2"
            and self.bucket_megabytes != type(self).bucket_megabytes,
        }
        for name, without_effect in idle.items():
            if without_effect:
                raise ValueError(
                    f"parallel.{name}: has no effect on dense {self.dense!r}, got "
                    f"{getattr(self, name)!r}; remove it, or choose another parallel.dense"
                )
        if self.compile and self.dense == "deepspeed" and self.zero.stage == 3:
            raise ValueError(
                "parallel.compile: stage 3 gathers weights by hooks inside the blocks, where "
                "compiled code has none; use parallel.zero.stage 0 to 2, fsdp2 or ddp, or "
                "leave compile out"
            )

    def describe(self) -> str:
        """Return who holds the dense weights, for logs and metrics."""
        if self.dense != "deepspeed":
            return self.dense
        offload = "" if self.zero.offload == "none" else f", offload {self.zero.offload}"
        return f"deepspeed stage {self.zero.stage}{offload}"

    def check_precision(self, dtype: str, device: str) -> None:
        """Refuse a number format that the dense weights' engine cannot compute on `device`.

        Raises:
            ValueError: `deepspeed` with FP16 on a CPU, or with half precision in stage 0.
        """
        if self.dense != "deepspeed" or dtype in ("auto", "fp32"):
            return
        if not self.zero.stage:
            raise ValueError(
                f"parallel.zero.stage: stage 0 with precision.dtype {dtype!r} would be another "
                "engine than the other stages are; use a stage from 1 to 3, or parallel.dense ddp"
            )
        gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if dtype == "fp16" and not gpu:
            raise ValueError(
                "parallel.dense: DeepSpeed's FP16 engine runs on GPUs only, got precision.dtype "
                "'fp16' on a CPU; use parallel.dense ddp or fsdp2, or precision.dtype bf16 or fp32"
            )


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A distributed model.

    Attributes:
        module: call it like the model.
        model: the same without wrappers, its tables sharded.
        dense_parameters: by name, equal on all ranks, not yet in any optimizer.
        fused_optimizer: of the tables, for state dicts and learning rates; it updates in backward.
        plan: where the tables are.
        config: how the model was distributed.
        exchange: how its vectors travel.
        copies: the dense parts once more, without weights, where ranks do not hold all of them
            (`fill_copy`).
    """

    module: DistributedModelParallel
    model: nn.Module
    dense_parameters: dict[str, nn.Parameter]
    fused_optimizer: CombinedOptimizer
    plan: Plan
    config: ParallelConfig
    exchange: Exchange
    copies: nn.ModuleDict | None

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
    layer = _prepare_tables(model, config.sharding)
    sparse_optimizer.check_device(runtime.device.type)
    fuse_optimizer(layer, sparse_optimizer)
    topology = config.sharding.topology(
        runtime.world_size, runtime.local_world_size, runtime.device.type
    )
    plan = plan_tables(model, config.sharding, topology, batch_size)
    _ignore_renamings()
    exchange = Exchange(config.sharding.exchange)
    copies = None if config.dense == "ddp" else copy_parts(model)
    module = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(runtime.group),
        device=runtime.device,
        plan=sharding_plan(plan),
        sharders=sharders(config.sharding.dedup, exchange),
        data_parallel_wrapper=_DATA_PARALLEL[config.dense](config),
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
        exchange=exchange,
        copies=copies,
    )


def _prepare_tables(model: nn.Module, config: ShardingConfig) -> EmbeddingLayer:
    """Return the tables of `model`, put in the form that `config` asks for."""
    layer = model.get_submodule("embeddings")
    if not isinstance(layer, EmbeddingLayer):
        raise RuntimeError(
            f"parallelize: expected model.embeddings to be an EmbeddingLayer, got "
            f"{type(layer).__name__}"
        )
    if config.unpool_ids:
        layer = unpool(layer)
        model.add_module("embeddings", layer)
    if config.dedup and not layer.collections and not layer.dynamic:
        raise ValueError(
            "parallel.sharding.dedup: has no effect, every table is pooled; set unpool_ids too "
            "where tables of single ids are to send each id once, or remove it"
        )
    return layer


def build_dense(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    runtime: Runtime,
    dtype: str = "fp32",
    batch_size: int = 512,
) -> Dense:
    """Return the dense weights of `parallel` with their optimizer, ready for steps. Collective.

    Args:
        parallel: the distributed model.
        optimizer: of `parallel.dense_parameters`, fresh.
        runtime: the ranks.
        dtype: number format of computation.
        batch_size: B.

    Raises:
        ValueError: an engine that cannot compute in `dtype` here.
    """
    config, weights = parallel.config, parallel.dense_parameters
    config.check_precision(dtype, runtime.device.type)
    if config.dense == "fsdp2":
        return Sharded(weights, optimizer, runtime.group)
    if config.dense == "deepspeed":
        settings = config.zero.settings(dtype, config.bucket_megabytes << 20, batch_size)
        parts = dense_parts(parallel.model)
        return Zero(parts, optimizer, config.zero, settings, runtime)
    return Replicated(weights, optimizer, runtime.group)


def plain_parts(parallel: Parallel, dense: Dense) -> nn.Module:
    """Return a module with the model's dense parts that a rank can run by itself. Collective."""
    weights = dense.whole()
    if weights is None or parallel.copies is None:
        return parallel.model
    return fill_copy(parallel.copies, parallel.model, weights)


class _LeaveDense(DataParallelWrapper):
    """Has DistributedModelParallel leave alone what an engine will take over."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        for part in dense_parts(dmp.module).values():
            align(part, device)


def _replicate(config: ParallelConfig) -> DataParallelWrapper:
    return DefaultDataParallelWrapper(
        bucket_cap_mb=config.bucket_megabytes,
        # A static graph would forbid a tower that changes its form after a warm-up.
        static_graph=False,
        find_unused_parameters=config.find_unused_parameters,
    )


_DATA_PARALLEL: dict[str, Callable[[ParallelConfig], DataParallelWrapper]] = {
    "ddp": _replicate,
    "fsdp2": lambda _: ShardDense(),
    "deepspeed": lambda _: _LeaveDense(),
}


def _ignore_renamings() -> None:
    """Ignore that torch has renamed what this TorchRec calls; they are pinned together."""
    renamed = "broadcast_buffers|torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)"
    warnings.filterwarnings("ignore", message=f"`({renamed})`", category=FutureWarning)
    # And that the tracer TorchRec uses will one day answer another question.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

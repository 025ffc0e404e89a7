# SPDX-License-Identifier: MIT
"""Shard modules of tables alone, without tower and trainer."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from embeddings.collection import EmbeddingLayer
from embeddings.sharding.sharders import sharders, sharding_plan
from embeddings.sharding.sharding import ShardingConfig, plan_tables
from trainer.runtime.runtime import Runtime


def shard_tables(
    model: nn.Module, config: ShardingConfig, runtime: Runtime, batch_size: int = 512
) -> DistributedModelParallel:
    """Plan, shard and fill the EmbeddingLayers in `model`, whose optimizers are fused already."""
    layers = [module for module in model.modules() if isinstance(module, EmbeddingLayer)]
    ranks = runtime.world_size
    plan = plan_tables(model, config, config.topology(ranks, ranks, "cpu"), batch_size)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(runtime.group),
        device=runtime.device,
        plan=sharding_plan(plan),
        sharders=sharders(config.dedup),
    )
    for layer in layers:
        layer.reset_parameters()
    return sharded

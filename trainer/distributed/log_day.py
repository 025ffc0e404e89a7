# SPDX-License-Identifier: MIT
"""The log's day for dynamic tables that evict ids by days, the same on all ranks.

A rank's batch has the day of its middle row. Where a day ends, ranks may differ by one. The latest
day of all ranks counts, so that a table does not depend on how many ranks share it. Logs without
time, and tables without `ttl_days`, cost nothing here.

Shapes: R ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from embeddings.collection import EmbeddingLayer
from models.batch import Batch
from trainer.data.transforms import FIRST_DAY, LAST_DAY


class Clock:
    """Sets the day of a model's dynamic tables before each training step.

    Args:
        model: unwrapped, with an EmbeddingLayer called `embeddings`.
        group: all ranks.
        device: of their collectives.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        layer = model.get_submodule("embeddings")
        assert isinstance(layer, EmbeddingLayer)
        self._layer = layer
        self._group, self._device = group, device
        self._tables = [
            table.name for table in layer.schema.tables if table.dynamic and table.dynamic.ttl_days
        ]

    def set(self, batch: Batch) -> None:
        """Set the day of `batch`. Collective in training.

        Raises:
            ValueError: no rank's rows have a day, or it lies before 1990 or after 2099.
        """
        if not self._tables or not self._layer.training:
            return
        day = torch.tensor([batch.day], device=self._device)
        if self._group.size() > 1:
            dist.all_reduce(day, dist.ReduceOp.MAX, group=self._group)
        latest = int(day.item())
        if not latest:
            raise ValueError(
                f"schema: tables {self._tables} have dynamic.ttl_days, and the log has no days; "
                "name the schema's timestamp column, write the log in partitions dt=YYYY-MM-DD, or "
                "use ttl_steps"
            )
        if not FIRST_DAY <= latest <= LAST_DAY:
            raise ValueError(
                f"schema.timestamp: tables {self._tables} have dynamic.ttl_days, and the rows' day "
                f"is {latest:,} days after 1970-01-01, which is not between 1990 and 2099; times "
                "are milliseconds since 1970, or timestamps"
            )
        self._layer.set_day(latest)

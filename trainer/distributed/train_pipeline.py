# SPDX-License-Identifier: MIT
"""Training steps whose exchange of ids overlaps with computing the batch before.

TorchRec's pipeline with the two-phase backward of `Precision` in it.

Shapes: B examples per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from models.batch import Batch
from trainer.distributed.log_day import Clock
from trainer.distributed.loss_scale import Step
from trainer.distributed.parallelize import Parallel
from trainer.distributed.precision import Precision
from trainer.distributed.step_timing import Phases


class HasWeightSum(Protocol):
    """What a model returns beside its loss; `weight_sum`, 0-d, is what the loss is a mean over."""

    @property
    def weight_sum(self) -> Tensor: ...  # noqa: D102


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
        self.phases = Phases(parallel.model.get_submodule("embeddings"), device)

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

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
        """Take the next batch and begin to copy it to the device."""
        with self.phases.part("host_to_device"):
            return super().copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """Begin to exchange the ids of the next batch."""
        with self.phases.part("communication"):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        """Wait for the lengths of what is exchanged."""
        with self.phases.part("communication"):
            super().wait_sparse_data_dist(context)

    def _next_batch(self, dataloader_iter: Iterator[Batch]) -> Batch | None:
        with self.phases.part("input_wait"):
            return super()._next_batch(dataloader_iter)

    def _forward(self, batch: Batch | None) -> tuple[Tensor, HasWeightSum]:
        if batch is not None:
            self._clock.set(batch)
        with self.phases.part("dense_forward"), self.precision.autocast():
            loss, predictions = self.precision.dense.forward(self.parallel.module, batch)
        self._weight_sum = predictions.weight_sum
        return loss, predictions

    def _backward(self, losses: Tensor) -> None:
        assert self._weight_sum is not None
        with self.phases.part("backward"):
            self.precision.backward(losses, self._weight_sum)
        if self.last_step is None and not self.parallel.config.find_unused_parameters:
            unused = self.precision.dense.unused()
            if unused:
                raise RuntimeError(
                    f"parallel: expected a gradient of every dense weight, got none of {unused}; "
                    "remove them, freeze them, or set parallel.find_unused_parameters"
                )

    def _optimizer_step(self) -> None:
        with self.phases.part("update"):
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

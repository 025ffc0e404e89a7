# SPDX-License-Identifier: MIT
"""What metrics.json says of a run beside what its model has reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models.attention import kernels
from trainer.distributed.compile import num_graphs
from trainer.resume import count_out_of_range

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def run_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return what describes the run rather than the model, the same on all ranks."""
    rows, seconds, config = trainer.rows, trainer.train_seconds, trainer.config
    return {
        "rows_per_second": rows / seconds if seconds else None,
        "input_wait": trainer.wait_seconds / seconds if seconds else None,
        "world_size": trainer.runtime.world_size,
        "steps": trainer.step,
        "train_rows": rows,
        # What evens out the last step of an epoch over the ranks.
        "remainder": "padded with rows of weight 0",
        "padded_rows": trainer.padded_rows,
        "skipped_steps": trainer.precision.num_skipped,
        "pipelined_modules": trainer.pipeline.num_pipelined,
        "dense_parallelism": config.parallel.describe(),
        "attention": kernels.in_use(),
        "compiled_graphs": num_graphs() if config.parallel.compile else 0,
        "out_of_range": count_out_of_range(trainer),
        **trainer.tables.counts,
        "alerts": sorted(
            {*trainer.telemetry.alerts, *trainer.weights.first_steps, *trainer.tables.first_steps}
        ),
    }

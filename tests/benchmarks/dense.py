# SPDX-License-Identifier: MIT
"""What each way to hold dense weights keeps on a rank, what a step takes, and that losses agree.

    torchrun --nproc-per-node 2 -m tests.benchmarks.dense --data LOGS [--recipe specformer.demo]
                                                          [--steps 50] [setting value ...]

LOGS: `python -m pipelines.synthesize LOGS`. A line a choice: the largest relative difference of a
step's loss from that of `ddp`; the bytes that dense weights, gradients and optimizer states (all
tensors of the process that were not there before the model's dense part was built, tables and
activations aside) took between backward and step; the most they took within backward, with what it
holds for a while (gradients of activations too, which are the same under every choice); and the
median time of a step. Stages 1 and 2 hold the same once backward is over, since an engine of stage
1 then lets go of what is not its share: they differ within it, where only stage 2 lets go as it
goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.batch import Batch
from trainer.build import build_training, open_loader
from trainer.checkpoint.dcp import flatten
from trainer.checkpoint.state import fused_tensors
from trainer.config.command_line import apply_overrides
from trainer.config.config import TrainConfig
from trainer.distributed.deepspeed_zero import ZeroConfig
from trainer.distributed.parallelize import ParallelConfig
from trainer.recipes.load import load_recipe
from trainer.runtime.runtime import Runtime, start

CHOICES: dict[str, ParallelConfig] = {
    "ddp": ParallelConfig(),
    "fsdp2": ParallelConfig(dense="fsdp2"),
    **{
        f"deepspeed {stage}": ParallelConfig(
            dense="deepspeed", bucket_megabytes=1, zero=ZeroConfig(stage=stage)
        )
        for stage in (0, 1, 2)
    },
    "deepspeed 3": ParallelConfig(
        dense="deepspeed", bucket_megabytes=1, zero=ZeroConfig(stage=3, whole_elements=256)
    ),
}

_NUDGED = "ddp, nudged"


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a tensor of this process has, by address."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            try:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            except (NotImplementedError, RuntimeError):
                continue  # a tensor without memory of its own
    return found


class Peak(TorchDispatchMode):
    """Sees every operation of a backward, and at each tenth how many bytes are new since it began.

    known: addresses of storages that are not counted.
    """

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self._count, self.bytes = known, 0, 0

    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count += 1
        if self._count % 10 == 0:
            self.bytes = max(self.bytes, new_bytes(self._known))
        return result


def new_bytes(known: set[int]) -> int:
    """Return the bytes of the storages that are not at `known` addresses."""
    return sum(size for address, size in live_storages().items() if address not in known)


def measure(
    config: TrainConfig, batches: list[Batch], runtime: Runtime, nudge: bool = False
) -> dict[str, Any]:
    """Train on `batches`; return losses, bytes and milliseconds of this rank.

    nudge: begin with dense weights that are another by a unit in the last place.
    """
    torch.manual_seed(runtime.seed)
    gc.collect()
    known = set(live_storages())
    gc.freeze()  # what is there already need not be looked through again
    training = build_training(config, runtime)
    if nudge:
        with torch.no_grad():
            for weight in training.parallel.dense_parameters.values():
                weight.mul_(1 + 2.0**-23)
    tables = [
        *training.parallel.module.state_dict().values(),
        *(value for _, value in flatten(fused_tensors(training.parallel.fused_optimizer))),
    ]
    for table in tables:
        if isinstance(table, ShardedTensor):
            known |= {s.tensor.untyped_storage().data_ptr() for s in table.local_shards()}
    sizes: list[int] = []
    peaks: list[int] = []
    backward = training.precision.backward

    def watched(loss: Tensor, weight_sum: Tensor) -> None:
        if len(sizes) == 2:  # when states are there and the first steps' extras are gone
            gc.collect()
            before = set(live_storages())
            with Peak(before) as peak:
                backward(loss, weight_sum)
            peaks.append(peak.bytes)
        else:
            backward(loss, weight_sum)
        if len(sizes) < 3:
            gc.collect()
            sizes.append(new_bytes(known))

    training.precision.backward = watched
    losses, times, held = [], [], 0
    feed = iter(batches)
    for _ in batches:
        began = time.perf_counter()
        training.pipeline.progress(feed)
        assert training.pipeline.last_step is not None
        losses.append(training.pipeline.last_step.loss)
        times.append(time.perf_counter() - began)
        if len(losses) == 2:  # between steps: no gradients, no activations
            gc.collect()
            held = new_bytes(known)
    gc.unfreeze()
    return {
        "losses": losses,
        "bytes": sizes[-1],
        "peak": held + peaks[-1],
        "ms": 1e3 * statistics.median(times),
    }


def main() -> None:
    """Run from the command line, on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="specformer.demo")
    parser.add_argument("--steps", type=int, default=50)
    options, overrides = parser.parse_known_args()
    config = apply_overrides(load_recipe(options.recipe), ["--data.path", options.data, *overrides])
    runtime = start(config.runtime)
    loader = open_loader(config, runtime, train=True)
    batches = [batch for batch, _ in zip(loader, range(options.steps), strict=False)]
    loader.close()
    expected: list[float] = []
    for name, parallel in {**CHOICES, _NUDGED: CHOICES["ddp"]}.items():
        chosen = dataclasses.replace(config, parallel=parallel)
        found = measure(chosen, batches, runtime, nudge=name == _NUDGED)
        expected = expected or found["losses"]
        pairs = zip(found["losses"], expected, strict=True)
        worst = max(abs(a - b) / b for a, b in pairs)
        if runtime.is_first:
            print(
                f"{options.recipe}  {name:<12}  loss differs by {worst:.1e}  "
                f"{found['bytes'] / 1e6:8.2f} MB  {found['peak'] / 1e6:8.2f} MB within backward  "
                f"{found['ms']:7.1f} ms",
                flush=True,
            )
    runtime.stop()


if __name__ == "__main__":
    main()

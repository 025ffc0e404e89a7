# SPDX-License-Identifier: MIT
"""The loader of one rank: the batches of its share of a log, the same for any number of workers.

A worker reads whole windows (a bounded shuffle buffer) and hands them over in order, so batches do
not depend on how many workers there are. All ranks take the same number of steps; every row is read
once.

    files = discover("logs/", ("2026-01-01", "2026-01-07"), schema)
    loader = LoaderConfig(batch_size=4096, num_workers=2).build(files, schema, rank=0, world_size=1)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader: ...
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from embeddings.schema.schema import Schema
from models.batch import Batch
from trainer.data.collate import assemble, empty_batch, pad_batch
from trainer.data.collator import Counted
from trainer.data.files import LogFile, RowInterval, contents, differences, fingerprint_of
from trainer.data.order import EpochOrder, Leg, Order
from trainer.data.splits import describe_days
from trainer.data.worker import Blocks, WindowDataset

_FILES_KEPT = 5_000  # files whose hashes stand in a checkpoint


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How a log is read.

    Attributes:
        batch_size: examples per rank and step; 0: as global_batch_size says.
        global_batch_size: examples of all ranks per step, divided evenly; 0: as batch_size says. It
            keeps what a model learns the same on any number of ranks.
        shuffle_rows: rows of a worker's shuffle buffer, rounded down to a multiple of batch_size.
        order: `shuffle`, `time` (days in order, shuffled inside a day) or `none`.
        num_workers: processes that read ahead; 0 reads in the training process.
        prefetch_windows: buffers that each worker keeps ready.
        pin_memory: whether batches are page-locked, for faster copies to an accelerator.
    """

    batch_size: int = 2048
    global_batch_size: int = 0
    shuffle_rows: int = 65_536
    order: Order = "shuffle"
    num_workers: int = 0
    prefetch_windows: int = 2
    pin_memory: bool = False

    def __post_init__(self) -> None:
        """Check the loader's own fields."""
        leasts = {"batch_size": 0, "global_batch_size": 0, "num_workers": 0, "prefetch_windows": 1}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"loader.{name}: expected at least {least}, got {getattr(self, name)}"
                )
        if self.shuffle_rows < 0:
            raise ValueError(f"loader.shuffle_rows: expected at least 0, got {self.shuffle_rows}")
        if not self.batch_size and not self.global_batch_size:
            raise ValueError(
                "loader.batch_size: expected at least 1 example per rank, or "
                "loader.global_batch_size for all ranks, got 0 for both"
            )

    def on(self, world_size: int) -> LoaderConfig:
        """Return these settings with the examples per rank of a job of `world_size` ranks.

        A global batch that does not divide evenly is rounded to the nearest that does, and
        `global_batch_size` is then what it became.

        Raises:
            ValueError: the global batch has fewer examples than there are ranks.
        """
        if self.batch_size:
            return self
        if self.global_batch_size < world_size:
            raise ValueError(
                f"loader.global_batch_size: expected at least one example for each of "
                f"{world_size} ranks, got {self.global_batch_size}"
            )
        size = round(self.global_batch_size / world_size)
        return dataclasses.replace(self, batch_size=size, global_batch_size=size * world_size)

    def describe(self, world_size: int) -> str:
        """Return the batch of a step of `world_size` ranks in words."""
        here = self.on(world_size).batch_size
        text = f"batch of {here * world_size:,} examples"
        if world_size > 1:
            text += f", {here:,} on each of {world_size} ranks"
        return text

    @property
    def window_rows(self) -> int:
        """Rows of a window: `shuffle_rows` rounded down to a positive multiple of `batch_size`."""
        return max(self.shuffle_rows // self.batch_size, 1) * self.batch_size

    def build(
        self,
        files: Sequence[LogFile],
        schema: Schema,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        epochs: Sequence[Sequence[LogFile]] = (),
    ) -> Loader:
        """Return the loader of one rank."""
        return Loader(
            files,
            schema,
            self.on(world_size),
            rank=rank,
            world_size=world_size,
            seed=seed,
            epochs=epochs,
        )


class Loader:
    """Iterates the batches of one rank and epoch, on the CPU.

    Args:
        files: the files to read.
        schema: which columns become which features.
        config: how to read them.
        rank: this rank, 0 to world_size - 1.
        world_size: number of ranks that share the rows.
        seed: seed of the order.
        epochs: of each epoch, those of `files` that it reads; empty: all in every epoch.

    Attributes:
        files: the files to read.
        num_epochs: how many epochs there are; 0: any number.
        epoch: the current epoch, from 0.
        step: batches of the epoch that have been handed out.
    """

    def __init__(
        self,
        files: Sequence[LogFile],
        schema: Schema,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        epochs: Sequence[Sequence[LogFile]] = (),
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"loader: expected a rank in [0, {world_size - 1}], got {rank}")
        self.schema = schema
        self.config = config
        self._counted = Counted()
        self.files = tuple(files)
        self._epochs, self.num_epochs = [tuple(one) for one in epochs], len(epochs)
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._fingerprint = fingerprint_of(self.files)
        self._blocks = Blocks(
            WindowDataset(schema, config.batch_size, rank),
            rank,
            num_workers=config.num_workers,
            prefetch_windows=config.prefetch_windows,
            pin_memory=config.pin_memory,
        )
        self._begin(0, ())

    def __len__(self) -> int:
        """Return the steps of the epoch, including those already taken; equal on all ranks."""
        return self._steps_before + self._num_steps

    @property
    def num_rows(self) -> int:
        """Rows of the epoch, of all ranks."""
        return self._order.num_rows

    def files_of(self, epoch: int) -> tuple[LogFile, ...]:
        """Return the files of an epoch; of the last where no epoch is left."""
        return self._epochs[min(epoch, self.num_epochs - 1)] if self._epochs else self.files

    def steps_of(self, epoch: int) -> int:
        """Return the steps of a whole epoch, equal on all ranks."""
        return -(-self._order_of(epoch).largest_share([self._leg()]) // self.config.batch_size)

    def rows_until(self, epoch: int) -> int:
        """Return the rows of all ranks in the epochs up to and with `epoch`."""
        if not self._epochs:
            return (epoch + 1) * self.num_rows
        files = (file for one in self._epochs[: epoch + 1] for file in one)
        return sum(file.num_rows for file in files)

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`, counted from 0, unless it is already in progress."""
        if epoch != self.epoch:
            self._begin(epoch, ())

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position as plain numbers and strings; the same on all ranks.

        Args:
            step: trained batches of the epoch, for a pipeline that reads ahead; None counts all
                batches that were handed out.
        """
        step = self.step if step is None else step
        if not self._steps_before <= step <= self.step:
            raise ValueError(
                f"loader: expected a step in [{self._steps_before}, {self.step}], got {step}"
            )
        legs = [*self._legs[:-1], self._legs[-1]._replace(num_steps=step - self._steps_before)]
        return {
            "epoch": self.epoch,
            "step": step,
            "legs": [list(leg) for leg in legs],
            "seed": self._seed,
            "order": self.config.order,
            "log": self._fingerprint,
            "files": contents(self.files) if len(self.files) <= _FILES_KEPT else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of `state`, saved at any world size and batch size.

        At the same world size, batch size and buffer, the next batches equal those of an
        uninterrupted run. Otherwise all remaining rows are read, once each.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: the log, the order or the seed differs, so the position means nothing.
        """
        legs = [Leg(*leg) for leg in state["legs"]]
        if sum(leg.num_steps for leg in legs):
            expected = (state["log"], state["order"], state["seed"])
            got = (self._fingerprint, self.config.order, self._seed)
            for name, old, new in zip(("log", "order", "seed"), expected, got, strict=True):
                if old != new:
                    found = self._changes(state) if name == "log" else ""
                    raise ValueError(
                        f"loader: cannot go on inside epoch {state['epoch']}: expected {name} "
                        f"{old!r}, as in the checkpoint, got {new!r}{found}; restore it, or begin "
                        "a new pass over the log in a run of its own that inherits what is learnt"
                    )
        self._begin(state["epoch"], legs)

    def describe(self) -> str:
        """Return how many rows of which days the loader reads."""
        rows = sum(file.num_rows for file in self.files)
        days = sorted({file.day for file in self.files if file.num_rows} - {""})
        of_days = f" of {len(days)} days ({describe_days(days)})" if days else ""
        return f"{rows:,} rows{of_days}"

    def _changes(self, state: dict[str, Any]) -> str:
        """Return which files differ from the checkpoint's, as far as it lists them."""
        before = state.get("files", {})
        found = differences(before, contents(self.files)) if before else ""
        return f" ({found})" if found else ""

    @property
    def fingerprint(self) -> str:
        """A hash of the files and rows that the loader reads, independent of their paths."""
        return self._fingerprint

    def intervals(self) -> Iterator[RowInterval]:
        """Yield this rank's rows in the order of its batches, of an epoch in order `none`."""
        for piece in self._order.share(self._legs, self._rank):
            yield from self._order.intervals(piece)

    def out_of_range(self, step: int | None = None) -> Counter[str]:
        """Return how many `identity` values, by feature, policy `count` has sent to row 0.

        Args:
            step: as in `state_dict`. Counts cover this loader only, not one whose position it
                continues.
        """
        return self._counted.total(self.step if step is None else step)

    def close(self) -> None:
        """End the worker processes; iterating again starts new ones."""
        self._blocks.close()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the epoch's batches from `step` on; a finished epoch starts again.

        Raises:
            ValueError: data is damaged or does not fit; the message names rank, worker, file, row
                group and row.
            RuntimeError: a worker process died; the message names rank and worker.
        """
        if self._finished:
            self._begin(self.epoch, ())
        batch_size = self.config.batch_size
        done = self.step - self._steps_before
        share = self._order.share(self._legs, self._rank)
        windows = self._order.windows(share, self.config.window_rows, skip=done * batch_size)
        for block in self._blocks.of(windows):
            if block.error:
                self.close()
                raise ValueError(block.error)
            for tensors, counts in zip(block.tensors(), block.counts, strict=True):
                self.step += 1
                self._counted.add(self.step, counts)
                yield self._even(assemble(tensors, self.schema))
        while self.step < len(self):
            self.step += 1
            yield self._even(empty_batch(self.schema))
        self._finished = True

    def _even(self, batch: Batch) -> Batch:
        """Pad the epoch's last batch to the size that it has on the rank with most rows."""
        return pad_batch(batch, self._last_size, self.schema) if self.step == len(self) else batch

    def _begin(self, epoch: int, legs: Sequence[Leg]) -> None:
        """Go to the end of `legs` of an epoch."""
        config = self.config
        self._counted.end_epoch()
        here = self._leg()
        legs = [leg for leg in legs if leg.num_steps]
        done = 0
        if legs and legs[-1]._replace(num_steps=0) == here:
            done = legs.pop().num_steps
        self.epoch = epoch
        self._order = self._order_of(epoch)
        self._legs = [*legs, here]
        self._steps_before = sum(leg.num_steps for leg in legs)
        # All ranks take the same steps, and batches of one size in each: row-wise sharded tables
        # exchange gradients of one batch size.
        largest = self._order.largest_share(self._legs)
        self._num_steps = -(-largest // config.batch_size)
        self._last_size = largest - (self._num_steps - 1) * config.batch_size
        self.step = self._steps_before + done
        self._finished = False

    def _leg(self) -> Leg:
        """Return a whole epoch of this run."""
        return Leg(self._world_size, self.config.batch_size, self.config.window_rows, 0)

    def _order_of(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.files_of(epoch), self.config.order, self._seed, epoch)

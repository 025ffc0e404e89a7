# SPDX-License-Identifier: MIT
"""A loader's worker: reads a window of rows, permutes it, cuts it into batches and sends it.

A window travels as one block of memory instead of separate tensors. It takes one shared-memory
segment and one file descriptor, whatever the number of features and batches, so low limits on open
files do not matter. Where /dev/shm is too small (containers often get 64 MB), the block goes
through the pipe. Without that, the worker would die of a bus error.

Errors in the data are sent as messages and raised where the batch is due, so their text arrives
intact.

Workers come from a fork server, because a process that holds an accelerator, communication threads
or OpenMP threads cannot be forked safely. The server imports this module once. Workers do not
import the main module again, which would repeat the trainer's imports in each of them. For the same
reason this module imports neither TorchRec nor models.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from multiprocessing import forkserver, parent_process
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from embeddings.schema.schema import Schema
from trainer.data.collator import BatchArrays, Collator
from trainer.data.columns import RowError
from trainer.data.discovery import day_of
from trainer.data.hashing import permutation
from trainer.data.order import Window
from trainer.data.reader import LogReader
from trainer.runtime.allocator import is_kept, keep_memory

_ALIGNMENT = 16
_EPOCH = date(1970, 1, 1)
_SHARED_MEMORY = "/dev/shm"


class Slot(NamedTuple):
    """Where an array lies in a block.

    Attributes:
        offset: its first byte.
        dtype: its NumPy type.
        shape: its shape.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Block:
    """The batches of one window, in one piece of memory.

    Attributes:
        memory: (bytes,) uint8 tensor; a NumPy array if it goes through the pipe.
        slots: per batch, where its arrays lie.
        counts: per batch, its out-of-range `identity` values by feature.
        error: what is wrong with the data; empty if nothing is.
    """

    memory: Tensor | np.ndarray
    slots: list[tuple[Slot, ...]]
    counts: list[Counter[str]]
    error: str = ""

    def tensors(self) -> list[list[Tensor]]:
        """Return each batch's tensors; they share the block's memory."""
        memory = self.memory
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory)
        return [[_view(memory, slot) for slot in batch] for batch in self.slots]

    def pin_memory(self) -> Block:
        """Return the block in page-locked memory."""
        memory = self.memory
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory)
        return Block(memory.pin_memory(), self.slots, self.counts, self.error)


class WindowDataset(Dataset[Block]):
    """Maps a `Window` to the block of its batches; each worker process keeps one open file.

    Args:
        schema: which columns become which features.
        batch_size: examples per batch.
        rank: this rank, for error messages.
    """

    def __init__(self, schema: Schema, batch_size: int, rank: int):
        self._batch_size = batch_size
        self._rank = rank
        self._collate = Collator(schema)
        self._reader = LogReader(schema)

    def __getitem__(self, window: Window) -> Block:
        """Read `window`; an error in the data comes back in the block."""
        counts: list[Counter[str]] = []
        try:
            return pack(self._batches(window, counts), counts)
        except ValueError as error:
            worker = get_worker_info()
            who = f"rank {self._rank}" + (f", loader worker {worker.id}" if worker else "")
            return Block(np.empty(0, np.uint8), [], counts, f"{who}: {error}")

    def _batches(self, window: Window, counts: list[Counter[str]]) -> list[BatchArrays]:
        """Read and permute a window's rows and convert them batch by batch."""
        parts, orders = [], []
        for piece, intervals in zip(window.pieces, window.intervals, strict=True):
            read = [rows for interval in intervals for rows in self._reader.read(interval)]
            rows = pa.Table.from_batches(read)
            if window.key is not None:
                order = permutation(rows.num_rows, *window.key, piece.start)[piece.low : piece.high]
                rows = rows.combine_chunks().take(pa.array(order))
            else:
                order = np.arange(rows.num_rows)
            parts.append(rows)
            orders.append(order)
        paths = {interval.path for part in window.intervals for interval in part}
        day = max((day_of(path) for path in paths), default="")
        number = (date.fromisoformat(day) - _EPOCH).days if day else 0
        (records,) = pa.concat_tables(parts).combine_chunks().to_batches()
        batches = []
        for first in range(0, records.num_rows, self._batch_size):
            try:
                rows = records.slice(first, self._batch_size)
                counts.append(Counter())
                batches.append(self._collate(rows, counts[-1], number))
            except RowError as error:
                place = _place(window, orders, first + error.row)
                raise ValueError(f"{error.message}, at {place}") from error
        return batches


def pack(batches: list[BatchArrays], counts: list[Counter[str]]) -> Block:
    """Copy batches into one block of memory."""
    slots, size = [], 0
    for batch in batches:
        places = []
        for array in batch.fields():
            places.append(Slot(size, array.dtype.name, array.shape))
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        slots.append(tuple(places))
    memory = np.empty(size, np.uint8)
    for batch, places in zip(batches, slots, strict=True):
        for array, slot in zip(batch.fields(), places, strict=True):
            room = memory[slot.offset : slot.offset + array.nbytes]
            room.view(array.dtype).reshape(array.shape)[...] = array
    if get_worker_info() is not None and not _fits_shared_memory(size):
        return Block(memory, slots, counts)
    return Block(torch.from_numpy(memory), slots, counts)


def unchanged(block: Any) -> Any:
    """Return the block as it is; module-level, so that workers import only this module."""
    return block


def _view(memory: Tensor, slot: Slot) -> Tensor:
    """Return the tensor that lies at `slot`."""
    dtype: torch.dtype = getattr(torch, slot.dtype)
    num_bytes = int(np.prod(slot.shape)) * dtype.itemsize
    return memory[slot.offset : slot.offset + num_bytes].view(dtype).view(slot.shape)


def _fits_shared_memory(num_bytes: int) -> bool:
    """Return whether shared memory has room for a block and for those of other workers."""
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize > 8 * num_bytes


def _place(window: Window, orders: list[np.ndarray], position: int) -> str:
    """Return the place in the log of the row at `position` of a permuted window."""
    for order, intervals in zip(orders, window.intervals, strict=True):
        if position >= len(order):
            position -= len(order)
            continue
        row = int(order[position])
        for interval in intervals:
            if row < interval.stop - interval.start:
                row += interval.start
                return f"row {row} of row group {interval.row_group} of {interval.path}"
            row -= interval.stop - interval.start
    raise AssertionError("a window's intervals hold its rows")


def start_server() -> None:
    """Start the process from which workers are forked, without waiting for its imports."""
    forkserver.set_forkserver_preload([__name__])
    with hidden_main():
        forkserver.ensure_running()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Hide the main module's origin, so that processes started here do not import it."""
    main = sys.modules["__main__"]
    names = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    try:
        for name in names:
            setattr(main, name, None)
        yield
    finally:
        for name, value in names.items():
            setattr(main, name, value)


def begin(keep: bool, _: int = 0) -> None:
    """Begin as a worker process. keep: as the trainer, keep freed memory for the next window."""
    if keep:
        keep_memory({})
    end_with_trainer()


def end_with_trainer() -> None:
    """Make this worker end when the training process ends, for any reason.

    A worker is a child of the fork server, which lives as long as any worker does. Without this, a
    killed trainer would leave both behind.
    """
    trainer = parent_process()

    def wait() -> None:
        if trainer is not None:
            trainer.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def dead_workers(workers: Sequence[Any]) -> str:
    """Return which worker processes ended and how; empty if none did."""
    dead = [
        f"loader worker {i} (pid {worker.pid}) ended with exit code {worker.exitcode}"
        for i, worker in enumerate(workers)
        if not worker.is_alive()
    ]
    return ", ".join(dead)


class Blocks:
    """Reads windows into blocks, here or in worker processes that last as long as this object.

    Args:
        dataset: reads a window.
        rank: of this process, for messages.
        num_workers: processes; 0 reads here.
        prefetch_windows: blocks that each worker keeps ready.
        pin_memory: whether blocks are page-locked.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        rank: int,
        *,
        num_workers: int,
        prefetch_windows: int,
        pin_memory: bool,
    ) -> None:
        self._dataset, self._rank = dataset, rank
        self._num_workers, self._prefetch = num_workers, prefetch_windows
        self._pin_memory = pin_memory
        self._windows = _Windows()
        self._workers: DataLoader[Block] | None = None
        if num_workers:
            start_server()

    def of(self, windows: Iterator[Window]) -> Iterator[Block]:
        """Yield the blocks of `windows` in their order.

        Raises:
            RuntimeError: a worker process died; the message names rank and worker.
        """
        self._windows.items = windows
        if not self._num_workers:
            for window in self._windows:
                block = self._dataset[window]
                yield block.pin_memory() if self._pin_memory else block
            return
        if self._workers is None:
            self._workers = self._start()
        blocks: Iterator[Block] | None = None
        while True:
            try:
                if blocks is None:
                    # Waits for a sign of life of workers that an earlier epoch has started.
                    with hidden_main():
                        blocks = iter(self._workers)
                block = next(blocks)
            except StopIteration:
                return
            except RuntimeError as error:
                iterator = getattr(self._workers, "_iterator", None)
                message = dead_workers(getattr(iterator, "_workers", []))
                if not message:
                    raise
                self.close()
                raise RuntimeError(
                    f"rank {self._rank}: {message}; killed for memory? Lower loader.shuffle_rows "
                    "or loader.num_workers, or look at the worker's own message above"
                ) from error
            yield block

    def close(self) -> None:
        """End the worker processes; the next windows start new ones."""
        workers, self._workers = self._workers, None
        iterator = getattr(workers, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()

    def _start(self) -> DataLoader[Block]:
        return DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._windows,
            collate_fn=unchanged,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch,
            persistent_workers=True,
            pin_memory=self._pin_memory,
            multiprocessing_context="forkserver",
            worker_init_fn=partial(begin, is_kept()),
        )


class _Windows(Sampler[Window]):
    """Hands out the windows of the epoch to the next free worker."""

    def __init__(self) -> None:
        self.items: Iterator[Window] = iter(())

    def __iter__(self) -> Iterator[Window]:
        """Return the windows set last."""
        return self.items

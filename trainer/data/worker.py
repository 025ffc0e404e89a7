# SPDX-License-Identifier: MIT
"""A loader's worker: reads a window of rows, converts it, permutes it, cuts it into batches.

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
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from multiprocessing import forkserver, parent_process
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from embeddings.schema.schema import Schema
from trainer.data.block import Block
from trainer.data.collator import Collator
from trainer.data.columns import RowError
from trainer.data.discovery import day_of
from trainer.data.files import RowInterval
from trainer.data.hashing import permutation
from trainer.data.order import Window
from trainer.data.reader import ColumnReader
from trainer.data.rows import Rows, cut
from trainer.runtime.allocator import is_kept, keep_memory

_EPOCH = date(1970, 1, 1)


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
        self._schema, self._collate = schema, Collator(schema)
        self._reader = ColumnReader(schema, schema.columns)

    def __getitem__(self, window: Window) -> Block:
        """Read `window`; an error in the data comes back in the block."""
        try:
            rows, order = self._read(window)
            return cut(rows, order, self._batch_size, _day_of(window))
        except ValueError as error:
            worker = get_worker_info()
            who = f"rank {self._rank}" + (f", loader worker {worker.id}" if worker else "")
            return Block.failed(f"{who}: {error}")

    def _read(self, window: Window) -> tuple[Rows, np.ndarray | None]:
        """Convert the rows of a window; return them with their order, None if it is that."""
        sizes = [sum(one.stop - one.start for one in of) for of in window.intervals]
        rows = Rows.empty(self._schema, sum(sizes))
        order = []
        for piece, intervals, size in zip(window.pieces, window.intervals, sizes, strict=True):
            if window.key is not None:
                chosen = permutation(size, *window.key, piece.start)[piece.low : piece.high]
                order.append(rows.filled + chosen)
            for interval in intervals:
                row = interval.start
                for records in self._reader.read(interval):
                    self._convert(records, rows, interval, row)
                    row += records.num_rows
        return rows, np.concatenate(order) if order else None

    def _convert(
        self, records: pa.RecordBatch, rows: Rows, interval: RowInterval, first: int
    ) -> None:
        """Convert records that begin at row `first` of a row group."""
        try:
            self._collate.convert(records, rows)
        except RowError as error:
            raise ValueError(
                f"{error.message}, at row {first + error.row} of row group {interval.row_group} of "
                f"{interval.path}"
            ) from error


def _day_of(window: Window) -> int:
    """Return the latest day of a window's files since the epoch; 0 if they have none."""
    paths = {interval.path for intervals in window.intervals for interval in intervals}
    day = max((day_of(path) for path in paths), default="")
    return (date.fromisoformat(day) - _EPOCH).days if day else 0


def unchanged(block: Any) -> Any:
    """Return the block as it is; module-level, so that workers import only this module."""
    return block


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

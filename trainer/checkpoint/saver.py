# SPDX-License-Identifier: MIT
"""Checkpoints that are written while training goes on.

Training stands still only while the state is copied within memory. A thread on every rank then
writes the copy, and talks to the others over a process group of its own, so that it never meets the
collectives of the steps. One checkpoint is written at a time: the next one waits for it.

A checkpoint that cannot be written (a full disk, a file system that is away) does not end the run:
that would lose what it was to keep. It is said loudly, nothing of it stays, and the next one is
tried in its turn. The last one of a run must succeed. A rank that writes slowly ends no run either:
it is named, and the others wait for it before the next checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from trainer.checkpoint import dcp
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.retention import note_metrics, prune
from trainer.checkpoint.schedule import CheckpointConfig
from trainer.checkpoint.staging import Staging, local_bytes
from trainer.checkpoint.storage import Folder
from trainer.runtime.memory import available_bytes
from trainer.runtime.runtime import RunError, Runtime

# Of the memory that is free, what a copy of the state may take.
_STAGING_SHARE = 0.8
# How long ranks wait for one that writes slowly; one that died is noticed at once.
PATIENCE = timedelta(days=7)
# How long a run that fails waits for the checkpoint that is being written.
_LAST_SECONDS = 30.0


class Saver:
    """Writes the checkpoints of one run below `directory`.

    say: is given lines for the log, and whether they are loud.
    Attributes: stalled_seconds, how long training has stood still for checkpoints, and of that
    waited_seconds, for the one before to be written; written_step, the step of the newest one
    written by this process, or -1, known when the next one begins; newest, the step and time
    (seconds since 1970) of the newest complete one, known at once; num_failed, how many could not
    be written; concluded, called when it is known what became of one.
    """

    def __init__(
        self,
        directory: Folder,
        config: CheckpointConfig,
        runtime: Runtime,
        timeout_seconds: float,
        say: Callable[[str, bool], None],
    ) -> None:
        self.directory = directory
        self.config = config
        self.stalled_seconds = self.waited_seconds = 0.0
        self.written_step = -1
        self.newest: tuple[int, float] | None = None
        self.num_failed = 0
        self.concluded: Callable[[], None] = lambda: None
        self._runtime = runtime
        self._say = say
        self._staging = Staging()
        self._copies: bool | None = None if config.asynchronous else False
        self._slow_seconds = timeout_seconds
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))
        self._thread: threading.Thread | None = None
        self._step = -1
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, tensors: Mapping[str, Any]) -> None:
        """Take the memory of the copies now: new memory would hold the first checkpoint's step up.

        tensors: what `save` will be given. Training waits for its checkpoints, and it is said, if
        there is no room.
        """
        if self._may_copy(tensors):
            self._staging.copy(tensors)

    def save(self, tensors: Mapping[str, Any], step: int, manifest: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of `step`. Collective; waits for the one before.

        manifest: JSON data; that of rank 0 is written.
        """
        started = time.monotonic()
        self.wait()
        self._meet()
        self.waited_seconds += time.monotonic() - started
        self._step = step
        # As it is now: the run goes on changing what it has handed over.
        content = {**copy.deepcopy(dict(manifest)), "saved": time.time()}
        if self._may_copy(tensors):
            arguments = self._staging.copy(tensors), step, content
            # No reason to stay for a process that ends: the checkpoint is complete or absent.
            self._thread = threading.Thread(
                target=self._write, args=arguments, name=f"checkpoint of step {step}", daemon=True
            )
            self._thread.start()
        else:
            self._write(tensors, step, content)
            self._conclude()
        self.stalled_seconds += time.monotonic() - started

    def wait(self, last: bool = False) -> None:
        """Wait for the checkpoint that is being written, if any.

        last: the run ends with it, so that it must have been written.

        Raises:
            RunError: it is the last one and could not be written; the same on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._conclude()
        if last and self._error is not None:
            raise RunError(
                f"{self._error}; the model is trained but not kept: make room, or choose another "
                "folder for it (checkpoint.folder), and run the same command again"
            ) from self._error

    def abandon(self) -> None:
        """Give the checkpoint that is being written a while to finish; for a run that has failed.

        The other ranks' threads do the same whatever has happened to the steps.
        """
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of the checkpoint written last, and keep it if it is among the best."""
        self.wait()
        if self._runtime.is_first and self._error is None and self.written_step >= 0:
            path = self.directory / step_name(self.written_step)
            try:
                note_metrics(path, metrics)
            except Exception as error:  # of any file system; the other ranks go on
                self._say(f"{path}: its metrics cannot be noted beside it ({error})", True)
            self._prune()
        self._meet()

    def _meet(self) -> None:
        """Wait for the first rank, whose files may be slow, here and not in a step's collective."""
        if dist.get_world_size() > 1:
            dist.barrier(group=self._group)

    def _may_copy(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether to write from a copy; asked once, as the copy takes the room itself."""
        if self._copies is None:
            self._copies = self._has_room(tensors)
        return self._copies

    def _has_room(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether there is memory for a copy; where it is short, training waits instead."""
        free = available_bytes(torch.device("cpu")) / self._runtime.local_world_size
        needed = local_bytes(tensors)
        if needed <= _STAGING_SHARE * free:
            return True
        self._tell(
            f"checkpoints: no room for a copy of the state of rank {self._runtime.rank} "
            f"({needed:,} bytes, {free:,.0f} free); training waits while they are written"
        )
        return False

    def _write(self, tensors: Mapping[str, Any], step: int, manifest: dict[str, Any]) -> None:
        """Write one checkpoint; runs in the thread."""
        self._error = None
        try:
            dcp.save(tensors, self.directory, step, manifest, self._group, self._watched)
            self.newest = step, time.time()
            if self._runtime.is_first:
                self._prune()
        except BaseException as error:  # raised, or said, by the thread that trains
            self._error = error
            self.num_failed += 1

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Name this rank if what is inside the block, its own writing, takes long."""
        timer = threading.Timer(self._slow_seconds, self._tell_slow, (self._step,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell_slow(self, step: int) -> None:
        self._tell(
            f"checkpoint of step {step:,}: rank {self._runtime.rank} has been writing its part for "
            f"{self._slow_seconds:g} s (runtime.timeout_seconds); training goes on and waits for "
            f"it before the next checkpoint; look at what {self.directory} is on "
            f"({socket.gethostname()}), or choose another checkpoint.folder"
        )

    def _tell(self, text: str) -> None:
        """Say something of this rank."""
        if self._runtime.is_first:
            self._say(text, True)
        else:
            print(f"[rank {self._runtime.rank}] {text}", file=sys.stderr, flush=True)

    def _prune(self) -> None:
        """Remove what no rule keeps; a file system that refuses costs space, not the run."""
        config = self.config
        try:
            prune(
                self.directory,
                config.keep,
                config.keep_best,
                config.keep_every_hours,
                config.best_metric,
            )
        except Exception as error:  # of any file system
            self._say(f"{self.directory}: old checkpoints cannot be removed ({error})", True)

    def _conclude(self) -> None:
        """Take note of what became of the checkpoint; raise what no full disk explains."""
        self.concluded()
        if self._error is None:
            self.written_step = self._step
            return
        if not isinstance(self._error, RunError):
            raise self._error
        self._say(
            f"ALERT {self._error}; training goes on, the next checkpoint is tried in its turn", True
        )

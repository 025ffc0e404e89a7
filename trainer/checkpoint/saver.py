# SPDX-License-Identifier: MIT
"""Writes checkpoints while training continues.

Training stops only while the state is copied in memory. A thread on every rank then writes the
copy. It uses its own process group, so its collectives never mix with those of the steps. One
checkpoint is written at a time: the next one waits for it.

A checkpoint that cannot be written (a full disk, an unreachable file system) does not end the run.
The failure is reported as an alert, the partial files are removed, and the next checkpoint is tried
when it is due. The last checkpoint of a run must succeed. A rank that writes slowly does not end
the run either: a message names it, and the other ranks wait for it before the next checkpoint.
"""

from __future__ import annotations

import copy
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import dcp
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.retention import note_metrics, prune
from trainer.checkpoint.schedule import CheckpointConfig
from trainer.checkpoint.staging import Staging, local_bytes
from trainer.checkpoint.storage import Folder, told_if_slow
from trainer.runtime.memory import available_bytes
from trainer.runtime.printable import printable
from trainer.runtime.runtime import RunError, Runtime

# Largest share of the free memory that a copy of the state may take.
_STAGING_SHARE = 0.8
# Seconds that a failing run waits for the checkpoint that is being written.
_LAST_SECONDS = 30.0


class Saver:
    """Writes the checkpoints of one run below `directory`.

    Args:
        directory: the folder of the run's checkpoints.
        config: when and how checkpoints are written.
        runtime: this process among the ranks.
        timeout_seconds: seconds after which a rank that is still writing is reported.
        say: takes lines for the log, and whether quiet mode prints them too.

    Attributes:
        stalled_seconds: seconds that training has stopped for checkpoints.
        waited_seconds: the part of it spent waiting for the previous checkpoint.
        written_step: step of the newest checkpoint that this process has written, or -1; set when
            the next one begins.
        newest: step and time (seconds since 1970) of the newest complete checkpoint; set at once.
        num_failed: number of checkpoints that could not be written.
        concluded: are called when the result of a checkpoint is known.
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
        self.concluded: list[Callable[[], None]] = []
        self._runtime = runtime
        self._say = say
        self._staging = Staging()
        self._copies: bool | None = None if config.asynchronous else False
        self._slow_seconds = timeout_seconds
        self._group = runtime.patient
        self._thread: threading.Thread | None = None
        self._step = -1
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, tensors: Mapping[str, Any]) -> None:
        """Allocate the memory of the copies now, so that the first checkpoint stalls its step less.

        If there is no room for copies, this is logged and training waits for its checkpoints.

        Args:
            tensors: the tensors that `save` will receive.
        """
        if self._may_copy(tensors):
            self._staging.copy(tensors)

    def save(self, tensors: Mapping[str, Any], step: int, manifest: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of `step`, after the previous one is written. Collective.

        Args:
            tensors: nested tensors of the state.
            step: number of finished steps.
            manifest: JSON data; rank 0 writes its own.
        """
        started = time.monotonic()
        self.wait()
        self._meet()
        self.waited_seconds += time.monotonic() - started
        self._step = step
        # A deep copy, because the run changes these objects while the thread writes.
        content = {**copy.deepcopy(dict(manifest)), "saved": time.time()}
        if self._may_copy(tensors):
            arguments = self._staging.copy(tensors), step, content
            # A daemon thread need not finish: the checkpoint is complete or absent.
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

        Args:
            last: whether this is the run's last checkpoint, which must have been written.

        Raises:
            RunError: the last checkpoint could not be written; raised on all ranks.
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
        """Wait up to `_LAST_SECONDS` for the current checkpoint; for a run that has failed.

        The other ranks' threads do the same, however their steps ended.
        """
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics beside the latest checkpoint, then remove the surplus checkpoints."""
        self.wait()
        if self._runtime.is_first and self._error is None and self.written_step >= 0:
            path = self.directory / step_name(self.written_step)
            try:
                note_metrics(path, metrics)
            except Exception as error:  # any file system's; the other ranks continue
                self._say(f"{path}: its metrics cannot be noted beside it ({error})", True)
            self._prune()
        self._meet()

    def _meet(self) -> None:
        """Wait here for the first rank's slow files, instead of in a collective of a step."""
        if dist.get_world_size() > 1:
            dist.barrier(group=self._group)

    def _may_copy(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether to write from a copy; decided once, as the copy uses the free memory."""
        if self._copies is None:
            self._copies = self._has_room(tensors)
        return self._copies

    def _has_room(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether there is memory for a copy of the state."""
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
        except BaseException as error:  # raised or logged by the training thread
            self._error = error
            self.num_failed += 1

    def _watched(self) -> AbstractContextManager[None]:
        """Report this rank if the block, in which it writes its part, takes too long."""
        step = self._step
        return told_if_slow(self._slow_seconds, lambda: self._tell_slow(step))

    def _tell_slow(self, step: int) -> None:
        self._tell(
            f"checkpoint of step {step:,}: rank {self._runtime.rank} has been writing its part for "
            f"{self._slow_seconds:g} s (runtime.timeout_seconds); training goes on and waits for "
            f"it before the next checkpoint; look at what {self.directory} is on "
            f"({socket.gethostname()}), or choose another checkpoint.folder"
        )

    def _tell(self, text: str) -> None:
        """Print a message about this rank."""
        if self._runtime.is_first:
            self._say(text, True)
        else:
            print(printable(f"[rank {self._runtime.rank}] {text}"), file=sys.stderr, flush=True)

    def _prune(self) -> None:
        """Remove surplus checkpoints; a failure is logged and does not end the run."""
        config = self.config
        try:
            prune(
                self.directory,
                config.keep,
                config.keep_best,
                config.keep_every_hours,
                config.best_metric,
            )
        except Exception as error:  # any file system's
            self._say(f"{self.directory}: old checkpoints cannot be removed ({error})", True)

    def _conclude(self) -> None:
        """Handle the result of the checkpoint; raise errors other than failed writes."""
        for call in self.concluded:
            call()
        if self._error is None:
            self.written_step = self._step
            return
        if not isinstance(self._error, RunError):
            raise self._error
        self._say(
            f"ALERT {self._error}; training goes on, the next checkpoint is tried in its turn", True
        )

# SPDX-License-Identifier: MIT
"""Where a sampled step's time goes: its parts, one after the other, which together are all of it.

Between two marks the time belongs to the part that the first one names, so parts add up to the step
by construction, and what no part claims is `other`. On a CPU marks read the clock. On an
accelerator they are events in the stream that computes, read when the next sample begins: nothing
waits, and what overlaps with computing (copies, exchanges ahead of time) costs what the stream
waited for it. Outside a sampled step nothing is in the way.

What the host is seen to wait for in an exchange is `communication`: ids, vectors, the agreement of
all ranks. Gradients of dense weights are averaged inside `backward`, those of tables go back inside
`update`, where waiting cannot be told from work without a profiler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm_ops import Request

# The parts of a sampled step, which together are all of it.
PHASES = (
    "input_wait",
    "host_to_device",
    "communication",
    "lookup",
    "dense_forward",
    "backward",
    "update",
    "other",
)
# Where a rank waits for no other: what it takes there is its own doing.
_OWN = ("input_wait", "host_to_device", "dense_forward")


class Phases:
    """Times the parts of sampled steps.

    Args:
        embeddings: the layer whose forward is the lookup.
        device: where the step computes.

    Attributes:
        seconds: by part, of all samples read so far.
        samples: how many samples were read.
        own_seconds: of the latest sample, the time this rank spent without waiting for others; 0
            before the first.
    """

    def __init__(self, embeddings: nn.Module, device: torch.device) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.samples, self.own_seconds = 0, 0.0
        self._embeddings, self._device = embeddings, device
        self._stack: list[str] | None = None  # parts that are open, None outside a sample
        self._marks: list[tuple[str, Any]] = []
        self._stream: Any = None
        self._thread = 0

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time belongs to `name`, but for parts that are opened within."""
        return nullcontext() if self._stack is None else self._part(name)

    @contextmanager
    def step(self, step: int, interval: int) -> Iterator[None]:
        """Run a training step; time it if it is the one in the middle of an interval.

        Args:
            step: its number, from 1.
            interval: in steps. The first step of an interval counts lookups.
        """
        if step % interval != (interval // 2 + 1) % interval:
            yield
            return
        self.read()
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        self._stack, self._thread = ["other"], threading.get_ident()
        undo = self._watch()
        self._mark()
        try:
            yield
            self._mark()
        except BaseException:
            self._marks = []
            raise
        finally:
            self._stack = None
            for restore in undo:
                restore()
        if self._device.type != "cuda":
            self.read()

    def read(self) -> None:
        """Add up the latest sample; on an accelerator this waits for its end, long past by then."""
        if not self._marks:
            return
        if self._device.type == "cuda":
            self._marks[-1][1].synchronize()
        own = 0.0
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds = end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            self.seconds[name] += seconds
            own += seconds if name in _OWN else 0.0
        self._marks = []
        self.samples += 1
        self.own_seconds = own

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._open(name)
        try:
            yield
        finally:
            self._close()

    def _open(self, name: str) -> None:
        if self._stack is not None:
            self._stack.append(name)
            self._mark()

    def _close(self) -> None:
        if self._stack is not None:
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        """From now on time belongs to the innermost part."""
        assert self._stack is not None
        now: Any = None
        if self._stream is None:
            now = time.perf_counter()
        else:
            now = torch.cuda.Event(enable_timing=True)
            now.record(self._stream)
        self._marks.append((self._stack[-1], now))

    def _watch(self) -> list[Callable[[], None]]:
        """See lookups, and waits of exchanges, of this step; return how to stop that."""
        layer = self._embeddings
        before = layer.register_forward_pre_hook(lambda *_: self._open("lookup"))
        after = layer.register_forward_hook(lambda *_: self._close())
        owners: tuple[tuple[Any, str], ...] = ((dist, "all_reduce"), (Request, "_wait_impl"))
        undo: list[Callable[[], None]] = [before.remove, after.remove]
        for owner, name in owners:
            original = getattr(owner, name)
            setattr(owner, name, self._timed(original))
            undo.append(lambda o=owner, n=name, f=original: setattr(o, n, f))
        return undo

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            own = threading.get_ident() == self._thread  # not that of a checkpoint, or of autograd
            with self.part("communication") if own else nullcontext():
                return call(*arguments, **named)

        return timed

# SPDX-License-Identifier: MIT
"""Run a function on R gloo processes: one pool for a whole test session.

Starting a process costs seconds of imports, a process group milliseconds; so processes stay and
every call starts and stops its own group. A function that fails on any rank fails the test with
that rank's traceback; one that hangs is killed with its processes, and the next call starts fresh
ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

_START_SECONDS = 240.0
_GRACE_SECONDS = 5.0


class Processes:
    """A pool of processes that runs functions as ranks of a process group."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int = 2,
        timeout_seconds: float = 120.0,
    ) -> list[Any]:
        """Call `function(runtime, *arguments)` on each rank and return the results by rank.

        `function` is a module-level function; arguments and results are pickled.

        Raises:
            AssertionError: a rank failed; the message is its traceback.
            TimeoutError: a rank did not finish in time.
        """
        self._grow(max(2, world_size))
        port = free_port()
        connections = [connection for _, connection in self._workers[:world_size]]
        for rank, connection in enumerate(connections):
            connection.send((function, arguments, rank, world_size, port, timeout_seconds))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        failures: dict[int, str] = {}
        while len(results) + len(failures) < world_size:
            pending = [
                connection
                for rank, connection in enumerate(connections)
                if rank not in results and rank not in failures
            ]
            for ready in wait(pending, timeout=max(0.0, deadline - time.monotonic())):
                rank = connections.index(ready)  # pyright: ignore[reportArgumentType]
                try:
                    ok, value = connections[rank].recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else failures)[rank] = value
                if not ok:
                    # The others may wait for this rank in a collective for ever.
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() >= deadline:
                break
        if len(results) + len(failures) < world_size:
            self.stop()
        if failures:
            text = "\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
            raise AssertionError(text)
        if len(results) < world_size:
            late = [rank for rank in range(world_size) if rank not in results]
            raise TimeoutError(f"ranks {late} did not finish within {timeout_seconds:g} s")
        return [results[rank] for rank in range(world_size)]

    def stop(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _grow(self, size: int) -> None:
        """Start processes until there are `size`."""
        context = multiprocessing.get_context("spawn")
        fresh: list[Connection] = []
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            # No daemon: a rank may start a loader's workers. It ends when the pipe closes.
            process = context.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            fresh.append(ours)
        for connection in fresh:
            if not connection.poll(_START_SECONDS):
                raise TimeoutError(f"a test process did not start within {_START_SECONDS:g} s")
            connection.recv()


def _serve(connection: Connection) -> None:
    """Run what is sent until the other side hangs up."""
    from torchrec.distributed import collective_utils

    import trainer.distributed.parallelize  # noqa: F401  (seconds of imports, before the first call's time runs)
    from trainer.runtime import runtime

    connection.send("ready")
    while True:
        try:
            function, arguments, rank, world_size, port, timeout = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        # TorchRec agrees on this once a process, which hangs when groups change.
        collective_utils._INITIALIZED = False
        started = None
        faulthandler.dump_traceback_later(0.9 * timeout)  # says where a rank hangs
        try:
            config = runtime.RuntimeConfig(device="cpu", timeout_seconds=timeout, num_threads=1)
            started = runtime.start(config)
            answer = (True, function(started, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        # Answer first: a rank that failed may not be able to leave its group.
        connection.send(answer)
        if started is not None:
            started.stop()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """The session's pool of processes."""
    pool = Processes()
    yield pool
    pool.stop()

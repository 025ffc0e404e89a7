# SPDX-License-Identifier: MIT
"""How a loader's worker processes come to life and how their death is told.

Workers come from a fork server: a process that holds an accelerator, communication threads or
OpenMP threads cannot be forked safely. The server imports what a worker needs, once; workers do not
import the main module again, which would cost each of them the trainer's imports.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, parent_process
from typing import Any

_WORKER_MODULE = "trainer.data.worker"


def start_server() -> None:
    """Start the process from which workers are forked; its imports run beside what follows."""
    forkserver.set_forkserver_preload([_WORKER_MODULE])
    with hidden_main():
        forkserver.ensure_running()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Hide where the main module comes from, so that processes started here do not import it."""
    main = sys.modules["__main__"]
    names = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    try:
        for name in names:
            setattr(main, name, None)
        yield
    finally:
        for name, value in names.items():
            setattr(main, name, value)


def end_with_trainer(_: int = 0) -> None:
    """Let this worker end when the process that trains does, however that ends.

    A worker is a child of the server, which lives as long as any worker does: without this, a
    killed trainer would leave both behind for good.
    """
    trainer = parent_process()

    def wait() -> None:
        if trainer is not None:
            trainer.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def dead_workers(workers: Sequence[Any]) -> str:
    """Say which worker processes ended and how, or return an empty string."""
    dead = [
        f"loader worker {i} (pid {worker.pid}) ended with exit code {worker.exitcode}"
        for i, worker in enumerate(workers)
        if not worker.is_alive()
    ]
    return ", ".join(dead)

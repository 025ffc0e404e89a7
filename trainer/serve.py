# SPDX-License-Identifier: MIT
"""Serve a model over HTTP: python -m trainer.serve PATH [--port 8000].

PATH is an exported model, a run, a checkpoint, or a folder of nights (with serving.json), whose
serving model is followed: a night's promotion, or a rollback, is served within seconds, and no
request is dropped. POST /score takes columns as JSON or Arrow IPC; /health, /ready and /metrics
are for orchestrators and Prometheus. It listens on the loopback interface unless --host names
another, and has no passwords: put a proxy with TLS and authentication before any other address.
SIGTERM ends it once the requests that it has taken are answered.

Exit codes: as trainer.train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from models.plugins import TOWER_HELP
from trainer.runtime.program import Parser, program, quiet_pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(prog=program("trainer.serve"), description="Serve a model over HTTP.")
    add = parser.add_argument
    add("path", type=Path, help="an exported model, a run, a checkpoint, or a folder of nights")
    add("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    add("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    add("--threads", type=int, default=1, help="of computation (default: 1)")
    add("--body-bytes", type=int, default=8 << 20, help="of a request (default: 8 MiB)")
    add("--request-rows", type=int, default=10_000, help="of a request (default: 10,000)")
    add("--batch-rows", type=int, default=4096, help="computed together (default: 4,096)")
    add("--queue-rows", type=int, default=40_000, help="that may wait (default: 40,000)")
    add("--tower", metavar="MODULE:CLASS", default="", help=TOWER_HELP)
    options = parser.parse_args(arguments)

    # Imported after the words are read: --help and a misspelt option need no torch.
    import torch

    from trainer.recipes.load import import_tower
    from trainer.runtime.exit_codes import exit_code
    from trainer.runtime.runtime import RunError

    def work() -> None:
        try:
            import uvicorn

            from trainer.serving.service import Service, ServiceConfig
        except ModuleNotFoundError as error:
            raise RunError(
                f"serve: expected the package {error.name!r}, which is not installed; install "
                "requirements/serve.txt (or the extra 'serve')"
            ) from error
        if options.tower:
            import_tower(options.tower)
        if options.threads < 1:
            raise ValueError(f"--threads: expected at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
        config = ServiceConfig(
            body_bytes=options.body_bytes,
            request_rows=options.request_rows,
            batch_rows=options.batch_rows,
            queue_rows=options.queue_rows,
        )
        app = Service(options.path, config).app
        uvicorn.run(
            app, host=options.host, port=options.port, access_log=False, log_level="warning"
        )

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

# SPDX-License-Identifier: MIT
"""A real MLflow server on loopback, with SQLite: the application that `mlflow server` serves.

Started without that command, which imports everything twice and runs jobs that no test asks for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import free_port

_START_SECONDS = 120


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=_START_SECONDS) as answer:
        assert answer.status == 200


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Start a server that keeps everything below `folder`; yield its URL once it answers."""
    port = free_port()
    environment = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'mlflow.sqlite'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    words = ["-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words, "mlflow.server.fastapi_app:app"],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
    importlib.import_module("mlflow")  # the client's seconds pass while the server starts
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
    try:
        while True:
            assert process.poll() is None, (folder / "log.txt").read_text("utf-8")
            assert time.monotonic() < deadline, "the MLflow server does not answer"
            with contextlib.suppress(OSError):
                _get(f"{url}/health")
                break
            time.sleep(0.1)
        _get(f"{url}/api/2.0/mlflow/experiments/search?max_results=1")  # makes the database
        yield url
    finally:
        process.terminate()
        process.wait()

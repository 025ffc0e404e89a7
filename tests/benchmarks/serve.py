# SPDX-License-Identifier: MIT
"""The service under load with model swaps: python -m tests.benchmarks.serve A B --data LOGS.

A and B are exported models of one schema. Clients on the loopback interface send `--requests`
requests of `--rows` rows, as Arrow, while the pointer changes between the two `--swaps` times.
Every answer is compared with its own model's scores. Prints errors, mixed answers, the service's
own counts beside the clients', latencies, and resident memory after each swap. Clients and service
share this machine and this process, so latencies are upper bounds.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import torch
import uvicorn

from tests.support.processes import free_port
from tests.support.serving import read
from trainer.serving import Scorer
from trainer.serving.bodies import ARROW
from trainer.serving.service import Service, ServiceConfig

DAYS = ("2026-01-01", "2026-01-02")


class Load:
    """Clients that ask until enough requests are answered."""

    def __init__(self, port: int, body: bytes, expected: dict[str, np.ndarray], task: str) -> None:
        self._port, self._body, self._expected, self._task = port, body, expected, task
        self._lock = threading.Lock()
        self.seconds: list[float] = []
        self.errors = self.mixed = 0

    def client(self, number: int) -> None:
        """Ask until `number` requests of all clients are answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while len(self.seconds) < number:
            begun = time.perf_counter()
            connection.request("POST", "/score", self._body, {"Content-Type": ARROW})
            answer = connection.getresponse()
            content = answer.read()
            taken = time.perf_counter() - begun
            good = answer.status == 200
            table = pa.ipc.open_stream(content).read_all() if good else None
            with self._lock:
                self.seconds.append(taken)
                self.errors += not good
                if table is not None:
                    expected = self._expected[table.schema.metadata[b"model"].decode()]
                    gap = np.abs(table[self._task].to_numpy() - expected).max()
                    self.mixed += bool(gap > 1e-5)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("--data", type=Path, required=True, help="a folder of Parquet files")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, store: Path) -> None:
    """Serve from a store in `store` and print what happened."""
    for day, model in zip(DAYS, options.models, strict=True):
        shutil.copytree(model, store / "models" / day / "checkpoint")
    scorers = [Scorer.load(model) for model in options.models]
    rows = read(options.data).select(scorers[0].columns).slice(0, options.rows)
    task = scorers[0].tasks[0]
    expected = {one.version: one(rows)[task] for one in scorers}
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)

    def point(day: str) -> None:
        (store / ".next").write_text(json.dumps({"model": day}))
        (store / ".next").rename(store / "serving.json")

    point(DAYS[0])
    service = Service(store, ServiceConfig(follow_seconds=0.1))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(service.app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    load = Load(port, sink.getvalue(), expected, task)
    clients = [
        threading.Thread(target=load.client, args=(options.requests,))
        for _ in range(options.clients)
    ]
    begun = time.perf_counter()
    for client in clients:
        client.start()
    memory = []
    for swap in range(1, options.swaps + 1):
        while len(load.seconds) < swap * options.requests // (options.swaps + 1):
            time.sleep(0.02)
        point(DAYS[swap % 2])
        while service.batcher.scorer.version != list(expected)[swap % 2]:
            time.sleep(0.02)
        memory.append(psutil.Process().memory_info().rss >> 20)
    for client in clients:
        client.join()
    total = time.perf_counter() - begun
    ok = service.metrics.requests.labels("200")._value.get()
    server.should_exit = True
    thread.join()
    quantiles = np.percentile(load.seconds, [50, 99]) * 1e3
    print(f"requests {len(load.seconds):,}, errors {load.errors}, mixed {load.mixed}")
    print(
        f"counted by the service {ok:,.0f}; rows/s {len(load.seconds) * options.rows / total:,.0f}"
    )
    print(f"p50 {quantiles[0]:.1f} ms, p99 {quantiles[1]:.1f} ms at {options.rows} rows")
    print(f"resident MB after each swap: {memory}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""Scores over HTTP: a FastAPI application around one scorer at a time.

  POST /score    columns as JSON or Arrow IPC; answers in the same format, with the model's version
  GET  /health   the process answers          GET /ready    a model serves, and no stop was asked
  GET  /metrics  for Prometheus

Requests beyond the limits get an answer that says so: 413 for a body or rows that are too many, 429
with Retry-After where too much waits, 400 with the column and row that do not fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from trainer.data.frames import to_table
from trainer.runtime.printable import printable
from trainer.serving.batching import Batcher, Full
from trainer.serving.bodies import JSON, read_columns, write_answer
from trainer.serving.following import model_place
from trainer.serving.scorer import Scorer

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Limits of a service.

    Args:
        body_bytes: of a request.
        request_rows: of a request.
        batch_rows: rows of requests that are computed together.
        queue_rows: rows that may wait.
        follow_seconds: between two looks at the pointer to the model that serves.
    """

    body_bytes: int = 8 << 20
    request_rows: int = 10_000
    batch_rows: int = 4096
    queue_rows: int = 40_000
    follow_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Check the limits."""
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"--{name.replace('_', '-')}: expected more than 0, got {value}")


class _Metrics:
    """What Prometheus reads; of this service alone."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "fullrank_serve_requests", "Requests to /score", ["code"], registry=registry
        )
        self.rows = Counter("fullrank_serve_rows", "Rows scored", ["model"], registry=registry)
        self.seconds = Histogram(
            "fullrank_serve_seconds",
            "Time of a request that was scored",
            registry=registry,
            buckets=_SECONDS,
        )
        self.batch = Histogram(
            "fullrank_serve_batch_rows",
            "Rows computed together",
            registry=registry,
            buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384),
        )
        self.waiting = Gauge("fullrank_serve_waiting_rows", "Rows that wait", registry=registry)
        self.swaps = Counter(
            "fullrank_serve_swaps", "Changes of the model", ["result"], registry=registry
        )


class Service:
    """A scorer behind HTTP.

    Attributes:
        app: the ASGI application.
        batcher: scores its requests.

    Args:
        place: a model's folder, or a store of published models.
        config: limits.

    Raises:
        ValueError: there is no model, or it cannot be loaded.
    """

    def __init__(self, place: Path, config: ServiceConfig) -> None:
        self._place, self._config, self.metrics = place, config, _Metrics()
        self._model = model_place(place)
        scorer = Scorer.load(self._model)
        self.batcher = Batcher(
            scorer, config.batch_rows, config.queue_rows, self.metrics.batch.observe
        )
        self._refused: Path | None = None
        # Without pages of documentation, which would load scripts from elsewhere.
        self.app = FastAPI(lifespan=self._lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_api_route("/score", self._score, methods=["POST"])
        self.app.add_api_route("/health", self._health)
        self.app.add_api_route("/ready", self._ready)
        self.app.add_api_route("/metrics", self._read_metrics)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            self.batcher.close()

    async def _follow(self) -> None:
        """Change over to the model that the pointer names, whenever it names another."""
        while True:
            await asyncio.sleep(self._config.follow_seconds)
            wanted: Path | None = None
            try:
                wanted = model_place(self._place)
                if wanted in (self._model, self._refused):
                    continue
                scorer = await asyncio.to_thread(Scorer.load, wanted)
            except Exception as error:  # the model before goes on
                # Only a model that is no model is left alone; a pointer, or memory, may come back.
                self._refused = wanted if isinstance(error, ValueError) else None
                self.metrics.swaps.labels("refused").inc()
                text = f"ALERT model not changed: {error}"
                print(printable(text), file=sys.stderr, flush=True)
                continue
            self.batcher.scorer, self._model, self._refused = scorer, wanted, None
            self.metrics.swaps.labels("done").inc()
            print(printable(f"{scorer.version} serves"), file=sys.stderr, flush=True)

    async def _score(self, request: Request) -> Response:
        begun = time.perf_counter()
        response = await self._answer(request)
        self.metrics.requests.labels(str(response.status_code)).inc()
        if response.status_code == 200:
            self.metrics.seconds.observe(time.perf_counter() - begun)
        return response

    async def _answer(self, request: Request) -> Response:
        """Return the scores of a request, or why there are none."""
        limit, kind = self._config.body_bytes, request.headers.get("content-type", "")
        kind = kind.partition(";")[0].strip().lower()
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                return _said(413, f"body: expected at most {limit:,} bytes; send fewer rows")
        try:
            columns = read_columns(bytes(body), kind)
            rows = to_table(columns, self.batcher.scorer.config.schema.without_labels())
            if rows.num_rows > self._config.request_rows:
                return _said(
                    413,
                    f"rows: expected at most {self._config.request_rows:,}, got "
                    f"{rows.num_rows:,}; send several requests",
                )
            answer = await self.batcher.score(rows)
        except Full:
            response = _said(429, "too many rows wait; ask again in a second")
            response.headers["retry-after"] = "1"
            return response
        except (ValueError, pa.ArrowException) as error:
            return _said(400, printable(str(error)))
        self.metrics.rows.labels(answer.version).inc(rows.num_rows)
        return Response(write_answer(answer, kind), media_type=kind)

    async def _health(self) -> Response:
        return Response('{"status": "ok"}', media_type=JSON)

    async def _ready(self) -> Response:
        version = self.batcher.scorer.version
        return Response(f'{{"status": "ready", "model": "{version}"}}', media_type=JSON)

    async def _read_metrics(self) -> Response:
        self.metrics.waiting.set(self.batcher.waiting_rows)
        return Response(generate_latest(self.metrics.registry), media_type=_PROMETHEUS)


def _said(code: int, text: str) -> Response:
    """Return an answer of one line."""
    return Response(f"{text}\n", status_code=code, media_type="text/plain; charset=utf-8")

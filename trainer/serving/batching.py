# SPDX-License-Identifier: MIT
"""Requests that wait are scored together, by one model each time.

A model costs nearly as much for one row as for a hundred. So while a batch is computed the requests
that come in wait, and the next batch takes all of them, up to a number of rows. Nobody waits for a
timer. A batch takes the scorer that serves when it begins, so no answer is of two models.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from trainer.serving.scorer import Scorer, Scores


class Full(Exception):
    """More rows wait than may wait."""


class Answer(NamedTuple):
    """Scores of a request, and the version of the one model that gave them."""

    version: str
    scores: Scores


class _Request(NamedTuple):
    rows: pa.Table
    answer: asyncio.Future[Answer]


class Batcher:
    """Scores requests in batches, in one thread.

    Attributes:
        scorer: that serves; assign another to change over.
        waiting_rows: rows of requests that no batch has taken yet.

    Args:
        scorer: to begin with.
        batch_rows: of one batch.
        queue_rows: that may wait.
        observe: is told the rows of each batch.
    """

    def __init__(
        self,
        scorer: Scorer,
        batch_rows: int,
        queue_rows: int,
        observe: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self.scorer, self.waiting_rows = scorer, 0
        self._batch_rows, self._queue_rows, self._observe = batch_rows, queue_rows, observe
        self._waiting: deque[_Request] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._running: asyncio.Task[None] | None = None

    async def score(self, rows: pa.Table) -> Answer:
        """Return the scores of a request.

        Raises:
            Full: too many rows wait.
            ValueError: the rows do not fit the model.
        """
        if self._waiting and self.waiting_rows + rows.num_rows > self._queue_rows:
            raise Full
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(rows, answer))
        self.waiting_rows += rows.num_rows
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._work())
        return await answer

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    async def _work(self) -> None:
        """Score until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, total = [self._waiting.popleft()], 0
            total = batch[0].rows.num_rows
            while self._waiting and total + self._waiting[0].rows.num_rows <= self._batch_rows:
                batch.append(self._waiting.popleft())
                total += batch[-1].rows.num_rows
            self.waiting_rows -= total
            self._observe(total)
            found = await loop.run_in_executor(self._thread, _score, self.scorer, batch)
            for request, answer in zip(batch, found, strict=True):
                if request.answer.done():  # the client has gone
                    continue
                if isinstance(answer, Exception):
                    request.answer.set_exception(answer)
                else:
                    request.answer.set_result(answer)


def _score(scorer: Scorer, batch: list[_Request]) -> list[Answer | Exception]:
    """Return an answer a request; where one does not fit, the others are scored without it."""
    try:
        rows = pa.concat_tables([one.rows for one in batch], promote_options="permissive")
        scores = scorer(rows)
    except Exception as error:  # a request's own fault, or ours: never the others'
        if len(batch) == 1:
            return [error]
        return [answer for one in batch for answer in _score(scorer, [one])]
    found: list[Answer | Exception] = []
    first = 0
    for one in batch:
        last = first + one.rows.num_rows
        part = {name: values[first:last] for name, values in scores.items()}
        found.append(Answer(scorer.version, part))
        first = last
    return found

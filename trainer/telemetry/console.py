# SPDX-License-Identifier: MIT
"""The console output of a run, on stderr: a progress bar, a line an interval, JSON, or alerts.

Only rank 0 prints. Every mode prints alerts.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.runtime.atomic_files import json_ready
from trainer.runtime.credentials import without_credentials
from trainer.telemetry.summary_lines import interval_line

Mode = Literal["rich", "plain", "json", "quiet"]


class Console:
    """Shows the progress of a run.

    Args:
        mode: `rich` is a progress bar where stderr is a terminal, else `plain`.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.total_steps: int | None = None
        self._progress = _progress_bar() if mode == "rich" and sys.stderr.isatty() else None

    def start(self, step: int, total_steps: int | None) -> None:
        """Begin after `step` finished steps of `total_steps` (None: unknown)."""
        self.total_steps = total_steps
        self._started, self._first_step = time.perf_counter(), step
        if self._progress is not None:
            self._progress.start()
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            # A new task, so that the steps of an earlier process do not count as speed.
            self._task = self._progress.add_task(
                "train",
                total=self.total_steps,
                completed=step,
                text="starting",
                steps=self._steps_text(step),
            )

    def step(self, step: int) -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, steps=self._steps_text(step))

    def interval(self, record: Mapping[str, Any]) -> None:
        """Show an interval's point of the curve."""
        if self.mode == "json":
            print(json.dumps(json_ready(record)), file=sys.stderr, flush=True)
        elif self._progress is not None:
            self._progress.update(self._task, text=interval_line(record))
        else:
            steps, eta = self._steps_text(record["step"]), self._eta(record["step"])
            self.say(f"step {steps}  {interval_line(record)}  eta {eta}")

    def say(self, text: str, loud: bool = False) -> None:
        """Print a line above the bar, as JSON in that mode; if quiet, only if `loud`."""
        if self.mode == "quiet" and not loud:
            return
        text = without_credentials(text)
        if self.mode == "json":
            now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
            line = json.dumps({"time": now, "level": "alert" if loud else "info", "message": text})
            print(line, file=sys.stderr, flush=True)
            return
        line = f"{datetime.datetime.now():%H:%M:%S} {text}"
        if self._progress is not None:
            style, console = "bold red" if loud else None, self._progress.console
            console.print(line, style=style, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the bar. Safe to call twice."""
        if self._progress is not None:
            self._progress.stop()

    def _steps_text(self, step: int) -> str:
        return f"{step:,}/{self.total_steps:,}" if self.total_steps else f"{step:,}"

    def _eta(self, step: int) -> str:
        """Return the time left at this process' mean speed, as h:mm:ss, or '?'."""
        if not self.total_steps:
            return "?"
        seconds = time.perf_counter() - self._started
        done, left = step - self._first_step, self.total_steps - step
        return str(datetime.timedelta(seconds=round(seconds * left / done))) if done else "?"


def _progress_bar() -> Progress:
    """Return the progress bar, on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[steps]}"),
        TextColumn("{task.fields[text]}"),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=RichConsole(stderr=True),
    )

# SPDX-License-Identifier: MIT
"""The reports of a training run: a curve file, alerts, and listeners.

Rank 0 reports, always on stderr. Every `interval_steps` steps, and once more at the last step, it
appends one JSON object to DIR/curves.jsonl: step, rows, seconds, loss, auc, rows_per_second,
input_wait, learning_rate, loss_scale, skipped, gradient_norm, nonfinite_steps, label_mean,
prediction_*, alerts, and of a sampled step of all ranks (`trainer/telemetry/table_stats.py`)
step_features, step_lookups, step_collectives, step_ids_in, step_ids_sent, step_ids_looked_up,
step_bytes_sent. Steps are counted from 1, so nothing is written at step 0. Loss is the mean over
the interval's steps, AUC and the predictions' statistics those of the latest `window_examples`
examples, both on rank 0; `input_wait` is the share of the interval's time that rank 0 spent waiting
for the loader.

Between intervals nothing is read from the device, so that telemetry never stalls an accelerator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer.metrics.validity import all_doubts
from trainer.runtime.json_lines import append, truncate
from trainer.telemetry.alerts import Alerts
from trainer.telemetry.console import Console, Mode
from trainer.telemetry.running_stats import InputTimer, Losses, Window
from trainer.telemetry.summary_lines import evaluation_line


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """How often and in what form a run reports.

    Attributes:
        interval_steps: Steps between reports.
        mode: `rich`: a progress bar if stderr is a terminal, else `plain`. `plain`: a line per
            interval. `json`: only JSON lines, the curve's object per interval and other lines as
            `message`. `quiet`: only alerts.
        window_examples: Examples of rank 0 in the running AUC.
        alert_after_steps: Warm-up steps in which no alert is raised.
        alert_intervals: Consecutive intervals that make a stuck AUC.
    """

    interval_steps: int = 50
    mode: Mode = "rich"
    window_examples: int = 65536
    alert_after_steps: int = 200
    alert_intervals: int = 3

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("interval_steps", "window_examples", "alert_intervals", "alert_after_steps"):
            least = 0 if name == "alert_after_steps" else 1
            if getattr(self, name) < least:
                raise ValueError(
                    f"telemetry.{name} must be at least {least}, got {getattr(self, name)}"
                )

    def build(self, output_dir: Path, rank: int, total_steps: int | None) -> Telemetry:
        """Return the telemetry of a run of `total_steps` steps (None: unknown)."""
        return Telemetry(output_dir, rank, total_steps, self)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one finished step reports.

    Attributes:
        step: Finished steps, from 1.
        rows: Examples of this step on all ranks.
        loss: 0-d, this rank's mean.
        predictions: (B, K) of this rank, or None with labels and weights.
        labels: (B, K) of this rank, or None.
        weights: (B, K) of this rank, or None.
        learning_rate: Of the step.
        loss_scale: Of the step.
        skipped: Steps skipped for overflow so far.
        gradient_norm: Of the step, before clipping.
        counts: More values for the curve.
    """

    step: int
    rows: int
    loss: Tensor | float
    predictions: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    learning_rate: float = math.nan
    loss_scale: Tensor | float = 1.0
    skipped: Tensor | int = 0
    gradient_norm: Tensor | float = math.nan
    counts: Mapping[str, int] = field(default_factory=dict)


class Listener(Protocol):
    """A receiver of a run's reports, such as an exporter or a writer of event files."""

    def step(self, report: StepReport) -> None:
        """Take note of a finished step, on every rank, without reading from the device."""

    def interval(self, record: Mapping[str, Any]) -> None:
        """Take note of a point of the curve, on rank 0."""

    def evaluation(
        self, step: int, metrics: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take note of an evaluation, on every rank; ranks: what was diagnosed, on rank 0."""

    def close(self) -> None:
        """Finish. Safe to call twice."""


class Telemetry:
    """The reports of a run; a context manager that reports the last step when it closes.

    Args:
        output_dir: The run's folder.
        total_steps: Steps of the run; None if unknown.

    Attributes:
        timer: Measures the wait for input; wrap the loader in `timer.watch`.
        alerts: The first step of each alert, by name.
        listeners: Receive every report, and are closed with the run.
    """

    def __init__(
        self, output_dir: Path | str, rank: int, total_steps: int | None, config: TelemetryConfig
    ) -> None:
        self.output_dir = Path(output_dir)
        self.config = config
        self.total_steps = total_steps
        self.timer = InputTimer()
        self.speaks = rank == 0
        # A run that ends before the warm-up is over is watched in its second half.
        half = config.alert_after_steps if total_steps is None else total_steps // 2
        after = min(config.alert_after_steps, half)
        self._alerts = Alerts(after, config.alert_intervals)
        self._window = Window(config.window_examples)
        self._losses = Losses()
        self._last: StepReport | None = None
        self._console = Console(config.mode) if self.speaks else None
        self.listeners: list[Listener] = []
        self._interval_step = 0
        self._begun = self._restored = False

    @property
    def alerts(self) -> dict[str, int]:
        """Alerts raised so far, by name, with the step of their first time."""
        return dict(self._alerts.first_steps)

    def start(self, step: int = 0, rows: int | None = None, total_steps: int | None = None) -> None:
        """Begin to report after `step` finished steps.

        Points of the curve beyond `step` are removed: those steps are trained again. A resumed run
        calls this before it enters the context; otherwise entering it begins a new curve.

        Args:
            step: 0 for a new run, more when one is resumed.
            rows: examples trained so far; None: as in the curve's last point.
            total_steps: at which the run ends; None: as it was built with.
        """
        self._begun = True
        self._started = self._interval_started = time.perf_counter()
        self._written_step = step
        self._interval_wait = self.timer.seconds
        if not self._restored:
            self._interval_step = step
            self._losses.reset()
        if total_steps is not None:
            self.total_steps = total_steps
        if not self.speaks:
            return
        self.output_dir.mkdir(parents=True, exist_ok=True)
        truncate(self.output_dir / "evaluations.jsonl", step)
        latest = truncate(self.output_dir / "curves.jsonl", step)
        self._rows = self._interval_rows = latest.get("rows", 0) if rows is None else rows
        if self._console is not None:
            self._console.start(step, self.total_steps)

    def update(self, report: StepReport) -> None:
        """Take note of a finished step; report if an interval or the run ends with it."""
        for listener in self.listeners:
            listener.step(report)
        if not self.speaks:
            return
        if not self._begun:
            self.start(report.step - 1)
        self._last = report
        self._rows += report.rows
        self._losses.add(report.loss)
        if report.predictions is not None:
            assert report.labels is not None and report.weights is not None
            self._window.add(report.predictions, report.labels, report.weights)
        if self._console is not None:
            self._console.step(report.step)
        if report.step % self.config.interval_steps == 0 or report.step == self.total_steps:
            self._report()

    def evaluation(
        self,
        step: int,
        metrics: Mapping[str, Any],
        ranks: Sequence[Mapping[str, Any]] = (),
        details: Mapping[str, Any] | None = None,
        rows: str = "test",
    ) -> None:
        """Append an evaluation to DIR/evaluations.jsonl; print its main numbers and its doubts.

        Args:
            step: Finished steps.
            metrics: Of the evaluation.
            ranks: Records of what was diagnosed beside it, for the listeners.
            details: What `Details` has found beside it.
            rows: Which rows were evaluated, test or validation; the record names the latter.
        """
        found = all_doubts(metrics, details or {})
        new = self._alerts.evaluated(step, found)
        metrics = {**metrics, "alerts": sorted(found)}
        if rows != "test":
            metrics["split"] = rows
        for listener in self.listeners:
            listener.evaluation(step, metrics, ranks)
        if not self.speaks:
            return
        if not self._begun:
            self.start(step)
        append(self.output_dir / "evaluations.jsonl", {"step": step, **metrics})
        count = f"{metrics.get('rows', 0):,.0f} {rows} rows"
        self.say(f"evaluation at step {step:,}: {evaluation_line(metrics)} over {count}")
        for name, message in new.items():
            self.say(f"ALERT {name} at step {step:,}: {message}", loud=True)

    def say(self, text: str, loud: bool = False) -> None:
        """Print a line on rank 0's stderr, above the progress bar; if quiet, only if `loud`."""
        if self._console is not None:
            self._console.say(text, loud)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been gathered for the next report, as plain data; that of rank 0 counts.

        The examples behind the running AUC are in `examples`.
        """
        return {
            "interval_step": self._interval_step,
            "losses": self._losses.values(),
            "alerts": self._alerts.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], examples: Tensor | None) -> None:
        """Continue from `state_dict` and `examples`; before or after `start`."""
        self._restored = True
        self._interval_step = state["interval_step"]
        self._losses.restore(state["losses"])
        self._alerts.load_state_dict(state["alerts"])
        if examples is not None:
            self._window.restore(examples)

    def examples(self) -> Tensor:
        """Return the latest examples, (3, N): probabilities, labels, weights."""
        return self._window.tensor()

    def close(self) -> None:
        """Report steps that no interval has covered; end all that listens. Safe to call twice."""
        if self._last is not None and self._last.step > self._written_step:
            self._report()
        for listener in self.listeners:
            listener.close()
        if self._console is not None:
            self._console.close()

    def __enter__(self) -> Telemetry:
        """Begin at step 0, unless `start` has begun elsewhere."""
        if not self._begun:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close, also after an error, so that the curve reaches the last finished step."""
        self.close()

    def _report(self) -> None:
        """Write the interval that ends with the last step."""
        record = self._record()
        raised = self._alerts.check(record)
        record["alerts"] = sorted(self._alerts.active)
        append(self.output_dir / "curves.jsonl", record)
        for listener in self.listeners:
            listener.interval(record)
        if self._console is not None:
            self._console.interval(record)
        for name, message in raised.items():
            self.say(f"ALERT {name} at step {record['step']:,}: {message}", loud=True)

    def _record(self) -> dict[str, Any]:
        """Return the interval's point of the curve and begin the next interval."""
        assert self._last is not None
        report, now = self._last, time.perf_counter()
        seconds = max(now - self._interval_started, 1e-9)
        steps = report.step - self._interval_step
        loss, finite = self._losses.values()
        record = {
            "step": report.step,
            "rows": self._rows,
            "seconds": now - self._started,
            "loss": loss / finite if finite else math.nan,
            "rows_per_second": (self._rows - self._interval_rows) / seconds,
            "input_wait": min((self.timer.seconds - self._interval_wait) / seconds, 1.0),
            "learning_rate": report.learning_rate,
            "loss_scale": float(report.loss_scale),
            "skipped": int(report.skipped),
            "gradient_norm": float(report.gradient_norm),
            "nonfinite_steps": steps - int(finite),
            **self._window.summary(),
            **report.counts,
        }
        self._written_step = self._interval_step = report.step
        self._interval_started, self._interval_rows = now, self._rows
        self._interval_wait = self.timer.seconds
        self._losses.reset()
        return record

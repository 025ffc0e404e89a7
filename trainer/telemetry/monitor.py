# SPDX-License-Identifier: MIT
"""What a run exports to Prometheus: numbers that the loop has anyway, taken where they arise.

Every rank notes its steps and the time it waits for input, without reading from the device. Rank 0
adds the points of the curve and the evaluations. Other ranks of a node send their numbers to its
first rank once a second (`trainer/telemetry/node.py`), which exports them
(`trainer/telemetry/exporter.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from trainer.checkpoint.layout import step_name
from trainer.checkpoint.saver import Saver
from trainer.distributed.optimizer import learning_rates
from trainer.distributed.train_pipeline import Pipeline
from trainer.metrics.spec import METRICS
from trainer.metrics.validity import ADVICE as DOUBTS
from trainer.runtime.runtime import Runtime
from trainer.telemetry.alerts import ADVICE, LabelWeights
from trainer.telemetry.callbacks import Callbacks, Run, find_callback
from trainer.telemetry.exporter import ExportConfig, Exporter
from trainer.telemetry.leaks import LeakWatch
from trainer.telemetry.node import Listener, Node, Sender, meet
from trainer.telemetry.series import Values
from trainer.telemetry.table_stats import TableStats
from trainer.telemetry.telemetry import StepReport, Telemetry
from trainer.telemetry.tensorboard import TensorBoard, check_installed

_SEND_SECONDS = 1.0
# A point of the curve -> gauges of the same numbers.
_INTERVAL = {
    "loss": "loss",
    "auc": "auc",
    "label_mean": "label_mean",
    "prediction_mean": "prediction_mean",
    "prediction_std": "prediction_stddev",
    "rows_per_second": "rows_per_second",
    "input_wait": "input_wait_ratio",
    "loss_scale": "loss_scale",
    "gradient_norm": "gradient_norm",
    "step_features": "step_features",
    "step_lookups": "step_lookups",
    "step_collectives": "step_collectives",
    "step_bytes_sent": "step_sent_bytes",
}
_TABLE = {
    "rows": "table_rows",
    "occupancy": "table_occupancy_ratio",
    "hit_rate": "table_hit_ratio",
    "missing": "table_missing_ratio",
    "top_share": "table_top_ratio",
    "mean_norm": "table_row_norm_mean",
    "max_norm": "table_row_norm_max",
}
_WHOLE_TABLE = {"touched": "table_rows_used", "bytes": "table_bytes"}
_STAGES = {"step_ids_in": "in", "step_ids_sent": "sent", "step_ids_looked_up": "looked_up"}
_DYNAMIC = "dynamic_"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The parts of a run whose numbers a monitor reads.

    Attributes:
        telemetry: the time that is spent waiting for input.
        pipeline: the parts of sampled steps, and the model in it.
        table_stats: what tables are used for.
        label_weights: labels without any weight, or of one value.
        leaks: features that are the label.
        saver: checkpoints.
    """

    telemetry: Telemetry
    pipeline: Pipeline
    table_stats: TableStats
    label_weights: LabelWeights
    leaks: LeakWatch
    saver: Saver


class Monitor:
    """Keeps the series of one rank up to date; a listener of `Telemetry`.

    Args:
        sources: the parts of the run to read.
        info: the run.
        config: of the exporter.
        runtime: this process among the others.

    Attributes:
        values: the series of this rank.
    """

    def __init__(self, sources: Sources, info: Run, config: ExportConfig, runtime: Runtime) -> None:
        self.values = Values()
        self._sources, self._info, self._config, self._runtime = sources, info, config, runtime
        self._sender: Sender | None = None
        self._closing: list[Any] = []
        self._process = psutil.Process()
        self._before = time.perf_counter()
        self._wait = sources.telemetry.timer.seconds
        self._sent, self._samples = 0.0, 0
        self._phases = dict(sources.pipeline.phases.seconds)
        self._skipped = sources.pipeline.precision.num_skipped
        self._own = sources.table_stats.own
        self._by_rank = len(info.settings["schema"]["tables"]) <= config.tables_by_rank
        if runtime.is_first:
            self._describe()
            sources.saver.concluded.append(self._note_checkpoints)  # the last one, after all steps
        if runtime.local_rank == 0:
            self.values.set("restarts", runtime.restarts)

    def open(self) -> None:
        """Connect the ranks of a node and start its exporter. Collective."""
        runtime, say, path, listener = self._runtime, self._sources.telemetry.say, "", None
        if runtime.local_rank == 0:
            node = Node(runtime.rank, self.values, runtime.local_world_size)
            number = runtime.rank // runtime.local_world_size
            output = self._info.output
            exporter = Exporter(self._config, node, output.resolve().name, number, output, say)
            self._closing.append(exporter)
            if runtime.local_world_size > 1:
                try:
                    listener = Listener(node)
                    self._closing.append(listener)
                    path = listener.path
                except OSError as error:
                    say(f"metrics: the ranks of this node cannot be merged ({error})")
        path = meet(runtime, path)
        if runtime.local_rank and path:
            with contextlib.suppress(OSError):  # rank 0 has died; the run fails by itself
                self._sender = Sender(path, runtime.rank, self.values)
                self._sender.send()

    def step(self, report: StepReport) -> None:
        """Note a finished step, from what the host knows."""
        values, now = self.values, time.perf_counter()
        waited = self._sources.telemetry.timer.seconds
        values.add("train_seconds_total", now - self._before)
        values.add("input_wait_seconds_total", waited - self._wait)
        values.add("rank_input_wait_seconds_total", waited - self._wait)
        self._before, self._wait = now, waited
        values.set("rank_step", report.step)
        values.set("rank_last_step_timestamp_seconds", time.time())
        self._note_phases()
        self._note_tables()
        if self._runtime.is_first:
            values.set("step", report.step)
            values.set("last_step_timestamp_seconds", time.time())
            values.add("steps_total", 1)
            values.add("rows_total", report.rows)
            values.set("learning_rate", report.learning_rate, "dense")
            rates = learning_rates(self._sources.pipeline.parallel.fused_optimizer)
            if rates:
                values.set("learning_rate", max(rates), "tables")
            self._note_checkpoints()
        if now - self._sent >= _SEND_SECONDS:
            self._sent = now
            self._note_memory()
            if self._sender is not None:
                self._sender.send()

    def interval(self, record: Mapping[str, Any]) -> None:
        """Note a point of the curve."""
        values, sources = self.values, self._sources
        for name, series in _INTERVAL.items():
            if name in record:
                values.set(series, record[name])
        if record["label_mean"]:
            values.set("calibration_ratio", record["prediction_mean"] / record["label_mean"])
        for name, stage in _STAGES.items():
            if name in record:
                values.set("step_ids", record[name], stage)
        values.set("steps_skipped_total", record["skipped"] - self._skipped)
        values.add("steps_nonfinite_total", record["nonfinite_steps"])
        active = {*record["alerts"], *sources.label_weights.active, *sources.leaks.first_steps}
        for name in ADVICE.keys() - DOUBTS.keys():
            values.set("alert_active", name in active, name)
        values.set("pipelined_modules", sources.pipeline.num_pipelined)
        if values.get("sharded_modules") is None:
            values.set("sharded_modules", len(sources.pipeline.parallel.sharded_modules))

    def evaluation(
        self, step: int, metrics: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Note an evaluation; its time is none of training."""
        self._before = time.perf_counter()
        self._note_tables()
        if self._sender is not None:
            self._sender.send()
        if not self._runtime.is_first:
            return
        values = self.values
        values.set("evaluation_timestamp_seconds", time.time())
        if "rows" in metrics:
            values.set("evaluation_rows", metrics["rows"])
        for name, metric in METRICS.items():
            if name in metrics:
                values.set(metric.prometheus, metrics[name])
        for name in DOUBTS:
            values.set("alert_active", name in metrics.get("alerts", ()), name)
        for record in ranks:
            place = str(record["layer"]), record["module"], record["path"]
            for name, series in (("erank", "effective_rank"), ("ferank", "effective_rank_ratio")):
                if record.get(name) is not None:
                    values.set(series, record[name], *place)
        self._note_checkpoints()

    def close(self) -> None:
        """Send and push for the last time; end the exporter. Safe to call twice."""
        if self._sender is not None:
            self._sender.send()
            self._sender.close()
        while self._closing:
            self._closing.pop(0).close()  # the exporter first, while ranks are there

    def _describe(self) -> None:
        """Set what does not change."""
        info, values = self._info, self.values
        settings = info.settings
        dtype = settings["precision"]["dtype"]
        values.set("run_info", 1, settings["recipe"], dtype, info.dense_parallelism)
        values.set("start_timestamp_seconds", time.time())
        values.set("step", info.step)
        values.set("steps_expected", info.end_step)
        values.set("checkpoint_interval_seconds", settings["checkpoint"]["interval_seconds"])
        for name in ("steps_total", "rows_total", "steps_skipped_total", "steps_nonfinite_total"):
            values.set(name, 0)
        self._note_checkpoints()

    def _note_phases(self) -> None:
        """Add what the samples read since the last step have found."""
        phases = self._sources.pipeline.phases
        if phases.samples == self._samples:
            return
        self.values.add("sampled_steps_total", phases.samples - self._samples)
        for name, seconds in phases.seconds.items():
            self.values.add("sampled_phase_seconds_total", seconds - self._phases[name], name)
        self.values.set("rank_own_seconds", phases.own_seconds)
        self._samples, self._phases = phases.samples, dict(phases.seconds)

    def _note_tables(self) -> None:
        """Note new statistics of tables: of this rank and, on rank 0, of all ranks."""
        tables, values = self._sources.table_stats, self.values
        if tables.own is self._own:
            return
        self._own = tables.own
        own: Mapping[str, Any] = self._own if self._by_rank else {}
        for scope, found in (("rank_", own), ("", tables.numbers)):
            names = _TABLE if scope else {**_TABLE, **_WHOLE_TABLE}
            for table, numbers in found.items():
                for name, number in numbers.items():
                    if name in names:
                        values.set(scope + names[name], number, table)
                    elif name.startswith(_DYNAMIC):
                        outcome = name.removeprefix(_DYNAMIC)
                        values.set(f"{scope}table_ids", number, table, outcome)

    def _note_checkpoints(self) -> None:
        """Copy the saver's counters."""
        saver, values = self._sources.saver, self.values
        values.set("checkpoint_stall_seconds_total", saver.stalled_seconds)
        values.set("checkpoint_failures_total", saver.num_failed)
        if saver.newest is not None:
            step, written = saver.newest
            values.set("checkpoint_step", step)
            values.set("checkpoint_timestamp_seconds", written)

    def _note_memory(self) -> None:
        """Note the memory of this process."""
        self.values.set("rank_resident_memory_bytes", self._process.memory_info().rss)
        if self._runtime.device.type == "cuda":
            self.values.set("rank_device_memory_bytes", torch.cuda.memory_allocated())


def watch(sources: Sources, info: Run, config: ExportConfig, runtime: Runtime) -> None:
    """Let an exporter, a writer of event files and callbacks listen to a run. Collective.

    Raises:
        ValueError: event files are wanted and their package is missing, or a callback cannot be
            found; raised on all ranks.
    """
    if config.tensorboard:
        check_installed()
    kinds = {name: find_callback(name) for name in config.callbacks}
    listeners = sources.telemetry.listeners
    if config.exports:
        monitor = Monitor(sources, info, config, runtime)
        listeners.append(monitor)
        monitor.open()
    if config.tensorboard:
        kinds["tensorboard"] = TensorBoard
    if not (kinds and runtime.is_first):
        return
    callbacks = Callbacks({name: kind() for name, kind in kinds.items()}, sources.telemetry.say)
    saver = sources.saver

    def note_checkpoint() -> None:
        if saver.newest is not None:
            step = saver.newest[0]
            callbacks.checkpoint(step, str(saver.directory / step_name(step)))

    listeners.append(callbacks)
    saver.concluded.append(note_checkpoint)
    callbacks.start(info)

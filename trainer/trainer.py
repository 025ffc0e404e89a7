# SPDX-License-Identifier: MIT
"""The training loop: epochs of steps, evaluation, checkpoints, and what a run leaves in its folder.

Shapes: B examples per rank, K tasks, R ranks.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.attention import kernels
from models.batch import Batch
from models.ranking import Predictions
from models.towers.specformer import SpecFormer
from trainer.build import build_training, open_loader, standardize
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import TrainState
from trainer.config.config import TrainConfig, to_dict
from trainer.data.files import check_families
from trainer.data.splits import check_overlap
from trainer.distributed.compile import uncompiled
from trainer.distributed.optimizer import learning_rates
from trainer.distributed.parallelize import plain_parts
from trainer.evaluation.diagnostics import Watch, diagnose_model
from trainer.evaluation.evaluate import evaluate
from trainer.metrics.depth import LabelDepths
from trainer.metrics.metrics import undefined
from trainer.resume import (
    begin,
    describe,
    greet,
    plan_steps,
    restore_gathered,
    resume,
    tensors,
)
from trainer.run_dir import (
    CONFIG,
    CURVES,
    EVALUATION,
    EVALUATIONS,
    METRICS,
    RANKS,
    checkpoints_of,
    claim,
)
from trainer.runtime.atomic_files import write_json
from trainer.runtime.json_lines import last_step, truncate
from trainer.runtime.memory import check_tables
from trainer.runtime.runtime import RunError, Runtime
from trainer.runtime.signals import Stopped, StopSignals
from trainer.runtime.watchdog import Watchdog
from trainer.summary import run_metrics
from trainer.telemetry.alerts import LabelWeights
from trainer.telemetry.monitor import watch
from trainer.telemetry.table_stats import TableWatch
from trainer.telemetry.telemetry import StepReport
from trainer.warm_start.inherit import Inherited, check_sources


class Trainer:
    """One run of one configuration on this rank.

    config: what to compute. output: the run's folder, shared by all ranks. runtime: this process
    among the others.

    Raises:
        ValueError: the data does not fit the schema, or `output` cannot be used.
    """

    def __init__(self, config: TrainConfig, output: Path, runtime: Runtime) -> None:
        self.config, self.output, self.runtime = config, output, runtime
        kernels.forget()
        self.train_loader = open_loader(config, runtime, train=True)
        self.test_loader = open_loader(config, runtime, train=False)
        if not config.data.allow_overlap:
            check_overlap(self.train_loader.files, self.test_loader.files)
        check_families((*self.train_loader.files, *self.test_loader.files))
        check_tables(config.schema.tables, config.sparse, runtime)
        if config.inherit.active and not (output / CONFIG).exists():
            check_sources(config.inherit, to_dict(config))
        begun = (output / CONFIG).exists()
        resume_from = claim(output, config, runtime)
        self.anew = begun and resume_from is None
        training = build_training(config, runtime)
        self.parallel, self.dense, self.precision, self.pipeline = training
        standardize(self.parallel.model, self.train_loader.files, config.schema, runtime)
        self.state = TrainState(self.parallel, self.dense, runtime)
        self.step = self.rows = self.epoch = self.epoch_start = self.padded_rows = 0
        self.train_seconds = self.wait_seconds = 0.0
        self.clock = 0.0, 0.0
        self.ranks: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        self.steps_per_epoch = len(self.train_loader)
        self.inherited: Inherited | None = None
        self.origin: dict[str, str] | None = None
        self.gathered: Any = None  # manifest and examples, until there is something that reports
        if resume_from is not None:
            resume(self, resume_from)
        elif config.inherit.active:
            self.inherited = begin(self)
        self.total_steps, self.end_step = plan_steps(self)
        self.schedule = config.dense.schedule.build(
            self.total_steps, self.dense.optimizer, self.parallel.fused_optimizer
        )
        self.telemetry = config.telemetry.build(output, runtime.rank, self.end_step)
        if runtime.is_first:
            # An evaluation at the step that is resumed from will be made again.
            truncate(output / EVALUATIONS, self.step - 1)
        self.reached = last_step(output / CURVES) if runtime.is_first else 0
        self.telemetry.start(self.step, self.rows)
        self.cadence = config.checkpoint.build(runtime.group)
        self.tables = TableWatch(self.parallel, runtime, config.telemetry.interval_steps)
        self.tables.start(output, self.step)
        self.saver = Saver(
            checkpoints_of(output, config),
            config.checkpoint,
            runtime,
            config.runtime.timeout_seconds,
            self.telemetry.say,
        )
        self.weights = LabelWeights(config.schema.labels, runtime.group)
        self.watchdog = Watchdog(config.runtime.hang_seconds, runtime.rank)
        self.signals, self.stopping = StopSignals(runtime.is_first), False
        restore_gathered(self)

    def fit(self) -> dict[str, Any]:
        """Train to the end, evaluate, write metrics.json; return the metrics, same on all ranks.

        Raises:
            RunError: training diverged, or its last checkpoint could not be written.
            Stopped: a signal asked the run to end; it has been saved.
        """
        with self.telemetry, self.watchdog:
            try:
                watch(self)
                greet(self)
                with self.watchdog.paused():
                    self.saver.prepare(tensors(self))
                while self.step < self.end_step:
                    self._train_epoch(self.epoch)
                    # An epoch that max_steps cut is not over: what inherits the run goes on in it.
                    self.epoch += self.step - self.epoch_start == len(self.train_loader)
                    if self.config.evaluate_epochs and self.step < self.end_step:
                        self._evaluate(keep=self.config.checkpoint.keep_best > 0)
                depth = LabelDepths([label.name for label in self.config.schema.labels])
                metrics = self._evaluate(keep=True, depth=depth)
                with self.watchdog.paused():
                    self.saver.wait(last=True)
            except BaseException:
                self.saver.abandon()
                raise
            finally:
                self.train_loader.close()
                self.test_loader.close()
        if metrics["nonfinite_predictions"]:
            bad, rows = metrics["nonfinite_predictions"], metrics["rows"]
            raise RunError(
                f"evaluation: {bad:,.0f} of {rows:,.0f} rows "
                "got no finite prediction: training diverged; lower dense.learning_rate or "
                "sparse.learning_rate, or set precision.max_norm"
            )
        metrics |= run_metrics(self)
        if self.runtime.is_first:
            timed = self.pipeline.phases
            spent = {"sampled_steps": timed.samples, "phase_seconds": timed.seconds}
            write_json(self.output / EVALUATION, {"step": self.step, **depth.values, **spent})
            write_json(self.output / METRICS, metrics)
        self.telemetry.say(f"done: {self.output / METRICS}")
        return metrics

    def _train_epoch(self, epoch: int) -> None:
        """Train from the current step to the end of `epoch` or of the run."""
        self.parallel.module.train()
        self.train_loader.set_epoch(epoch)
        self.epoch_start = self.step - self.train_loader.step
        end = min(self.epoch_start + len(self.train_loader), self.end_step)
        batches = self.tables.watch(self.telemetry.timer.watch(iter(self.train_loader)))
        batches = itertools.islice(batches, end - self.step)
        self.clock = time.perf_counter(), self.telemetry.timer.seconds
        self.weights.begin_epoch(self.step)
        with self.signals.noted():
            while self.step < end:
                self._train_step(batches)
                if self.step % self.config.telemetry.interval_steps == 0 or self.step == end:
                    for line in kernels.news():
                        self.telemetry.say(f"attention by {line}")
                    raised = self.weights.interval(self.step) + self.tables.interval(self.step)
                    for message in raised:
                        self.telemetry.say(message, loud=True)
                if self.stopping and self.step < self.end_step:
                    self._stop()
                if self.step < self.end_step and self.cadence.due(self.step, self.saver.busy):
                    self._save()
        self._count_seconds()
        self.weights.check_epoch(self.step)

    def _count_seconds(self) -> None:
        """Add the time since this was called last, so that a checkpoint knows of all of it."""
        before, self.clock = self.clock, (time.perf_counter(), self.telemetry.timer.seconds)
        self.train_seconds += self.clock[0] - before[0]
        self.wait_seconds += self.clock[1] - before[1]

    def _train_step(self, batches: Iterator[Batch]) -> None:
        """Train on one batch of every rank."""
        self.schedule.apply(self.step)
        self.precision.stop.wanted = self.signals.received > 0
        if self.config.spatial_warmup:
            tower = self.parallel.model.get_submodule("tower")
            assert isinstance(tower, SpecFormer)
            tower.set_warmup(self.step < self.config.spatial_warmup * self.total_steps)
        interval = self.config.telemetry.interval_steps
        with self.tables.step(self.step + 1), self.pipeline.phases.step(self.step + 1, interval):
            predictions = self.pipeline.progress(batches)
        result = self.pipeline.last_step
        assert result is not None
        self.step += 1
        self.stopping = self.precision.stop.decided(latest=self.step == self.end_step)
        self.watchdog.beat(f"training step {self.step + 1:,}")
        self.weights.add(predictions.weights)
        # Every step takes full batches but the last of an epoch, which is padded.
        before, end = self.rows, (self.epoch + 1) * self.train_loader.num_rows
        taken = before + predictions.labels.shape[0] * self.runtime.world_size
        self.rows = min(taken, end)
        self.padded_rows += taken - self.rows
        self.telemetry.update(
            StepReport(
                step=self.step,
                rows=self.rows - before,
                loss=result.on_device.loss,
                predictions=predictions.probabilities,
                labels=predictions.labels,
                weights=predictions.weights,
                learning_rate=learning_rates(self.dense.optimizer)[0],
                loss_scale=result.on_device.loss_scale,
                skipped=result.on_device.num_skipped,
                gradient_norm=result.on_device.gradient_norm,
                counts=self.tables.counts,
            )
        )

    def _evaluate(self, keep: bool, depth: LabelDepths | None = None) -> dict[str, Any]:
        """Evaluate on the test days; note the towers' effective ranks.

        keep: whether the model is to have a checkpoint, which is written meanwhile. depth: what
        else is to be found.
        """
        if keep and self.saver.written_step != self.step:
            self._save()
        if self.stopping and self.step == self.end_step:
            self._stop()
        tower = self.parallel.model.get_submodule("tower")
        with Watch(tower) as watch, self.tables.evaluation(self.step):

            def note(predictions: Predictions) -> None:
                watch.note(predictions)
                self.watchdog.beat(f"evaluating after step {self.step:,}")

            metrics = evaluate(self.pipeline, self.test_loader, self.config, note, depth)
        model = plain_parts(self.parallel, self.dense)
        with self.precision.autocast(), uncompiled(self.config.parallel.compile):
            ranks = diagnose_model(self.parallel, watch, model)
        self.watchdog.beat(f"evaluated after step {self.step:,}")
        self.telemetry.evaluation(self.step, metrics, ranks)
        reasons = undefined(metrics, [label.name for label in self.config.schema.labels])
        for line in reasons if reasons != self.reasons else ():
            self.telemetry.say(line)
        self.reasons = reasons
        self.ranks += [{"step": self.step, **record} for record in ranks]
        if self.runtime.is_first:
            write_json(self.output / RANKS, self.ranks)
        if keep:
            with self.watchdog.paused():
                self.saver.evaluated(metrics)
        return metrics

    def _save(self) -> None:
        """Write a checkpoint of the current step, beside what follows."""
        self._count_seconds()
        started = time.monotonic()
        with self.watchdog.paused():
            self.saver.save(tensors(self), self.step, describe(self))
        self.cadence.saved(started)

    def _stop(self) -> None:
        """Save, and end the run at the step that the ranks have agreed on."""
        if self.saver.written_step != self.step:
            self._save()
        with self.watchdog.paused():
            self.saver.wait(last=True)
        number = self.signals.received or signal.SIGTERM
        raise Stopped(
            number,
            f"{signal.Signals(number).name} at step {self.step:,} of {self.end_step:,}; saved, the "
            "same command goes on from there",
        )

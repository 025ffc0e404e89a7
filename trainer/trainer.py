# SPDX-License-Identifier: MIT
"""One run from top to bottom: what it is built of, its epochs and steps, what it leaves behind.

`Trainer` builds the parts of a run, fills them from a checkpoint or from what the run inherits, and
then trains. Every part that a checkpoint keeps is in `trainer/resume.py`'s `RunState`; counters are
in `trainer/progress.py`.

Shapes: B examples per rank, K labels, R ranks.
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
from models.tower import Tower
from trainer.build import build_training, open_loaders, settle, standardize
from trainer.checkpoint.early_stopping import EarlyStopping
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import TrainState
from trainer.config.config import TrainConfig, to_dict
from trainer.data.loader import Loader
from trainer.distributed.compile import num_graphs, uncompiled
from trainer.distributed.optimizer import learning_rates
from trainer.distributed.parallelize import plain_parts
from trainer.evaluation.diagnostics import Watch, diagnose_model
from trainer.evaluation.evaluate import check_finite, evaluate
from trainer.evaluation.progressive import Progressive, describe_days
from trainer.greeting import Place, greeting
from trainer.metrics.details import Details
from trainer.metrics.metrics import undefined
from trainer.progress import Progress, plan_steps
from trainer.resume import RunState, begin, resume
from trainer.run_dir import (
    CONFIG,
    EVALUATION,
    EVALUATIONS,
    METRICS,
    RANKS,
    TABLES,
    checkpoints_of,
    claim,
)
from trainer.runtime.atomic_files import write_json
from trainer.runtime.json_lines import truncate
from trainer.runtime.memory import check_tables
from trainer.runtime.runtime import Runtime
from trainer.runtime.signals import Stopped, StopSignals
from trainer.runtime.watchdog import Watchdog
from trainer.telemetry.alerts import LabelWeights
from trainer.telemetry.callbacks import Run
from trainer.telemetry.leaks import LeakWatch
from trainer.telemetry.monitor import Sources, watch
from trainer.telemetry.table_stats import TableStats
from trainer.telemetry.telemetry import StepReport
from trainer.warm_start.inherit import Inherited, check_sources


class Trainer:
    """One run of one configuration on this rank.

    Args:
        config: what to compute.
        output: the run's folder, shared by all ranks.
        runtime: this process among the others.

    Raises:
        ValueError: the data does not fit the schema, or `output` cannot be used.
    """

    def __init__(self, config: TrainConfig, output: Path, runtime: Runtime) -> None:
        config = settle(config, runtime)
        self.config, self.output, self.runtime = config, output, runtime
        kernels.forget()
        # The log: everything that can be refused is refused before a table is allocated.
        self.loaders = open_loaders(config, runtime)
        self.train_loader, self.validation_loader, self.test_loader = self.loaders
        check_tables(config.schema.tables, config.sparse, runtime)
        # The folder: new, or of a run that ended early.
        begun = (output / CONFIG).exists()
        if config.inherit.active and not begun:
            check_sources(config.inherit, to_dict(config))
        checkpoint = claim(output, config, runtime)
        # The model on its devices, and what reports on it.
        training = build_training(config, runtime)
        self.parallel, self.dense, self.precision, self.pipeline = training
        standardize(self.parallel.model, self.train_loader.files_of(0), config.schema, runtime)
        self.telemetry = config.telemetry.build(output, runtime.rank, None)
        folder, timeout = checkpoints_of(output, config), config.runtime.timeout_seconds
        kept = config.kept_checkpoints
        self.saver = Saver(folder, kept, runtime, timeout, self.telemetry.say)
        self.early = EarlyStopping(config.early_stopping, kept.best_metric, folder, runtime)
        self.watchdog = Watchdog(config.runtime.hang_seconds, runtime.rank)
        self.signals, self.stopping = StopSignals(runtime.is_first), False
        self.undefined_metrics: list[str] = []
        self.progress = Progress()
        self.label_weights = LabelWeights(config.schema.labels, runtime.group)
        self.leaks = LeakWatch(config.schema, runtime.is_first)
        self.table_stats = TableStats(self.parallel, runtime, config.telemetry.interval_steps)
        self.state = self._collect_state()
        # Where it begins: at its own checkpoint, with what it inherits, or with nothing.
        self.inherited: Inherited | None = None
        if checkpoint is not None:
            manifest = resume(self.state, checkpoint, runtime)
            self.saver.newest = manifest["step"], manifest.get("saved", 0.0)
        elif config.inherit.active:
            self.inherited = begin(self.state, output, runtime)
        self.total_steps, self.end_step = plan_steps(
            config, self.progress, self.train_loader, self.inherited is not None
        )
        self.schedule = config.dense.schedule.build(
            self.total_steps, self.dense.optimizer, self.parallel.fused_optimizer
        )
        self.checkpoints = config.checkpoint.build(runtime.group)
        self.by_day: Progressive | None = None
        if config.data.progressive:
            self.by_day = Progressive(config, output, self.test_loader, runtime)
        step = self.progress.step
        place = Place(step, self.end_step, self.inherited, begun and checkpoint is None)
        self.greeting = greeting(config, runtime, output, place, self.loaders, self._tower())
        # What the files hold beyond this step is made again; so is an evaluation of this step.
        if runtime.is_first:
            truncate(output / EVALUATIONS, step - 1)
        self.telemetry.start(step, self.progress.rows, self.end_step)
        self.table_stats.start(output / TABLES, step)

    def fit(self) -> dict[str, Any]:
        """Train to the end, evaluate, write metrics.json; return the metrics, same on all ranks.

        Raises:
            RunError: training diverged, or its last checkpoint could not be written.
            Stopped: a signal asked the run to end; it has been saved.
        """
        progress = self.progress
        with self.telemetry, self.watchdog:
            try:
                self._watch()
                for line, loud in self.greeting:
                    self.telemetry.say(line, loud)
                with self.watchdog.paused():
                    self.saver.prepare(self.state.tensors())
                if progress.step and progress.step in (progress.epoch_start, self.end_step):
                    self._end_epoch()  # its evaluation may be missing
                while progress.step < self.end_step and not self.early.over:
                    self._train_epoch()
                    progress.end_epoch(len(self.train_loader))
                    self._end_epoch()
                metrics = self._test(details := Details())
                if self.by_day is not None:
                    metrics = self.by_day.pooled(details)
                    self.telemetry.say(describe_days(metrics), loud=True)
                with self.watchdog.paused():
                    self.saver.wait(last=True)
            except BaseException:
                self.saver.abandon()
                raise
            finally:
                for loader in (self.train_loader, *self.state.evaluation_loaders):
                    loader.close()
        check_finite(metrics)
        metrics |= self._run_metrics()
        if self.runtime.is_first:
            timed = self.pipeline.phases
            spent = {"sampled_steps": timed.samples, "phase_seconds": timed.seconds}
            write_json(self.output / EVALUATION, {"step": progress.step, **details.values, **spent})
            write_json(self.output / METRICS, metrics)
        self.telemetry.say(f"done: {self.output / METRICS}")
        return metrics

    def _train_epoch(self) -> None:
        """Train from the current step to the end of its epoch or of the run."""
        progress, loader, timer = self.progress, self.train_loader, self.telemetry.timer
        self.parallel.module.train()
        loader.set_epoch(progress.epoch)
        progress.begin_epoch(loader.step)
        end = min(progress.epoch_start + len(loader), self.end_step)
        batches = self.table_stats.watch(self.leaks.watch(timer.watch(iter(loader))))
        batches = itertools.islice(batches, end - progress.step)
        progress.start_clock(timer.seconds)
        self.label_weights.begin_epoch(progress.step)
        with self.signals.noted():
            while progress.step < end:
                self._train_step(batches)
                if progress.step % self.config.telemetry.interval_steps == 0 or (
                    progress.step == end
                ):
                    self._end_interval(last=progress.step == end)
                if self.stopping and progress.step < self.end_step:
                    self._stop()
                if progress.step < self.end_step and self.checkpoints.due(
                    progress.step, self.saver.busy
                ):
                    self._save()
        progress.stop_clock(timer.seconds)
        self.label_weights.check_epoch(progress.step)

    def _train_step(self, batches: Iterator[Batch]) -> None:
        """Train on one batch of every rank."""
        progress, phases = self.progress, self.pipeline.phases
        self.schedule.apply(progress.step)
        self.precision.stop.wanted = self.signals.received > 0
        self._tower().set_progress(progress.step / self.total_steps)
        number, interval = progress.step + 1, self.config.telemetry.interval_steps
        with self.table_stats.step(number), phases.step(number, interval):
            predictions = self.pipeline.progress(batches)
        result = self.pipeline.last_step
        assert result is not None
        taken = predictions.labels.shape[0] * self.runtime.world_size  # labels: (B, K)
        rows = progress.add_step(taken, self.train_loader.rows_until(progress.epoch))
        self.stopping = self.precision.stop.decided(latest=progress.step == self.end_step)
        self.watchdog.beat(f"training step {progress.step + 1:,}")
        self.label_weights.add(predictions.weights, predictions.labels)
        self.telemetry.update(
            StepReport(
                step=progress.step,
                rows=rows,
                loss=result.on_device.loss,
                predictions=predictions.probabilities,
                labels=predictions.labels,
                weights=predictions.weights,
                learning_rate=learning_rates(self.dense.optimizer)[0],
                loss_scale=result.on_device.loss_scale,
                skipped=result.on_device.num_skipped,
                gradient_norm=result.on_device.gradient_norm,
                counts=self.table_stats.counts,
            )
        )

    def _end_interval(self, last: bool) -> None:
        """Report what concerns all ranks: attention kernels and alerts; `last` of the epoch."""
        for line in kernels.news():
            self.telemetry.say(f"attention by {line}")
        step = self.progress.step
        messages = self.label_weights.interval(step, last) + self.table_stats.interval(step)
        for message in messages + self.leaks.report(step, last):
            self.telemetry.say(message, loud=True)

    def _end_epoch(self) -> None:
        """Evaluate between epochs, or between days, if that is asked; note if it is the best."""
        step = self.progress.step
        if self.early.active:
            metrics = self._evaluate(True, self.validation_loader)
            with self.watchdog.paused():
                self.early.validated(step, metrics, kept=self.saver.written_step == step)
            self.telemetry.say(self.early.describe(), loud=self.early.over)
        elif step < self.end_step and (self.config.evaluate_epochs or self.by_day is not None):
            self._evaluate(self.config.checkpoint.keep_best > 0, self.validation_loader)

    def _test(self, details: Details) -> dict[str, Any]:
        """Evaluate the last model on the test rows; with early stopping, the best one."""
        best = self.early.best
        if best is not None and self.early.best_step != self.progress.step:
            self.telemetry.say(f"testing the best checkpoint, {best}")
            with self.watchdog.paused():
                self.state.model_state.load(best)
        return self._evaluate(keep=best is None, details=details)

    def _evaluate(
        self, keep: bool, loader: Loader | None = None, details: Details | None = None
    ) -> dict[str, Any]:
        """Evaluate on rows and measure the towers' effective ranks.

        Args:
            keep: whether the model gets a checkpoint, which is written meanwhile.
            loader: of the validation rows; None: of the test rows.
            details: where to collect intervals and reliability; None: neither.
        """
        step, rows = self.progress.step, "test" if loader is None else "validation"
        loader = self.test_loader if loader is None else loader
        if keep and self.saver.written_step != step:
            self._save()
        if self.stopping and step == self.end_step:
            self._stop()
        tower = self.parallel.model.get_submodule("tower")
        if self.by_day is not None:
            self.telemetry.say(f"predicting {self.by_day.begin(self.train_loader)}")
        with Watch(tower) as watched, self.table_stats.evaluation(step):

            def note(predictions: Predictions) -> None:
                watched.note(predictions)
                if self.by_day is not None:
                    self.by_day.keep(predictions)
                self.watchdog.beat(f"evaluating after step {step:,}")

            metrics = evaluate(self.pipeline, loader, self.config, note, details)
        if self.by_day is not None:
            self.by_day.end(metrics)
        model = plain_parts(self.parallel, self.dense)
        with self.precision.autocast(), uncompiled(self.config.parallel.compile):
            ranks = diagnose_model(self.parallel, watched, model)
        self.watchdog.beat(f"evaluated after step {step:,}")
        self.telemetry.evaluation(step, metrics, ranks, details.values if details else None, rows)
        reasons = undefined(metrics, [label.name for label in self.config.schema.labels])
        for line in reasons if reasons != self.undefined_metrics else ():
            self.telemetry.say(line)
        self.undefined_metrics = reasons
        self.progress.ranks += [{"step": step, **record} for record in ranks]
        if self.runtime.is_first:
            write_json(self.output / RANKS, self.progress.ranks)
        if keep:
            with self.watchdog.paused():
                self.saver.evaluated(metrics)
        return metrics

    def _save(self) -> None:
        """Begin to write a checkpoint of the current step; training goes on meanwhile."""
        self.progress.count_seconds(self.telemetry.timer.seconds)
        started = time.monotonic()
        with self.watchdog.paused():
            self.saver.save(self.state.tensors(), self.progress.step, self.state.manifest())
        self.checkpoints.saved(started)

    def _stop(self) -> None:
        """Save, and end the run at the step that the ranks have agreed on."""
        step = self.progress.step
        if self.saver.written_step != step:
            self._save()
        with self.watchdog.paused():
            self.saver.wait(last=True)
        number = self.signals.received or signal.SIGTERM
        raise Stopped(
            number,
            f"{signal.Signals(number).name} at step {step:,} of {self.end_step:,}; saved, the "
            "same command goes on from there",
        )

    def _run_metrics(self) -> dict[str, Any]:
        """Return what metrics.json holds of the run rather than of its model. Collective."""
        progress, seconds = self.progress, self.progress.train_seconds
        watches = (self.label_weights, self.table_stats, self.leaks)
        return {
            "rows_per_second": progress.rows / seconds if seconds else None,
            "input_wait": progress.wait_seconds / seconds if seconds else None,
            "world_size": self.runtime.world_size,
            "steps": progress.step,
            "train_rows": progress.rows,
            # How the last step of an epoch gets the same number of rows on every rank.
            "remainder": "padded with rows of weight 0",
            "padded_rows": progress.padded_rows,
            "skipped_steps": self.precision.num_skipped,
            "pipelined_modules": self.pipeline.num_pipelined,
            "dense_parallelism": self.config.parallel.describe(),
            "attention": kernels.in_use(),
            "compiled_graphs": num_graphs() if self.config.parallel.compile else 0,
            "out_of_range": self.state.out_of_range(),
            **self.table_stats.counts,
            **self.early.record(),
            "alerts": sorted({*self.telemetry.alerts}.union(*(one.first_steps for one in watches))),
        }

    # What __init__ is made of.

    def _collect_state(self) -> RunState:
        """Return the parts that a checkpoint keeps."""
        return RunState(
            config=self.config,
            progress=self.progress,
            train_loader=self.train_loader,
            evaluation_loaders=tuple(one for one in self.loaders[1:] if one is not None),
            parallel=self.parallel,
            precision=self.precision,
            model_state=TrainState(self.parallel, self.dense, self.runtime),
            telemetry=self.telemetry,
            label_weights=self.label_weights,
            table_stats=self.table_stats,
            stopping=self.early,
        )

    def _tower(self) -> Tower:
        tower = self.parallel.model.get_submodule("tower")
        assert isinstance(tower, Tower)
        return tower

    def _watch(self) -> None:
        """Let the exporter, event files and callbacks follow the run. Collective."""
        config = self.config
        info = Run(
            output=self.output,
            settings=to_dict(config),
            dense_parallelism=config.parallel.describe(),
            step=self.progress.step,
            end_step=self.end_step,
        )
        sources = Sources(
            telemetry=self.telemetry,
            pipeline=self.pipeline,
            table_stats=self.table_stats,
            label_weights=self.label_weights,
            leaks=self.leaks,
            saver=self.saver,
        )
        watch(sources, info, config.export, self.runtime)

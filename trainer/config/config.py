# SPDX-License-Identifier: MIT
"""The configuration of a run: frozen dataclasses, a recipe that returns them, overrides on top.

A section is declared beside the class that it configures. Relations between sections are checked
once, here. World size is not a setting: it comes from the launcher.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.plain import from_plain, suggest
from embeddings.schema.schema import Schema
from models.fields import ProjectionConfig
from models.ranking import ModelConfig
from models.tower import StreamTowerConfig, find_tower, type_name
from trainer.checkpoint.early_stopping import EarlyStoppingConfig
from trainer.checkpoint.schedule import CheckpointConfig
from trainer.data.loader import LoaderConfig
from trainer.data.splits import parse_days, parse_rows
from trainer.distributed.optimizer import DenseOptimizerConfig
from trainer.distributed.parallelize import ParallelConfig
from trainer.distributed.precision import PrecisionConfig
from trainer.runtime.atomic_files import write_json
from trainer.runtime.credentials import without_credentials_in
from trainer.runtime.runtime import RuntimeConfig
from trainer.telemetry.exporter import ExportConfig
from trainer.telemetry.telemetry import TelemetryConfig
from trainer.warm_start.policies import InheritConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the log is and which days train and test.

    Attributes:
        path: a folder of dt=YYYY-MM-DD/ partitions, a folder of Parquet files, or one file.
        train_days: inclusive ranges FIRST:LAST of partitions, or one day; empty: every day.
        test_days: inclusive ranges or one day, as for train_days.
        train_rows: shares FROM:TO of the rows in file order (0:0.8), for a log without days; empty:
            all.
        test_rows: shares of the rows, as for train_rows.
        validation_days: inclusive ranges or one day of `path` on which the model is evaluated after
            epochs (early_stopping, evaluate_epochs); empty, as validation_rows: the test rows.
        validation_rows: shares of the rows, as for train_rows.
        test_path: another folder or file for the test rows; empty: the same as path.
        schema: a YAML file that replaces the recipe's schema.
        allow_overlap: whether test rows may be training rows too (to see a model memorise).
        progressive: whether each of the test days, in order, is predicted by the model that has
            trained on all days before it, and then trained on.
    """

    path: str = ""
    train_days: str = ""
    test_days: str = ""
    train_rows: str = ""
    test_rows: str = ""
    validation_days: str = ""
    validation_rows: str = ""
    test_path: str = ""
    schema: str = ""
    allow_overlap: bool = False
    progressive: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("train_days", "test_days", "validation_days"):
            parse_days(getattr(self, name), f"data.{name}")
        for name in ("train_rows", "test_rows", "validation_rows"):
            parse_rows(getattr(self, name), f"data.{name}")
        if self.progressive and not (self.train_days and self.test_days):
            raise ValueError(
                "data.progressive: expected data.train_days (trained first) and data.test_days "
                f"(predicted, then trained), got {self.train_days!r} and {self.test_days!r}"
            )
        if self.progressive and (self.train_rows or self.test_rows or self.test_path):
            raise ValueError(
                "data.progressive: expected whole days of data.path; remove data.train_rows, "
                "data.test_rows and data.test_path"
            )

    @property
    def validates(self) -> bool:
        """Whether there are validation rows."""
        return bool(self.validation_days or self.validation_rows)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes.

    Attributes:
        epochs: passes over the training days.
        max_steps: stop after so many steps, 0 for no limit.
        stop_epoch: end after so many of the epochs, with learning rates as if the others followed
            (a later run may inherit from there); 0 for all.
        evaluate_epochs: evaluate after every epoch (True) or only at the end (False).
    """

    recipe: Annotated[str, tyro.conf.Suppress]
    schema: Annotated[Schema, tyro.conf.Fixed]
    data: DataConfig = field(default_factory=DataConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    sparse: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    inherit: InheritConfig = field(default_factory=InheritConfig)
    epochs: int = 1
    max_steps: int = 0
    stop_epoch: int = 0
    evaluate_epochs: bool = False

    def __post_init__(self) -> None:
        """Check what the sections say of each other."""
        if self.epochs < 1 or self.max_steps < 0:
            raise ValueError(
                f"epochs must be at least 1 and max_steps not negative, got {self.epochs} and "
                f"{self.max_steps}"
            )
        if not 0 <= self.stop_epoch <= self.epochs:
            raise ValueError(
                f"stop_epoch: expected an integer from 0 to epochs ({self.epochs}), got "
                f"{self.stop_epoch}"
            )
        if self.data.progressive and (self.epochs > 1 or self.stop_epoch or self.evaluate_epochs):
            raise ValueError(
                "data.progressive: every day is trained once and each test day is evaluated; set "
                "epochs to 1 and remove stop_epoch and evaluate_epochs"
            )
        self._check_evaluations()
        self.parallel.check_precision(self.precision.dtype, self.runtime.device)
        tower = self.model.tower
        tables = [table.name for table in self.schema.tables]
        for setting in ("table_learning_rates", "table_eps", "table_weights"):
            for name in getattr(self.sparse, setting):
                if name not in tables:
                    raise ValueError(
                        f"sparse.{setting}: no table {name!r}{suggest(name, tables)}; tables: "
                        f"{tables}"
                    )
        tokenizer = self.model.tokenizer
        reads_stream = isinstance(tower, StreamTowerConfig)
        idle = {
            "num_tokens": reads_stream and tokenizer.num_tokens != 0,
            "target_fields": not reads_stream and tokenizer.target_fields != "item",
            "stream_fields": not reads_stream and tokenizer.stream_fields != (),
            "projection": reads_stream and tokenizer.projection != ProjectionConfig(),
        }
        for name, without_effect in idle.items():
            if without_effect:
                raise ValueError(
                    f"model.tokenizer.{name}: has no effect on {type(tower).__name__}, got "
                    f"{getattr(tokenizer, name)!r}; leave it at its default"
                )
        if isinstance(tower, StreamTowerConfig):
            longest = max(
                (f.max_length for f in self.schema.sparse if f.kind == "sequence"), default=0
            )
            if longest > tower.max_length:
                raise ValueError(
                    f"model.tower.max_length: the schema keeps up to {longest} events of a "
                    f"history, the tower {tower.max_length}; raise it to at least {longest}"
                )

    def _check_evaluations(self) -> None:
        """Check what the sections say of evaluations after epochs."""
        patience, best = self.early_stopping.patience, self.checkpoint.best_metric
        if self.evaluate_epochs and self.epochs == 1:
            raise ValueError(
                "evaluate_epochs has no effect with one epoch (the end of the run is evaluated "
                "anyway); remove it"
            )
        if patience and self.epochs == 1:
            raise ValueError(
                "early_stopping.patience: has no effect with one epoch, as the model is validated "
                "after epochs; set epochs to the most that it may train, or remove it"
            )
        if self.data.validates and not (patience or self.evaluate_epochs):
            raise ValueError(
                "data.validation_days and validation_rows have no effect without "
                "early_stopping.patience or evaluate_epochs; set one of them, or remove the rows"
            )
        if best != type(self.checkpoint).best_metric and not (
            self.checkpoint.keep_best or patience
        ):
            raise ValueError(
                f"checkpoint.best_metric: {best!r} has no effect without keep_best or "
                "early_stopping.patience; set one of them, or remove it"
            )

    @property
    def outside_tower(self) -> str:
        """`package.module:Class` of a tower from outside the repository, or an empty string."""
        name = type_name(type(self.model.tower))
        return name if ":" in name else ""

    @property
    def kept_checkpoints(self) -> CheckpointConfig:
        """Which checkpoints stay; early stopping keeps the best in any case."""
        kept = self.checkpoint
        least = 1 if self.early_stopping.patience else 0
        return dataclasses.replace(kept, keep_best=max(kept.keep_best, least))

    @property
    def has_warmup(self) -> bool:
        """Whether the tower trains the first steps of a run in a simpler form."""
        return getattr(self.model.tower, "warmup", 0.0) > 0


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the resolved configuration as plain data, to be kept and shown.

    A tower's type is kept under `type`; URLs lose user and password.
    """
    values = without_credentials_in(json.loads(json.dumps(dataclasses.asdict(config))))
    values["model"]["tower"]["type"] = type_name(type(config.model.tower))
    return values


def fingerprint(config: TrainConfig) -> str:
    """Return a hash of what a resumed checkpoint must agree on: schema, model and optimizers."""
    values = to_dict(config)
    part = {key: values[key] for key in ("schema", "model", "dense", "sparse", "loader", "runtime")}
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as JSON."""
    write_json(path, to_dict(config))


def config_from_dict(values: dict[str, Any]) -> TrainConfig:
    """Rebuild what `write_config` wrote.

    Args:
        values: plain data, of this run or from a folder of somebody else. The tower's class is
            found among those that are known here; nothing is imported because `values` name it.

    Raises:
        ValueError: an unknown or wrongly typed key, or a tower that is not known.
    """
    model = values.get("model")
    if isinstance(model, dict) and isinstance(tower := model.get("tower"), dict):
        place = "config.model.tower"
        try:
            kind = find_tower(tower.get("type"))
        except ValueError as error:
            raise ValueError(f"{place}.type: {error}") from error
        rest = {key: value for key, value in tower.items() if key != "type"}
        values = {**values, "model": {**model, "tower": from_plain(kind, rest, place)}}
    return from_plain(TrainConfig, values, "config")

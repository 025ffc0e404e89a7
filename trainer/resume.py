# SPDX-License-Identifier: MIT
"""Where a run begins: at its own checkpoint, with what it inherits, or with nothing.

`RunState` names every part of a run that a checkpoint keeps. Its manifest holds what is plain data,
its tensors the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embeddings.optimizer import set_table_updates, table_updates
from embeddings.sharding.plans import KEY
from embeddings.sharding.sharding import check_plan
from trainer.checkpoint import dcp
from trainer.checkpoint.early_stopping import EarlyStopping
from trainer.checkpoint.layout import RUN, read_manifest
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.storage import Folder
from trainer.config.config import TrainConfig, fingerprint, to_dict
from trainer.data.files import LogFile, check_families
from trainer.data.hashing import routing_fingerprint
from trainer.data.loader import Loader
from trainer.distributed.parallelize import Parallel
from trainer.distributed.precision import Precision
from trainer.progress import Progress
from trainer.run_dir import INHERITED
from trainer.runtime.atomic_files import write_json
from trainer.runtime.runtime import Runtime
from trainer.telemetry.alerts import LabelWeights
from trainer.telemetry.table_stats import TableStats
from trainer.telemetry.telemetry import Telemetry
from trainer.warm_start.inherit import Inherited, inherit


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The parts of a run that a checkpoint keeps; `resume` fills them from one.

    `progress`, `train_loader`, `precision`, `telemetry`, `label_weights`, `table_stats` and
    `stopping` have `state_dict` and `load_state_dict`. `telemetry` also has `examples`, tensors.
    `model_state` has `tensors`, `load` and `put`. `table_stats.restore` continues the counts of
    out-of-range ids; the evaluation loaders contribute only those. Of `config` and `parallel`, the
    manifest holds the settings, the sharding plan and how often the kernels of the tables have run.
    The learning-rate schedule is a pure function of the step and has no state.

    Attributes:
        config: the run's configuration.
        progress: the run's counters.
        train_loader: the training rows, with the position in them.
        evaluation_loaders: the test rows, and validation rows if there are any.
        parallel: the model and the sharding plan of its tables.
        precision: loss scale and skipped steps.
        model_state: tensors of tables, dense weights, optimizers and random numbers.
        telemetry: the values collected for the next point of the curve.
        label_weights: the labels' weights in the current epoch.
        table_stats: the counts of the tables.
        stopping: the validations so far.
    """

    config: TrainConfig
    progress: Progress
    train_loader: Loader
    evaluation_loaders: tuple[Loader, ...]
    parallel: Parallel
    precision: Precision
    model_state: TrainState
    telemetry: Telemetry
    label_weights: LabelWeights
    table_stats: TableStats
    stopping: EarlyStopping

    def manifest(self) -> dict[str, Any]:
        """Return what a checkpoint of the current step holds as plain data. Collective."""
        loader, schema = self.train_loader, self.config.schema
        return {
            **self.progress.state_dict(),
            "position": None if (step := self._epoch_step()) is None else loader.state_dict(step),
            "out_of_range": self.out_of_range(),
            "precision": self.precision.state_dict(),
            "config": to_dict(self.config),
            KEY: self.parallel.plan.to_dict(),
            "table_updates": table_updates(self.parallel.model),
            "families": dict(pair for file in loader.files for pair in file.families),
            "schema_fingerprint": schema.fingerprint(),
            "config_fingerprint": fingerprint(self.config),
            "routing_fingerprint": routing_fingerprint(),
            "telemetry": self.telemetry.state_dict(),
            "weights": self.label_weights.state_dict(),
            "dynamic_tables": self.table_stats.state_dict(),
            **self.stopping.state_dict(),
        }

    def tensors(self) -> dict[str, Any]:
        """Return what a checkpoint of the current step holds as nested tensors. Collective."""
        examples = self.telemetry.examples()
        metrics = {"metrics": {"examples": examples}} if examples.numel() else {}
        return {**self.model_state.tensors(), **metrics}

    def out_of_range(self) -> dict[str, int]:
        """Return how many ids, by feature, read row 0 in training and evaluation. Collective."""
        trained = self.train_loader.out_of_range(self._epoch_step())
        evaluated = (loader.out_of_range() for loader in self.evaluation_loaders)
        return self.table_stats.out_of_range(trained, *evaluated)

    def _epoch_step(self) -> int | None:
        """Return the trained batches of the loader's epoch; None if that epoch is over.

        The pipeline reads ahead of training, so the loader's own count is larger.
        """
        same = self.train_loader.epoch == self.progress.epoch
        return self.progress.step - self.progress.epoch_start if same else None

    def load_position(self, manifest: dict[str, Any]) -> None:
        """Continue at the step, and the row of the log, of a checkpoint's manifest."""
        self.progress.load_state_dict(manifest)
        if manifest["position"] is None:
            self.train_loader.set_epoch(self.progress.epoch)
        else:
            self.train_loader.load_state_dict(manifest["position"])
        self.progress.begin_epoch(self.train_loader.step)


def resume(state: RunState, path: Folder, runtime: Runtime) -> dict[str, Any]:
    """Fill `state` from the run's own checkpoint at `path`; return its manifest. Collective.

    Raises:
        ValueError: the checkpoint is damaged, or of another schema or way to hash ids.
    """
    config, manifest = state.config, read_manifest(path, RUN)
    check_meaning(manifest, path, config.schema.fingerprint())
    check_plan(manifest, state.parallel.plan, config.parallel.sharding, str(path))
    examples = None
    shape = dcp.tensor_sizes(path).get("metrics.examples")
    if shape is not None and runtime.is_first:
        examples = torch.zeros(shape)  # (3, N), see `Telemetry.examples`
    state.model_state.load(path, None if examples is None else {"metrics": {"examples": examples}})
    set_table_updates(state.parallel.model, manifest["table_updates"])
    state.precision.load_state_dict(manifest["precision"])
    try:
        state.load_position(manifest)
    except ValueError as error:
        raise ValueError(
            f"{error}: the same command with --output ANOTHER --inherit.path {path} "
            "--inherit.policy nightly"
        ) from error
    state.telemetry.load_state_dict(manifest["telemetry"], examples)
    state.table_stats.restore(manifest["out_of_range"])
    state.table_stats.load_state_dict(manifest["dynamic_tables"])
    state.stopping.load_state_dict(manifest)
    if manifest["position"] is not None:
        state.label_weights.load_state_dict(manifest["weights"])
    return manifest


def begin(state: RunState, output: Path, runtime: Runtime) -> Inherited:
    """Fill `state` with what the run inherits, note that in `output`, and return it. Collective.

    Raises:
        ValueError: a source does not fit.
    """
    config = state.config
    paths = config.inherit.paths()
    manifests = {group: read_manifest(path, RUN) for group, path in paths.items() if path}
    if "embeddings" in manifests:
        check_meaning(manifests["embeddings"], str(paths["embeddings"]))
        families = tuple(manifests["embeddings"]["families"].items())
        log = LogFile(path="the inherited tables' log", row_group_rows=(), families=families)
        check_families((log, *state.train_loader.files))
    inherited = inherit(config.inherit, to_dict(config), state.model_state)
    if "embedding_optimizer" in manifests:
        updates = manifests["embedding_optimizer"]["table_updates"]
        set_table_updates(state.parallel.model, updates)
    if "data_position" in manifests:
        state.load_position(manifests["data_position"])
    state.progress.inherited = inherited.sources
    if "loss_scale" in manifests:
        manifest = manifests["loss_scale"]
        if manifest["config"]["precision"]["dtype"] == config.precision.dtype:
            # Skipped steps count only in a run that goes on from the same step.
            skipped = {} if state.progress.step else {"num_skipped": 0, "consecutive_skips": 0}
            state.precision.load_state_dict({**manifest["precision"], **skipped})
    if runtime.is_first:
        write_json(output / INHERITED, inherited.record())
    return inherited


def check_meaning(
    manifest: dict[str, Any], path: Folder | str, schema_fingerprint: str = ""
) -> None:
    """Check that the ids of the checkpoint at `path` still map to the same table rows.

    Args:
        manifest: the checkpoint's manifest.
        path: the checkpoint, for messages.
        schema_fingerprint: the fingerprint that its schema must have; empty accepts any.

    Raises:
        ValueError: the checkpoint hashes raw ids differently or has another schema, so ids would
            read rows of other ids.
    """
    found, own = manifest["routing_fingerprint"], routing_fingerprint()
    if found != own:
        raise ValueError(
            f"{path}: routing of ids to table rows: expected {own}, as this version hashes, got "
            f"{found}; its tables would be read at the wrong rows: use the version that wrote it, "
            "or train anew"
        )
    found = manifest["schema_fingerprint"]
    if schema_fingerprint and found != schema_fingerprint:
        raise ValueError(
            f"{path}: schema: expected fingerprint {schema_fingerprint}, as configured, got "
            f"{found}; go on with the schema in its manifest, or inherit from it into a new run "
            "(--inherit.path), which says table by table what it keeps"
        )

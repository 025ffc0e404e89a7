# SPDX-License-Identifier: MIT
"""How a run begins and what it keeps of itself: manifests of checkpoints, written and read back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from embeddings.optimizer import set_table_updates, table_updates
from embeddings.sharding.plans import KEY
from embeddings.sharding.sharding import check_plan
from models.attention import attention
from models.tokens import StreamTokenizer
from models.towers.tokenformer import TokenFormerConfig
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import RUN, read_manifest
from trainer.checkpoint.storage import Folder
from trainer.config.config import fingerprint, to_dict
from trainer.data.files import LogFile, check_families
from trainer.data.hashing import routing_fingerprint
from trainer.distributed.precision import DTYPES
from trainer.run_dir import INHERITED
from trainer.runtime.atomic_files import write_json
from trainer.warm_start.inherit import Inherited, inherit

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def describe(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of a run after its current step. Collective."""
    config, loader = trainer.config, trainer.train_loader
    return {
        "rows": trainer.rows,
        "epoch": trainer.epoch,
        "position": loader.state_dict(trainer.step - trainer.epoch_start)
        if loader.epoch == trainer.epoch
        else None,
        "train_seconds": trainer.train_seconds,
        "wait_seconds": trainer.wait_seconds,
        "padded_rows": trainer.padded_rows,
        "out_of_range": count_out_of_range(trainer),
        "precision": trainer.precision.state_dict(),
        "ranks": trainer.ranks,
        "config": to_dict(config),
        KEY: trainer.parallel.plan.to_dict(),
        "table_updates": table_updates(trainer.parallel.model),
        "inherited": trainer.origin,
        "families": dict(pair for file in loader.files for pair in file.families),
        "schema_fingerprint": config.schema.fingerprint(),
        "config_fingerprint": fingerprint(config),
        "routing_fingerprint": routing_fingerprint(),
        "telemetry": trainer.telemetry.state_dict(),
        "weights": trainer.weights.state_dict(),
        "dynamic_tables": trainer.tables.state_dict(),
    }


def count_out_of_range(trainer: Trainer) -> dict[str, int]:
    """Return how many ids, by feature, read row 0 in what was trained and evaluated. Collective."""
    loader = trainer.train_loader
    # Of the epoch in progress without what the pipeline has taken ahead.
    step = trainer.step - trainer.epoch_start if loader.epoch == trainer.epoch else None
    evaluated = trainer.test_loader.out_of_range()
    return trainer.tables.out_of_range(loader.out_of_range(step), evaluated)


def tensors(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint holds of a run beside its manifest."""
    examples = trainer.telemetry.examples()
    metrics = {"metrics": {"examples": examples}} if examples.numel() else {}
    return {**trainer.state.tensors(), **metrics}


def check_meaning(
    manifest: dict[str, Any], path: Folder | str, schema_fingerprint: str = ""
) -> None:
    """Check that the ids of the checkpoint at `path` still mean the same table rows.

    schema_fingerprint: of the schema that it must have; empty: any.

    Raises:
        ValueError: raw ids are hashed in another way than when it was written, or the schema is
            another: a model would be read that is quietly wrong.
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


def resume(trainer: Trainer, path: Folder) -> None:
    """Let `trainer` go on from its own checkpoint at `path`."""
    manifest = read_manifest(path, RUN)
    check_meaning(manifest, path, trainer.config.schema.fingerprint())
    check_plan(manifest, trainer.parallel.plan, trainer.config.parallel.sharding, str(path))
    examples = None
    shape = dcp.tensor_sizes(path).get("metrics.examples")
    if shape is not None and trainer.runtime.is_first:
        examples = torch.zeros(shape)
    trainer.state.load(path, None if examples is None else {"metrics": {"examples": examples}})
    trainer.gathered = manifest, examples
    set_table_updates(trainer.parallel.model, manifest["table_updates"])
    trainer.precision.load_state_dict(manifest["precision"])
    trainer.origin = manifest.get("inherited")
    take_position(trainer, manifest)


def begin(trainer: Trainer) -> Inherited:
    """Let `trainer` begin with what it inherits, note that in its folder, and return it."""
    settings = trainer.config.inherit
    paths = settings.paths()
    manifests = {group: read_manifest(path, RUN) for group, path in paths.items() if path}
    if "embeddings" in manifests:
        check_meaning(manifests["embeddings"], str(paths["embeddings"]))
        families = tuple(manifests["embeddings"]["families"].items())
        log = LogFile(path="the inherited tables' log", row_group_rows=(), families=families)
        check_families((log, *trainer.train_loader.files))
    inherited = inherit(settings, to_dict(trainer.config), trainer.state)
    trainer.origin = inherited.sources
    if "embedding_optimizer" in manifests:
        updates = manifests["embedding_optimizer"]["table_updates"]
        set_table_updates(trainer.parallel.model, updates)
    if "data_position" in manifests:
        take_position(trainer, manifests["data_position"])
    if "loss_scale" in manifests:
        manifest = manifests["loss_scale"]
        if manifest["config"]["precision"]["dtype"] == trainer.config.precision.dtype:
            skipped = {} if trainer.step else {"num_skipped": 0, "consecutive_skips": 0}
            trainer.precision.load_state_dict({**manifest["precision"], **skipped})
    if trainer.runtime.is_first:
        write_json(trainer.output / INHERITED, inherited.record())
    return inherited


def plan_steps(trainer: Trainer) -> tuple[int, int]:
    """Return of how many steps the schedule is, and after which the run ends.

    Raises:
        ValueError: what the run inherits leaves none to train.
    """
    config, loader = trainer.config, trainer.train_loader
    # At another world size than before, the rest of an epoch takes other steps than planned, and
    # every later one what the whole of one takes.
    rest = len(loader) - loader.step
    total = trainer.step + rest + (config.epochs - trainer.epoch - 1) * trainer.steps_per_epoch
    if config.max_steps:
        total = min(total, config.max_steps)
    end = total
    if config.stop_epoch:
        epochs = config.stop_epoch - trainer.epoch - 1
        end = min(total, trainer.step + rest + epochs * trainer.steps_per_epoch)
    if trainer.inherited is not None and trainer.step >= end:
        raise ValueError(
            f"epochs: the run that data_position comes from has trained {trainer.epoch} epochs "
            f"({trainer.step:,} steps), which leaves none to train; raise epochs, or begin anew "
            "with --inherit.sources data_position fresh"
        )
    return total, end


def restore_gathered(trainer: Trainer) -> None:
    """Restore what reports and alerts had gathered when the run was saved."""
    if trainer.gathered is not None:
        manifest, examples = trainer.gathered
        trainer.saver.newest = manifest["step"], manifest.get("saved", 0.0)
        trainer.telemetry.load_state_dict(manifest["telemetry"], examples)
        trainer.tables.restore(manifest["out_of_range"])
        trainer.tables.load_state_dict(manifest["dynamic_tables"])
        if manifest["position"] is not None:
            trainer.weights.load_state_dict(manifest["weights"])
        trainer.gathered = None


def take_position(trainer: Trainer, manifest: dict[str, Any]) -> None:
    """Go on from the step, and the row of the log, that a checkpoint's manifest gives."""
    trainer.step, trainer.rows = manifest["step"], manifest["rows"]
    trainer.epoch, trainer.padded_rows = manifest["epoch"], manifest["padded_rows"]
    if manifest["position"] is None:
        trainer.train_loader.set_epoch(trainer.epoch)
    else:
        trainer.train_loader.load_state_dict(manifest["position"])
    trainer.train_seconds = manifest["train_seconds"]
    trainer.wait_seconds = manifest["wait_seconds"]
    trainer.ranks = [record for record in manifest["ranks"] if record["step"] < trainer.step]
    trainer.epoch_start = trainer.step - trainer.train_loader.step


def greet(trainer: Trainer) -> None:
    """Say from where the run goes on, and with which optimizers."""
    restarted = f"restart {trainer.runtime.restarts}: " if trainer.runtime.restarts else ""
    if trainer.inherited is not None:
        for line in trainer.inherited.table():
            trainer.telemetry.say(line)
    elif trainer.step:
        lost = trainer.reached - trainer.step
        again = f"; {lost:,} steps that were lost are trained again" if lost > 0 else ""
        place = f"resumed at step {trainer.step:,} of {trainer.end_step:,}"
        trainer.telemetry.say(f"{restarted}{place}{again}", loud=bool(restarted))
    elif trainer.anew:
        place = f"{trainer.output} holds no checkpoint yet: from the beginning"
        trainer.telemetry.say(f"{restarted}{place}", loud=bool(restarted))
    trainer.telemetry.say(f"dense weights: {trainer.config.dense.describe()}")
    trainer.telemetry.say(f"tables: {trainer.config.sparse.describe()}")
    for line in _computation(trainer):
        trainer.telemetry.say(line)


def _computation(trainer: Trainer) -> Iterator[str]:
    """Yield in what format, on what, how distributed and with which attention a run computes."""
    config, device = trainer.config, trainer.runtime.device
    ranks, dtype = trainer.runtime.world_size, config.precision.dtype
    yield f"{dtype} on {ranks} x {device.type}, dense weights by {config.parallel.describe()}"
    tower, tokenizer = config.model.tower, trainer.parallel.model.get_submodule("tokenizer")
    if isinstance(tower, TokenFormerConfig) and isinstance(tokenizer, StreamTokenizer):
        width = tokenizer.token_dim // tower.num_heads
        yield attention.describe(device, DTYPES[dtype], width)

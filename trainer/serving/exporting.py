# SPDX-License-Identifier: MIT
"""Write an exported model: a checkpoint of any world size, its tables packed, with its proof."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint import dcp
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.storage import Folder, locate
from trainer.config.config import DataConfig, to_dict
from trainer.evaluation.evaluate import read_config
from trainer.runtime.atomic_files import sync_folder
from trainer.serving.delta import KIND as DELTA
from trainer.serving.delta import apply_delta, changed_rows
from trainer.serving.exported import KIND, put_state, read_export, read_state
from trainer.serving.model import empty_model, load_whole, model_version
from trainer.serving.packed_tables import TableFormat, pack, table_of
from trainer.serving.proof import hash_proof, proof_rows, scores_of
from trainer.serving.scorer import Scorer


class _Made(NamedTuple):
    """A model as it is written: its tensors by name, what is said of it, and its summary."""

    state: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]


def export(path: Folder, output: Path, form: TableFormat) -> dict[str, Any]:
    """Write the model of a checkpoint as a folder to serve.

    Args:
        path: the checkpoint.
        output: the new folder; it is there whole or not at all.
        form: of the tables.

    Returns:
        The model's version, the bytes of its tables in FP32 and as they are written, and the
        largest difference of the proof's scores from those of FP32 tables.

    Raises:
        ValueError: no checkpoint, `output` exists, or the model does not fit into memory.
    """
    _check_new(output)
    made = _make(path, form)
    _write({"model": made.state}, output, made.manifest)
    return {**made.summary, "output": str(output)}


def export_delta(
    path: Folder, output: Path, since: Path, deltas: Sequence[Path] = ()
) -> dict[str, Any]:
    """Write what a checkpoint changes of a model that was exported before.

    Args:
        path: the checkpoint.
        output: the new folder; it is there whole or not at all.
        since: the exported model.
        deltas: that it has been given since.

    Returns:
        As `export`, with `rows`, how many rows of all tables and weights were written, and `base`.

    Raises:
        ValueError: as `export`; the checkpoint is of another schema or model than `since`.
    """
    _check_new(output)
    config, base = read_export(since)
    before = read_state(locate(since), config, base["tables"])
    for delta in deltas:
        base = {**base, **apply_delta(delta, base, before), "kind": KIND}
    made = _make(path, base["tables"])
    was = {name: tuple(one.shape) for name, one in before.items()}
    now = {name: tuple(one.shape) for name, one in made.state.items()}
    if made.manifest["schema"] != base["schema"] or was != now:
        raise ValueError(
            f"{path}: expected the schema and the model of {since}, got others; a delta changes "
            "weights alone: export the whole model"
        )
    found = changed_rows(before, made.state)
    _write(found, output, {**made.manifest, "kind": DELTA, "base": base["model"]})
    rows = sum(map(len, found["rows"].values()))
    return {**made.summary, "output": str(output), "rows": rows, "base": base["model"]}


def _check_new(output: Path) -> None:
    if output.exists():
        raise ValueError(f"{output}: expected a new folder, got one that exists; choose another")


def _make(path: Folder, form: TableFormat) -> _Made:
    """Pack the model of a checkpoint, and score the fixed rows with it."""
    config, manifest = read_config(path)
    families, version = manifest["families"], f"{model_version(manifest)}-{form}"
    model = load_whole(path, config)
    rows = proof_rows(config.schema.without_labels(), families)
    exact = Scorer(model, config, families, version)(rows)
    # What trained the model stays with the run: its log's place, its launch.
    config = dataclasses.replace(config, data=DataConfig())
    state: dict[str, Any] = dict(model.state_dict())
    before = packed = 0
    for name in [name for name in state if table_of(name)]:
        weight = state[name]
        state[name] = pack(weight, form)
        before, packed = before + weight.numel() * 4, packed + state[name].numel()
    served = empty_model(config)
    put_state(served, state, form)
    proof = Scorer(served, config, families, version)(rows)
    content = {
        "kind": KIND,
        "step": manifest["step"],
        "config": to_dict(config),
        "families": families,
        "schema": config.schema.fingerprint(),
        "tables": form,
        "seed": config.runtime.seed,
        "hash": hash_proof(),
        "model": version,
        "proof": scores_of(proof),
    }
    moved = max(float(abs(proof[name] - exact[name]).max()) for name in proof)
    summary = {
        "model": version,
        "table_bytes": packed,
        "table_bytes_fp32": before,
        "proof_moved": moved,
    }
    return _Made(state, content, summary)


def _write(tensors: dict[str, Any], output: Path, content: dict[str, Any]) -> None:
    """Write the folder beside its place and rename it."""
    draft = output.with_name(f".{output.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            # torch wants to be told that one process writes.
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(tensors, draft, content["step"], content)
        (draft / step_name(content["step"])).rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(output.parent)

# SPDX-License-Identifier: MIT
"""Write an exported model: a checkpoint of any world size, its tables packed, with its proof."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

from trainer.checkpoint import dcp
from trainer.checkpoint.layout import step_name
from trainer.checkpoint.storage import Folder
from trainer.config.config import DataConfig, to_dict
from trainer.evaluation.evaluate import read_config
from trainer.runtime.atomic_files import sync_folder
from trainer.serving.exported import KIND, put_state
from trainer.serving.model import empty_model, load_whole, model_version
from trainer.serving.packed_tables import TableFormat, pack, table_of
from trainer.serving.proof import hash_proof, proof_rows, scores_of
from trainer.serving.scorer import Scorer


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
    if output.exists():
        raise ValueError(f"{output}: expected a new folder, got one that exists; choose another")
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
        "config": to_dict(config),
        "families": families,
        "schema": config.schema.fingerprint(),
        "tables": form,
        "seed": config.runtime.seed,
        "hash": hash_proof(),
        "model": version,
        "proof": scores_of(proof),
    }
    _write(state, output, manifest["step"], content)
    moved = max(float(abs(proof[name] - exact[name]).max()) for name in proof)
    return {
        "model": version,
        "output": str(output),
        "table_bytes": packed,
        "table_bytes_fp32": before,
        "proof_moved": moved,
    }


def _write(state: dict[str, Any], output: Path, step: int, content: dict[str, Any]) -> None:
    """Write the folder beside its place and rename it."""
    draft = output.with_name(f".{output.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with warnings.catch_warnings():
            # torch wants to be told that one process writes.
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({"model": state}, draft, step, content)
        (draft / step_name(step)).rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(output.parent)

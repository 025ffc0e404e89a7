# SPDX-License-Identifier: MIT
"""What changed since an exported model: only the rows that differ, for a scorer that is running.

  DIR/manifest.json  the model it applies to, the model that it gives, scores of the fixed rows
  DIR/index.json, DIR/rank-0.bin
      rows.NAME   (R,) which rows of the tensor NAME are new
      model.NAME  (R, ...) those rows

The files are those of an exported model, and are checked alike. The result is the newer model bit
by bit, which its proof shows.

Shapes: R rows that differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import dcp
from trainer.checkpoint.layout import MANIFEST, SAVED, read_manifest
from trainer.checkpoint.storage import locate

KIND = "delta"
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    **SAVED,
    "kind": str,
    "schema": str,
    "tables": str,
    "base": str,
    "model": str,
    "proof": dict,
}
_BLOCK = 65_536  # rows compared at a time


def changed_rows(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the rows of `now` that differ from `before`, as a delta holds them.

    Args:
        before: tensors by name.
        now: tensors of the same names and sizes.
    """
    rows: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in now.items():
        new, old = _as_rows(tensor), _as_rows(before[name])
        found = [
            (new[first : first + _BLOCK] != old[first : first + _BLOCK]).any(1).nonzero()[:, 0]
            + first
            for first in range(0, len(new), _BLOCK)
        ]
        at = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
        if len(at):
            rows[name], values[name] = at, new[at].contiguous()
    return {"rows": rows, "model": values}


def apply_delta(
    place: str | Path, base: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Write a delta's rows into `state` and return the delta's manifest.

    Args:
        place: the delta's folder.
        base: manifest of the model that `state` is of.
        state: tensors by name, changed in place.

    Raises:
        ValueError: it is no delta, is of another model, is damaged, or names rows that are not
            there. Where it is raised before anything was read, `state` is as it was.
    """
    path = locate(place)
    manifest = read_manifest(path, _REQUIRED)
    expected = {"kind": KIND, "base": base["model"], "schema": base["schema"]}
    expected["tables"] = base["tables"]
    for name, value in expected.items():
        if manifest[name] != value:
            raise ValueError(
                f"{path / MANIFEST}: {name}: expected {value!r:.80}, got {manifest[name]!r:.80}; "
                "apply the deltas in order, from the model that the first was made from"
            )
    wanted = _allocate(path, state)
    with warnings.catch_warnings():
        # torch wants to be told that one process reads.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(wanted, path)
    for name, at in wanted["rows"].items():
        target = _as_rows(state[name])
        if len(at) and not (int(at.min()) >= 0 and int(at.max()) < len(target)):
            raise ValueError(
                f"{path}: rows.{name}: expected rows in [0, {len(target) - 1}], got "
                f"{int(at.min())} to {int(at.max())}; make the delta again"
            )
    for name, at in wanted["rows"].items():
        _as_rows(state[name])[at] = wanted["model"][name]
    return manifest


def _allocate(path: Any, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return empty tensors for all that a delta holds, once its index fits `state`."""
    sizes = dcp.tensor_sizes(path)
    wanted: dict[str, dict[str, Tensor]] = {"rows": {}, "model": {}}
    for name, size in sizes.items():
        kind, _, own = name.partition(".")
        known = state.get(own)
        rows = sizes.get(f"rows.{own}", ())
        if kind not in wanted or known is None or len(rows) != 1:
            raise ValueError(
                f"{path}: {name!r:.200}: is no part of this model; make the delta again"
            )
        new = _as_rows(known)
        expected = rows if kind == "rows" else (rows[0], new.shape[1])
        if size != expected or rows[0] > len(new):
            raise ValueError(
                f"{path}: {name!r:.200}: expected at most {len(new)} rows of {new.shape[1]}, got "
                f"size {size}; make the delta again"
            )
        dtype = torch.int64 if kind == "rows" else known.dtype
        wanted[kind][own] = torch.empty(size, dtype=dtype)
    if wanted["rows"].keys() != wanted["model"].keys():
        raise ValueError(f"{path}: rows and values do not belong together; make the delta again")
    return wanted


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor as (rows, numbers of a row), sharing its memory; a number is one row."""
    if not tensor.dim():
        return tensor.view(1, 1)
    return tensor.view(len(tensor), math.prod(tensor.shape[1:]))

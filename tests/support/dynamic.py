# SPDX-License-Identifier: MIT
"""The tiny schema with dynamic tables, and what ranks hold of such tables."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from embeddings.dynamic.dynamic import dynamic_parts
from embeddings.schema.lifetime import MISSING_ID, DynamicConfig
from embeddings.schema.schema import Schema
from tests.support.tiny import SCHEMA

Parts = dict[str, tuple[int, dict[str, Tensor]]]


def schema_of(dynamic: dict[str, DynamicConfig], rows: dict[str, int]) -> Schema:
    """The tiny schema, some of its tables dynamic."""
    tables = tuple(
        dataclasses.replace(t, dynamic=dynamic[t.name], num_embeddings=rows[t.name])
        if t.name in dynamic
        else t
        for t in SCHEMA.tables
    )
    return dataclasses.replace(SCHEMA, tables=tables)


def parts_of(model: torch.nn.Module) -> Parts:
    """What this rank holds of the dynamic tables, and from which row on."""
    return {
        part.table.name: (
            part.map.layout.first_row,
            {
                **{name: buffer.clone() for name, buffer in part.map.named_buffers()},
                "weight": part.weight.clone(),
                "totals": part.map.totals.clone(),
                **{f"state{i}": state.clone() for i, state in enumerate(part.states)},
            },
        )
        for part in dynamic_parts(model)
    }


def whole(parts: list[Parts]) -> dict[str, dict[str, Tensor]]:
    """Put the ranks' parts together."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in parts[0]:
        pieces = [values for _, values in sorted((p[name] for p in parts), key=lambda x: x[0])]
        found[name] = {}
        for key, first in pieces[0].items():
            if key == "totals":
                found[name][key] = torch.stack([piece[key] for piece in pieces]).sum(0)
            elif key == "_current_iter_tensor":
                assert all(torch.equal(piece[key], first) for piece in pieces)
                found[name][key] = first
            else:
                found[name][key] = torch.cat([piece[key] for piece in pieces])
    return found


def vectors(table: dict[str, Tensor]) -> dict[int, list[float]]:
    """Return the vector and the optimizer's state of every id of a table."""
    held = (table["ids"] != MISSING_ID).nonzero()[:, 0]
    parts = [table[key].reshape(len(table["ids"]), -1)[held] for key in ("weight", "state0")]
    return dict(zip(table["ids"][held].tolist(), torch.cat(parts, 1).tolist(), strict=True))

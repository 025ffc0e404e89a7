# SPDX-License-Identifier: MIT
"""Requirements of a schema on each column of a raw log.

If several features read a column, the strictest requirement applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from embeddings.schema.schema import Schema

Role = Literal["time", "label", "weight", "integer", "id", "number", "dense"]
_STRONGEST: tuple[Role, ...] = ("time", "label", "weight", "integer", "id", "number", "dense")
_OUTPUT = {"label": pa.int8(), "weight": pa.float32(), "dense": pa.float32()}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Requirements on one column.

    Args:
        column: name.
        role: use of the column.
        is_list: whether a row holds a list.
        required: whether a null makes the row bad.
        is_filled: whether a null inside a list makes the row bad.
        limit: largest valid value of an identity feature that rejects larger ones; None for none.
    """

    column: str
    role: Role
    is_list: bool = False
    required: bool = False
    is_filled: bool = False
    limit: int | None = None

    @property
    def has_kind(self) -> bool:
        """Whether the log decides between strings, integers and floats."""
        return self.role in ("id", "number")

    def output_type(self, kind: str) -> pa.DataType:
        """Return the Arrow type of the converted column."""
        is_float = self.role == "number" and kind == "float"
        value = _OUTPUT.get(self.role, pa.float64() if is_float else pa.int64())
        return pa.list_(value) if self.is_list else value


def rules(schema: Schema, *, null_labels: bool = False) -> dict[str, Rule]:
    """Return the rule of every column of `schema`; with `null_labels` a label may be missing.

    Raises:
        ValueError: a column is used both as a list and as a single value.
    """
    roles: dict[str, set[Role]] = {}
    lists: dict[str, set[bool]] = {}
    limits: dict[str, int] = {}
    of_transform: dict[str, Role] = {
        "identity": "integer",
        "log_square": "number",
        "log_quarter": "number",
    }
    for feature in schema.sparse:
        column = feature.column
        role = "time" if feature.transform.startswith("hour_") else "id"
        roles.setdefault(column, set()).add(of_transform.get(feature.transform, role))
        listed = feature.kind != "id" or bool(feature.position) or feature.transform == "length"
        lists.setdefault(column, set()).add(listed)
        if feature.transform == "identity" and feature.out_of_range == "error":
            limit = schema.table(feature.table).num_embeddings - 2
            limits[column] = min(limit, limits.get(column, limit))
        if feature.weights:
            roles.setdefault(feature.weights, set()).add("dense")
            lists.setdefault(feature.weights, set()).add(True)
    singles: list[tuple[str, Role]] = [(schema.user, "id"), (schema.timestamp, "time")]
    for dense in schema.dense:
        singles.append((dense.column, "dense"))
    for label in schema.labels:
        singles.extend([(label.column, "label"), (label.weight, "weight")])
    for column, role in singles:
        roles.setdefault(column, set()).add(role)
        lists.setdefault(column, set()).add(False)
    for column in schema.history_actions.values():
        roles.setdefault(column, set()).add("integer")
        lists.setdefault(column, set()).add(True)
    required = {schema.user, schema.timestamp} | {label.weight for label in schema.labels}
    filled = {feature.weights for feature in schema.sparse}
    required |= set() if null_labels else {label.column for label in schema.labels}
    for column, found in lists.items():
        if column and len(found) > 1:
            raise ValueError(
                f"schema: column {column!r} is used both as a list and as a single value; give the "
                "features columns of their own"
            )
    return {
        column: Rule(
            column=column,
            role=_strongest(roles[column]),
            is_list=True in lists[column],
            required=column in required,
            is_filled=column in filled,
            limit=limits.get(column),
        )
        for column in schema.columns
    }


def _strongest(roles: set[Role]) -> Role:
    """Return the role that serves all of `roles`: an id that is also a number is an integer."""
    if "id" in roles and roles & {"number", "dense"}:
        return "integer"
    return next(role for role in _STRONGEST if role in roles)

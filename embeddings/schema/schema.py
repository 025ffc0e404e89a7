# SPDX-License-Identifier: MIT
"""The declaration of a log: tables, sparse and dense features, labels.

Everything downstream (ingestion, batches, tables, tokens, heads) is derived from a `Schema`;
no other code names a column. A schema is written in Python or read from YAML. Unknown keys are
errors that give their path, because a misspelt key that is ignored trains the wrong model.

Row 0 of every table is the shared row of missing ids (null, empty or out of vocabulary); ids occupy
rows 1 to E - 1 of a table of E rows. A dynamic table receives the ids themselves and finds rows for
them in training (`embeddings/dynamic/idmap.py`); there too a missing id reads row 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from embeddings.schema.features import DenseFeature, Label, SparseFeature
from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.plain import from_plain, suggest
from embeddings.schema.strict_yaml import load_yaml


@dataclass(frozen=True, kw_only=True)
class Table:
    """An embedding table.

    Args:
        name: unique in a schema, without dots.
        num_embeddings: rows (E); the limit of them where the table is dynamic.
        embedding_dim: columns (D), a multiple of 4.
        init_std: standard deviation of the normal distribution from which rows are drawn.
        dynamic: which ids get a row of their own and when they lose it; None to hash ids.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    init_std: float = 0.01
    dynamic: DynamicConfig | None = None

    def __post_init__(self) -> None:
        """Check the table's own fields."""
        if "." in self.name:
            raise ValueError(
                f"table {self.name!r}: a table's name is part of its weights' path, whose parts "
                "are joined by dots; write it without dots"
            )
        if not (math.isfinite(self.init_std) and self.init_std >= 0):
            raise ValueError(
                f"table {self.name!r}: init_std must be a number >= 0, got {self.init_std}"
            )
        if self.num_embeddings < 2:
            raise ValueError(
                f"table {self.name!r}: num_embeddings must be at least 2 (row 0 is the shared row "
                f"of missing ids), got {self.num_embeddings}"
            )
        if self.embedding_dim < 4 or self.embedding_dim % 4:
            raise ValueError(
                f"table {self.name!r}: embedding_dim must be a positive multiple of 4 (the lookup "
                f"kernels' alignment), got {self.embedding_dim}; use "
                f"{max(4, -(-self.embedding_dim // 4) * 4)}"
            )
        if self.dynamic is not None:
            self.dynamic.check_rows(self.name, self.num_embeddings)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Tables, features and labels of a log.

    Args:
        tables: each used by at least one sparse feature.
        sparse: at least one.
        labels: at least one; each is a task.
        dense: numbers.
        user: the column by which GAUC groups rows, or empty.
        timestamp: the column of a row's time (milliseconds since the epoch, UTC), or empty.
        history_actions: per history, the list column of past actions aligned with it: bit k of a
          value is set when the user did the action of the k-th label.
    """

    tables: tuple[Table, ...]
    sparse: tuple[SparseFeature, ...]
    labels: tuple[Label, ...]
    dense: tuple[DenseFeature, ...] = ()
    user: str = ""
    timestamp: str = ""
    history_actions: dict[str, str] = dataclasses.field(default_factory=dict)

    # Whether rows have the columns of labels.
    labelled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check that names are unique and that parts refer to parts that exist."""
        for what, names in (
            ("table", [table.name for table in self.tables]),
            ("feature", [feature.name for feature in (*self.sparse, *self.dense)]),
            ("label", [label.name for label in self.labels]),
        ):
            if "" in names:
                raise ValueError(f"schema: a {what} needs a name, one of them is empty")
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(
                    f"schema: {what} names must be unique, these are repeated: {repeated}"
                )
        if not self.labels:
            raise ValueError("schema: at least one label is needed, got none")
        if not self.sparse:
            raise ValueError("schema: at least one sparse feature is needed, got none")
        tables = {table.name for table in self.tables}
        for feature in self.sparse:
            if feature.table not in tables:
                raise ValueError(
                    f"schema: sparse feature {feature.name!r} names table {feature.table!r}, which "
                    f"does not exist{suggest(feature.table, tables)}; tables: {sorted(tables)}"
                )
            if self.table(feature.table).dynamic and feature.transform != "hash":
                raise ValueError(
                    f"schema: sparse feature {feature.name!r} reads the dynamic table "
                    f"{feature.table!r} and needs transform 'hash' (ids as they are), got "
                    f"{feature.transform!r}"
                )
        unused = tables - {feature.table for feature in self.sparse}
        if unused:
            raise ValueError(
                f"schema: no feature uses the tables {sorted(unused)}; remove them or use them"
            )
        for history in self.history_actions:
            if history not in self.histories:
                raise ValueError(
                    f"schema: history_actions names {history!r}, which no sequence feature belongs "
                    f"to{suggest(history, self.histories)}; histories: {list(self.histories)}"
                )

    @property
    def histories(self) -> dict[str, tuple[SparseFeature, ...]]:
        """Sequence features by the history they belong to, in order of declaration."""
        groups: dict[str, tuple[SparseFeature, ...]] = {}
        for feature in self.sparse:
            if feature.kind == "sequence":
                groups[feature.history] = (*groups.get(feature.history, ()), feature)
        return groups

    @property
    def has_weights(self) -> bool:
        """Whether ids of any feature have weights."""
        return any(feature.weights for feature in self.sparse)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column read from a log, without repeats, in a fixed order."""
        names = [feature.column for feature in (*self.sparse, *self.dense)]
        names += [feature.weights for feature in self.sparse]
        names += list(self.history_actions.values())
        for label in self.labels if self.labelled else ():
            names += [label.column, label.weight]
        names += [self.user, self.timestamp]
        return tuple(dict.fromkeys(name for name in names if name))

    def table(self, name: str) -> Table:
        """Return the table called `name`. Raises KeyError if there is none."""
        return next(table for table in self.tables if table.name == name)

    def without_labels(self) -> FeatureSchema:
        """Return the schema of the same rows without labels, weights, user and time."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return FeatureSchema(**{**values, "user": "", "timestamp": ""})

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, as `from_dict` reads them."""
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        for table in values["tables"]:
            if table["dynamic"] is None:
                del table["dynamic"]
        for feature in values["sparse"]:
            if not feature["weights"]:  # schemas from before there were any keep their fingerprint
                del feature["weights"]
        return values

    def fingerprint(self) -> str:
        """Return a hash that changes with anything that changes the meaning of a trained table."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


class FeatureSchema(Schema):
    """What rows must have that are only scored: the columns of features, and no others.

    Labels keep their names, which are those of the tasks; their columns are not read.
    """

    labelled = False


def schema_from_dict(values: dict[str, Any], source: str = "schema") -> Schema:
    """Build a Schema from plain dicts and lists.

    Raises:
        ValueError: unknown or missing key or wrong type, with the key's path inside `source`.
    """
    return from_plain(Schema, values, source)


def load_schema(path: str | Path) -> Schema:
    """Read a Schema from a YAML file.

    Raises:
        ValueError: not readable, not YAML, a repeated, unknown or missing key, or a value of a
            wrong type, with file and place.
    """
    return from_plain(Schema, load_yaml(path), str(path))

# SPDX-License-Identifier: MIT
"""The parts of a schema that describe single columns: sparse features, dense features, labels.

Tables, and the checks between parts, are in `embeddings/schema/schema.py`, which exports all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transform = Literal[
    "hash", "identity", "log_square", "log_quarter", "hour_of_day", "hour_of_week", "length"
]
DenseTransform = Literal["none", "log1p"]


@dataclass(frozen=True, kw_only=True)
class SparseFeature:
    """Ids of one column, looked up in one table.

    Args:
        name: of the feature; unique in a schema.
        table: that holds its vectors.
        column: of the log; the feature's name if empty.
        kind: `id`, one id a row; `bag`, a list of ids pooled into one vector; `sequence`, a list of
          ids (oldest first) with one vector each, of which the newest `max_length` are used.
        transform: how a value becomes a table row (below).
        pooling: of a bag: the `sum` of its vectors, or `mean`, that sum by the number of ids.
        max_length: entries of a bag or sequence that are used, the newest.
        out_of_range: what an `identity` value outside [0, E - 2] does: `error`; `oov`, reads row 0
          (the log is known to hold such values); `count`, reads row 0, and a run reports how many.
        side: `item` if the feature describes what is ranked, else `context`.
        history: sequences of the same history are aligned position by position, one event each.
        position: for kind `id` on a list column, which entry: -1 the newest, -2 the one before;
          missing if the list is shorter. 0 for a column that is no list.
        weights: for kind `bag`, a list column of one finite number per id, of either sign, by which
          its vector is multiplied before pooling. `mean` still divides by the number of ids, not by
          the sum of the weights, which may be 0. An id that is null or out of vocabulary keeps its
          weight.

    Transforms: `hash` mixes an integer's 64 bits (strings: XXH64 of their UTF-8 bytes) and takes
    the remainder. `identity` uses the integer v as row v + 1. `log_square` buckets a number at
    floor(ln(x)^2) for x > 2 and at int(x) below, as FuxiCTR's preprocessing does Criteo's counts.
    `log_quarter` buckets it at floor(4 ln(1 + max(x, 0))), four buckets to a factor of e.
    `hour_of_day` and `hour_of_week` read a timestamp (milliseconds since the epoch, UTC). `length`
    is the number of entries of a list column.
    """

    name: str
    table: str
    column: str = ""
    kind: Literal["id", "bag", "sequence"] = "id"
    transform: Transform = "hash"
    pooling: Literal["sum", "mean"] = "mean"
    max_length: int = 0
    out_of_range: Literal["error", "oov", "count"] = "error"
    side: Literal["context", "item"] = "context"
    history: str = ""
    position: int = 0
    weights: str = ""

    def __post_init__(self) -> None:
        """Fill the column's name and check the feature's own fields."""
        if not self.column:
            object.__setattr__(self, "column", self.name)
        if self.weights and self.kind != "bag":
            raise ValueError(
                f"sparse feature {self.name!r}: weights are multiplied in where ids are pooled and "
                f"go with kind 'bag', got kind {self.kind!r}; remove them, or make it a bag"
            )
        if self.weights == self.column:
            raise ValueError(
                f"sparse feature {self.name!r}: weights names the column of the ids themselves, "
                f"{self.column!r}; name the list column of their weights"
            )
        if self.position > 0 or (
            self.position and (self.kind != "id" or self.transform == "length")
        ):
            raise ValueError(
                f"sparse feature {self.name!r}: position counts from the newest entry (-1, -2, "
                "...) and goes with kind 'id' and a transform of the entry, got position "
                f"{self.position}, kind {self.kind!r}, transform {self.transform!r}"
            )
        if self.transform == "length" and self.kind != "id":
            raise ValueError(
                f"sparse feature {self.name!r}: transform 'length' gives one number a row and "
                f"needs kind 'id', got {self.kind!r}"
            )
        if self.kind == "id" and self.max_length:
            raise ValueError(
                f"sparse feature {self.name!r}: max_length has no effect on kind 'id'; remove it, "
                "or set kind to 'bag' or 'sequence'"
            )
        if self.kind != "id" and self.max_length < 1:
            raise ValueError(
                f"sparse feature {self.name!r}: kind {self.kind!r} needs max_length >= 1, got "
                f"{self.max_length}"
            )
        if (self.kind == "sequence") != bool(self.history):
            raise ValueError(
                f"sparse feature {self.name!r}: kind 'sequence' and history go together (history "
                f"names the event list the sequence belongs to), got kind {self.kind!r} and "
                f"history {self.history!r}"
            )


@dataclass(frozen=True, kw_only=True)
class DenseFeature:
    """A number of one column. A null stays NaN, which a model treats as missing.

    Args:
        name: of the feature; unique in a schema.
        column: of the log; the feature's name if empty.
        transform: `log1p` takes sign(x) * ln(1 + |x|).
        standardize: subtract the mean and divide by the standard deviation, both after the
          transform and over the first rows that a run trains on; checkpoints keep them.
    """

    name: str
    column: str = ""
    transform: DenseTransform = "none"
    standardize: bool = False

    def __post_init__(self) -> None:
        """Fill the column's name."""
        if not self.column:
            object.__setattr__(self, "column", self.name)


@dataclass(frozen=True, kw_only=True)
class Label:
    """A binary target, one task. A null label has weight 0.

    Args:
        name: of the task; unique in a schema.
        column: of the log, 0 or 1; the label's name if empty.
        weight: a column of row weights, or empty.
    """

    name: str
    column: str = ""
    weight: str = ""

    def __post_init__(self) -> None:
        """Fill the column's name."""
        if not self.column:
            object.__setattr__(self, "column", self.name)

# SPDX-License-Identifier: MIT
"""A schema proposed for a log: from a sample's columns to tables and features, with remarks.

Cautious where a mistake costs most: a column that tells the label, or that names a single request,
is left out (`roles.py`); ids get tables in which few of them share a row.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from pipelines.schema_proposal import guesses
from pipelines.schema_proposal.column_profile import Profile, aligned, overlap
from pipelines.schema_proposal.roles import GUESS, Choices, Roles, assign
from pipelines.schema_proposal.sampling import Sample, separator_of

_BUCKETS = 128
_AGES = 256
_LONGEST = 50
_LARGEST = 2**24
_WIDE = 2**21
# A list of a column's ids: so many of its values are the column's too.
_SHARED = 0.2
_HOURS = {"hour_of_day": 32, "hour_of_week": 256}
_WEEK_MS = 7 * 86_400_000


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Plain data of a schema, and what there is to say of its parts and of what is not in it."""

    schema: dict[str, Any]
    roles: Roles


def propose(sample: Sample, choices: Choices | None = None) -> Proposal:
    """Return the schema that `sample` suggests.

    Raises:
        ValueError: no label or no feature can be found, or `choices` do not fit.
    """
    roles = assign(sample, choices or Choices())
    return Proposal(schema=_Features(sample, roles).schema(), roles=roles)


class _Features:
    """Tables and features of the columns that may be features."""

    def __init__(self, sample: Sample, roles: Roles) -> None:
        self.sample, self.roles, self.columns = sample, roles, roles.columns
        self.tables: dict[str, dict[str, Any]] = {}
        self.sparse: list[dict[str, Any]] = []
        self.dense: list[dict[str, Any]] = []

    def schema(self) -> dict[str, Any]:
        """Return the schema as plain data."""
        roles = self.roles
        self._hours()
        for one in self.columns.values():
            if not one.is_list:
                self._scalar(one)
        actions = self._lists()
        if not self.sparse and self.dense:
            self._bucket(_column(self.dense[0]))
        if not self.sparse:
            raise ValueError(
                f"beside the label ({', '.join(roles.labels)}) no column can be used: expected one "
                f"of ids or numbers; left out: {roles.left_out}"
            )
        self._sides()
        found: dict[str, Any] = {"tables": list(self.tables.values()), "sparse": self.sparse}
        if self.dense:
            found["dense"] = self.dense
        found["labels"] = [{"name": name} for name in roles.labels]
        found |= {k: v for k in ("user", "timestamp") if (v := getattr(roles, k))}
        if actions:
            found["history_actions"] = {"history": actions}
            self.roles.remark("history_actions", "history", f"{GUESS}: bit k is the k-th label's")
        return found

    def _hours(self) -> None:
        """Make fields of the hours of the rows' time, where it is read as it is."""
        time = self.roles.time
        if not self.roles.timestamp or time is None or time.distinct < 2:
            return
        for transform, rows in _HOURS.items():
            if transform == "hour_of_week" and time.is_number and time.high - time.low < _WEEK_MS:
                continue
            name = _free(transform, self.sample.columns)
            table = self._table(name, rows, "hours of the rows' time, UTC")
            self._feature(name, table, column=time.name, transform=transform)

    def _scalar(self, one: Profile) -> None:
        """Make a field, or two, of a column that is no list."""
        if guesses.is_measure(one):
            self._measure(one)
            return
        named = set(guesses.words(one.name)) & {"id", "uid", "iid", "user", "item"}
        named = named or guesses.is_thing(one)
        small = one.kind == "integer" and one.low >= 0 and one.high <= 1_000
        if small and one.coverage >= 0.5 and not named:
            table = self._table(one.name, _power(1.25 * one.high + 3), self._count(one))
            self._feature(one.name, table, transform="identity", out_of_range="oov")
        else:
            table = self._table(one.name, _rows(one.cardinality), self._count(one))
            self._feature(one.name, table)
            cut = separator_of(self.sample.columns[one.name]) if one.kind == "text" else ""
            if cut:
                self.roles.remark(
                    "sparse",
                    one.name,
                    "lists as text, each read as ONE id; `python -m pipelines.ingest "
                    f"--list-separator '{cut}'` and `kind: bag` make lists of them",
                )

    def _measure(self, one: Profile) -> None:
        """Make a number of a column, and buckets beside it where it spans much."""
        far = guesses.is_far(one)
        bucketed = far and one.low >= -3 and one.distinct > 32
        name = _free(f"{one.name}_value", self.sample.columns) if bucketed else one.name
        values: dict[str, Any] = {"name": name}
        values |= {"column": one.name} if bucketed else {}
        values |= {"transform": "log1p"} if far else {}
        self.dense.append({**values, "standardize": True})
        nulls = f", {one.nulls / one.rows:.1%} null" if one.nulls else ""
        about = f"{one.low:g} to {one.high:g}, half of them at most {one.middle:g}{nulls}"
        self.roles.remark("dense", name, about)
        if bucketed:
            self._bucket(one.name)

    def _bucket(self, column: str) -> None:
        table = self._table(column, _BUCKETS, "buckets of a number, four to a factor of e")
        self._feature(column, table, transform="log_quarter")

    def _lists(self) -> str:
        """Make a history and bags; return the column of the history's actions, if there is one."""
        lists = [one for one in self.columns.values() if one.is_list]
        ordered = [one for one in lists if guesses.is_ordered(one)]
        ids = [one for one in ordered if not guesses.is_measure(one)]
        first = max(ids or ordered, key=lambda one: one.cardinality, default=None)
        actions = ""
        for one in lists:
            same = first is not None and aligned(
                self.sample.columns[first.name], self.sample.columns[one.name]
            )
            if same and one is not first and guesses.is_actions(one, len(self.roles.labels)):
                actions = one.name
                continue
            values: dict[str, Any] = {"kind": "bag"}
            if same:
                values = {"kind": "sequence", "history": "history"}
            values["max_length"] = max(1, min(one.lengths[1], _LONGEST))
            if guesses.is_measure(one):
                values["transform"] = "log_square"
                table = self._table(one.name, _AGES, "buckets of a number, floor(ln(x)^2)")
            else:
                rows = _rows(one.cardinality)
                table = self._shared(one) or self._table(one.name, rows, self._count(one))
            self._feature(one.name, table, **values)
            about = f"{one.lengths[0]:.1f} entries on average, at most {one.lengths[2]:,}"
            if "transform" in values and not same:
                about += self._beside(one, lists)
            self.roles.remark("sparse", one.name, about)
        return actions

    def _beside(self, one: Profile, lists: list[Profile]) -> str:
        """Say of whose ids a list of numbers may be the weights: that is not guessed."""
        values = self.sample.columns[one.name]
        ids = [other for other in lists if not guesses.is_measure(other)]
        found = [x.name for x in ids if aligned(values, self.sample.columns[x.name])]
        if not found:
            return ""
        instead = f"write `weights: {one.name}` there in place of this feature and its table"
        return f"; if these weigh {found[0]}, {instead}"

    def _shared(self, one: Profile) -> str:
        """Return the table of the column whose ids a list holds, or nothing."""
        candidates = []
        for feature in self.sparse:
            other = self.columns.get(_column(feature))
            if other is None or other.is_list or other.kind != one.kind or other.distinct < 8:
                continue
            if feature.get("transform", "hash") != "hash":
                continue
            share = max(overlap(one, other), overlap(other, one))
            named = bool(guesses.stems(one.name) & guesses.stems(other.name))
            # Small numbers name anything; only their columns' names can tell what.
            if share >= _SHARED and (named or one.kind == "text" or one.high > 1e6):
                rows = _rows(max(one.cardinality, other.cardinality))
                candidates.append((named, share, feature["table"], rows))
        if not candidates:
            return ""
        _, share, name, rows = max(candidates)
        table = self.tables[name]
        table["num_embeddings"] = max(table["num_embeddings"], rows)
        self.roles.remark("tables", name, f"{GUESS}: of {one.name} too, {share:.0%} of ids agree")
        return name

    def _sides(self) -> None:
        """Say what describes the item: by name, or what shares a table with the history."""
        histories = {one["table"] for one in self.sparse if one.get("kind") == "sequence"}
        fields = [one for one in self.sparse if one.get("kind") != "sequence"]
        for feature in fields:
            one = self.columns.get(_column(feature))
            if one is None or guesses.is_user(one):
                continue
            if guesses.is_item(one) or (not one.is_list and feature["table"] in histories):
                feature["side"] = "item"
                self.roles.remark("sparse", feature["name"], f"{GUESS}: describes the item")
        if not self.dense and all("side" in one for one in fields):
            for feature in fields[:1]:  # a stream needs a field beside its target
                del feature["side"]

    def _table(self, name: str, rows: int, remark: str) -> str:
        """Add a table and return its name."""
        name = _free(re.sub(r"\W", "_", name), self.tables)  # user.id beside user_id
        width = 8 if rows <= _AGES else 16 if rows <= _WIDE else 32
        self.tables[name] = {"name": name, "num_embeddings": rows, "embedding_dim": width}
        if rows == _LARGEST:
            remark += "; many will share a row (see `dynamic` in embeddings/schema/lifetime.py)"
        self.roles.remark("tables", name, remark)
        return name

    def _feature(self, name: str, table: str, **values: Any) -> None:
        self.sparse.append({"name": name, "table": table, **values})

    def _count(self, one: Profile) -> str:
        about = "about " if self.sample.scale > 1 else ""
        nulls = f", {one.nulls / one.rows:.1%} null" if one.nulls else ""
        return f"{about}{one.cardinality:,} ids{nulls}"


def _column(feature: dict[str, Any]) -> str:
    return feature.get("column", feature["name"])


def _free(name: str, taken: Container[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _power(least: float) -> int:
    """Return the smallest power of two that is at least `least`, and at least 8."""
    return 1 << max(3, int(max(least, 1) - 1e-9).bit_length())


def _rows(cardinality: int) -> int:
    """Return how many rows hashed ids get: four times as many, twice for many, once for most."""
    factor = 4 if cardinality <= 100_000 else 2 if cardinality <= 1_000_000 else 1
    return min(max(_power(factor * cardinality), 1_024), _LARGEST)

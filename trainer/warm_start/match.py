# SPDX-License-Identifier: MIT
"""Which tensors of a checkpoint a changed model can keep, and which rows of them go where.

Tensors are matched by name; a table's by the table's name, wherever the table lives. A tensor is
kept whole, kept in part where its rows still mean the same, or begins fresh. What would look kept
while it means something else (an id reading the row of another, a weight meeting the token of
another feature) is a problem that the caller has to decide.

Rows of a table of E rows after it has got E' rows:
  identity, hours, buckets   a row is a value: rows below both sizes stay, the others are fresh
  hash                       row = 1 + h mod (E - 1). If E' - 1 is a multiple of E - 1, an id's new
                             row n had been row 1 + (n - 1) mod (E - 1): every id keeps its vector
                             and ids that shared one part from now on. With any other E' the rows
                             of ids are shuffled, and none can be kept.
  dynamic              an id keeps its row as long as E stays; with another E' every id that finds
                       room takes its vector along (`trainer/warm_start/resize_dynamic.py`).

Shapes: E and E' rows of a table before and now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from embeddings.collection import local_shards
from embeddings.schema.schema import Schema
from trainer.warm_start.partial_load import Region

INHERITED, RESIZED, FRESH = "inherited", "resized", "fresh"


@dataclass(frozen=True, kw_only=True)
class Match:
    """What becomes of one tensor of the run.

    Attributes:
        status: `inherited`, `resized` or `fresh`.
        detail: why, or how; may be empty.
        regions: what this rank reads, and from where.
        problem: why it cannot be kept although the checkpoint has something of its name.
        source: the saved tensor to move from if a dynamic table had another size; empty otherwise.
    """

    name: str
    status: str
    detail: str = ""
    regions: tuple[Region, ...] = ()
    problem: str = ""
    source: str = ""


def match_table(
    name: str, tensor: Tensor | ShardedTensor, saved: dict[str, tuple[int, ...]], rule: TableRule
) -> Match:
    """Return what becomes of a table's weight or optimizer state.

    Args:
        name: of the run's tensor.
        tensor: the run's tensor.
        saved: the one tensor of the checkpoint that corresponds, with its shape; empty if none
            does.
        rule: of the table.
    """
    if not saved:
        return Match(name=name, status=FRESH, detail=rule.absent or "not in the checkpoint")
    ((source, size),) = saved.items()
    sharded = isinstance(tensor, ShardedTensor)
    own = tuple(tensor.metadata().size if sharded else tensor.size())
    if rule.problem:
        return Match(name=name, status=FRESH, detail=rule.problem, problem=rule.problem)
    if size == own and rule.old_rows == rule.new_rows:
        return Match(name=name, status=INHERITED, regions=_whole(source, tensor))
    grown = (rule.old_rows, *size[1:]) == size and (rule.new_rows, *size[1:]) == own
    if not grown:
        return Match(name=name, status=FRESH, detail=f"shape {size}, now {own}")
    if rule.dynamic:
        return Match(name=name, status=RESIZED, detail=rule.detail, source=source)
    regions = _tiles(source, tensor, rule) if rule.hashed else _rows(source, tensor, rule)
    return Match(name=name, status=RESIZED, detail=rule.detail, regions=regions)


def match_map(
    name: str, tensor: Tensor | ShardedTensor, saved: dict[str, tuple[int, ...]], rule: TableRule
) -> Match:
    """Return what becomes of a part of a dynamic table's map of ids; arguments as `match_table`."""
    if not saved or rule.problem or rule.absent:
        detail = rule.problem or rule.absent or "not in the checkpoint"
        return Match(name=name, status=FRESH, detail=detail)
    ((source, _),) = saved.items()
    if isinstance(tensor, ShardedTensor) and rule.old_rows != rule.new_rows:
        return Match(name=name, status=RESIZED, detail=rule.detail, source=source)
    return Match(name=name, status=INHERITED, regions=_whole(source, tensor))


def match_dense(
    name: str, tensor: Tensor, saved: dict[str, tuple[int, ...]], problem: str = ""
) -> Match:
    """Return what becomes of a dense weight or its optimizer state."""
    if not saved:
        return Match(name=name, status=FRESH, detail="not in the checkpoint")
    ((source, size),) = saved.items()
    if size != tuple(tensor.size()):
        detail = f"shape {size}, now {tuple(tensor.size())}"
        return Match(name=name, status=FRESH, detail=detail)
    if problem:
        return Match(name=name, status=FRESH, detail=problem, problem=problem)
    return Match(name=name, status=INHERITED, regions=_whole(source, tensor))


@dataclass(frozen=True, kw_only=True)
class TableRule:
    """How a table's rows before and now correspond.

    Attributes:
        problem: why they do not.
        absent: why the table is fresh although nothing is wrong.
    """

    old_rows: int = 0
    new_rows: int = 0
    hashed: bool = False
    dynamic: bool = False
    problem: str = ""
    absent: str = ""

    @property
    def detail(self) -> str:
        """Say what is done with the rows."""
        sizes = f"{self.old_rows:,} to {self.new_rows:,} rows"
        if self.dynamic:
            return f"{sizes}: every id that finds room keeps its vector, the latest first"
        if self.hashed:
            return f"{sizes}: every id keeps its vector"
        kept = min(self.old_rows, self.new_rows)
        return f"{sizes}: rows 0 to {kept - 1:,} stay"


def table_rules(old: Schema, new: Schema) -> dict[str, TableRule]:
    """Return the rule of every table of `new`."""
    before = {table.name for table in old.tables}
    return {
        table.name: _rule(old, new, table.name)
        if table.name in before
        else TableRule(absent="a new table")
        for table in new.tables
    }


def layout_problem(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say why dense weights would meet other features than they were trained on; empty if not.

    Where a feature was added or removed, the number of tokens changes, and with it the shapes of
    what
    depends on them. Those weights are fresh. Where features were exchanged, or tokens are slices
    through all of them, shapes do not show the change.

    Args:
        old: the configuration before, as plain data.
        new: the configuration now, as plain data.
    """
    before, now = _layout(old["schema"]), _layout(new["schema"])
    sliced = new["model"]["tokenizer"]["num_tokens"] != 0
    for what in sorted({*before, *now}):
        first, second = before.get(what, []), now.get(what, [])
        shapes_tell = len(first) != len(second) and not (sliced and what == "fields")
        if first == second or shapes_tell:
            continue
        gone = [name for name in first if name not in second]
        come = [name for name in second if name not in first]
        change = f"{gone or 'none'} gone, {come or 'none'} new" if gone or come else "reordered"
        return f"{what} have changed ({change}) where no weight's shape tells"
    return ""


def _rule(old: Schema, new: Schema, name: str) -> TableRule:
    before, now = old.table(name), new.table(name)
    kinds = [
        {feature.transform for feature in schema.sparse if feature.table == name}
        for schema in (old, new)
    ]
    rows = TableRule(old_rows=before.num_embeddings, new_rows=now.num_embeddings)
    if before.embedding_dim != now.embedding_dim:
        return TableRule(
            problem=f"embedding_dim was {before.embedding_dim}, is {now.embedding_dim}"
        )
    if bool(before.dynamic) != bool(now.dynamic):
        way = "rows were given by hash, now by a map of ids"
        if before.dynamic:
            way = "rows were given by a map of ids, now are not"
        return TableRule(problem=way)
    if now.dynamic:
        return replace(rows, dynamic=True)
    if kinds[0] != kinds[1]:
        was, is_ = (", ".join(sorted(kind)) for kind in kinds)
        return TableRule(problem=f"values became rows by {was}, now by {is_}: rows of other ids")
    if before.num_embeddings == now.num_embeddings or "hash" not in kinds[0]:
        return rows
    period = before.num_embeddings - 1
    if kinds[0] == {"hash"} and (now.num_embeddings - 1) % period == 0:
        return replace(rows, hashed=True)
    fitting = 1 + period * max(2, -(-(now.num_embeddings - 1) // period))
    way_out = (
        f"; with {fitting:,} rows every id would keep its vector" if len(kinds[0]) == 1 else ""
    )
    return TableRule(
        problem=f"hashed ids have other rows in {now.num_embeddings:,} than in "
        f"{before.num_embeddings:,} rows{way_out}"
    )


def _layout(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the ordered names on which weights depend by position."""
    pooled = [one["name"] for one in schema["sparse"] if one["kind"] != "sequence"]
    found = {
        "fields": [*pooled, *(one["name"] for one in schema["dense"])],
        # A weight that has learnt a number's logarithm does not fit the number.
        "dense features": [
            f"{one['name']} ({one['transform']}{', standardize' * one['standardize']})"
            for one in schema["dense"]
        ],
        "labels": [one["name"] for one in schema["labels"]],
    }
    for one in schema["sparse"]:
        if one["kind"] == "sequence":
            found.setdefault(f"sequences of {one['history']}", []).append(one["name"])
    return found


def _whole(source: str, tensor: Tensor | ShardedTensor) -> tuple[Region, ...]:
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return (Region(source=source, offsets=tuple(offsets), view=tensor.to_local()),)
    return tuple(
        Region(source=source, offsets=(row, column)[: shard.dim()], view=shard)
        if isinstance(tensor, ShardedTensor)
        else Region(source=source, offsets=(0,) * shard.dim(), view=shard)
        for shard, row, column in local_shards(tensor)
    )


def _rows(source: str, tensor: Tensor | ShardedTensor, rule: TableRule) -> tuple[Region, ...]:
    """Return the regions of the rows that both sizes have."""
    kept = min(rule.old_rows, rule.new_rows)
    return tuple(
        Region(
            source=source,
            offsets=(row, column)[: shard.dim()],
            view=shard[: max(0, min(kept - row, len(shard)))],
        )
        for shard, row, column in local_shards(tensor)
    )


def _tiles(source: str, tensor: Tensor | ShardedTensor, rule: TableRule) -> tuple[Region, ...]:
    """Return the regions of row 0 and of the repetitions of all other rows."""
    period = rule.old_rows - 1
    found = []
    for shard, row, column in local_shards(tensor):
        first_tile = max(0, row - 1) // period
        last_tile = max(0, row + len(shard) - 2) // period
        # Of the new table: (first row, row after the last, how far the old rows lie before).
        parts = [(0, 1, 0)] + [
            (1 + tile * period, 1 + (tile + 1) * period, tile * period)
            for tile in range(first_tile, last_tile + 1)
        ]
        for start, stop, shift in parts:
            low, high = max(start, row), min(stop, row + len(shard))
            if low < high:
                offsets = (low - shift, column)[: shard.dim()]
                view = shard[low - row : high - row]
                found.append(Region(source=source, offsets=offsets, view=view))
    return tuple(found)

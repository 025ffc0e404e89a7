# SPDX-License-Identifier: MIT
"""A plan of tables onto ranks as plain data: printed, written beside a checkpoint, read back.

Shapes: E rows and D columns of a table, R ranks.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embeddings.schema.plain import from_plain

KEY = "sharding_plan"
# The share of a rank's memory that is for tables; the rest is for the dense model, its optimizer
# and batches.
TABLE_SHARE = 0.8
GIB, _MIB = 2**30, 2**20
ShardingKind = Literal["table_wise", "row_wise", "table_row_wise", "column_wise"]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where one table is.

    Args:
        table: its name.
        module: path of the collection that holds it.
        sharding: TorchRec's name of the kind.
        kernel: TorchRec's name of it.
        rows: E.
        columns: D.
        ranks: that hold a shard, in the shards' order.
        bytes_per_rank: of the largest shard: weights, optimizer state, ids and vectors of a step.
        cost_ms: estimated time in a step on the busiest of its ranks.
        fits: whether every rank has room.
        advice: what to change if not, else empty.
        dynamic: whether rows follow ids, so that shards are cut along buckets.
        weight_bytes: of a number in the table.
    """

    table: str
    module: str
    sharding: ShardingKind
    kernel: Literal["fused", "fused_uvm"]
    rows: int
    columns: int
    ranks: tuple[int, ...]
    bytes_per_rank: int
    cost_ms: float
    fits: bool = True
    advice: str = ""
    dynamic: bool = False
    weight_bytes: int = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where all tables are.

    Args:
        world_size: R.
        local_world_size: ranks of one machine.
        device: `cuda` or `cpu`.
        batch_size: examples per rank that were assumed.
        capacity_bytes: of one rank, for tables.
        tables: one entry a table.
        rank_bytes: (R,), used in device memory (main memory on CPUs).
        rank_cost_ms: (R,), estimated time in a step.
    """

    world_size: int
    local_world_size: int
    device: str
    batch_size: int
    capacity_bytes: int
    tables: tuple[TablePlan, ...]
    rank_bytes: tuple[int, ...]
    rank_cost_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that every table occurs once, and on ranks that exist."""
        counts = Counter(table.table for table in self.tables)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"plan: expected each table once, got {twice} more often")
        for table in self.tables:
            if not table.ranks or not all(0 <= rank < self.world_size for rank in table.ranks):
                raise ValueError(
                    f"plan: table {table.table!r}: expected ranks from 0 to {self.world_size - 1}, "
                    f"got {list(table.ranks)}"
                )
            number = self._ranks_of(table.sharding)
            if number is not None and len(set(table.ranks)) != number:
                raise ValueError(
                    f"plan: table {table.table!r}: expected {number} different ranks for "
                    f"{table.sharding}, got {list(table.ranks)}"
                )

    def _ranks_of(self, kind: ShardingKind) -> int | None:
        """Return the number of ranks that hold a table of this kind, None for any number."""
        numbers = {"table_wise": 1, "row_wise": self.world_size}
        return (numbers | {"table_row_wise": self.local_world_size}).get(kind)

    @property
    def fits(self) -> bool:
        """Whether every table has room."""
        return all(table.fits for table in self.tables)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `plan_from_dict` reads it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def places(self) -> dict[str, tuple[str, str, str, int, int, tuple[int, ...]]]:
        """Return, by table, the parts in which two equal plans agree."""
        return {
            t.table: (t.module, t.sharding, t.kernel, t.rows, t.columns, t.ranks)
            for t in self.tables
        }


def plan_from_dict(values: Any, source: str) -> Plan:
    """Rebuild what `Plan.to_dict` gave.

    Raises:
        ValueError: it is no plan; the message gives the key's path inside `source`.
    """
    return from_plain(Plan, values, source)


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file of JSON: a plan alone, or a checkpoint's manifest.

    Raises:
        ValueError: the file cannot be read, or holds no plan.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: expected a plan as JSON, cannot read it ({error}); write one with `python -m "
            "trainer.plan RECIPE --world-size R --json`, or name a checkpoint's manifest.json"
        ) from error
    if isinstance(values, dict) and KEY in values:
        values = values[KEY]
    return plan_from_dict(values, str(path))


def differences(old: Plan, new: Plan) -> list[str]:
    """Return one line for each table that two plans place differently."""
    before, after = old.places(), new.places()
    found = []
    for name in sorted({*before, *after}):
        a, b = before.get(name), after.get(name)
        if a != b:
            texts = [f"{p[1]} on {_ranks(p[5])}" if p else "absent" for p in (a, b)]
            found.append(f"{name}: {texts[0]}, now {texts[1]}")
    return found


def describe_plan(plan: Plan) -> str:
    """Return a text table: one line a table, then the totals, then the ranks' load."""
    rows = [
        ("table", "sharding", "kernel", "rows x columns", "ranks", "MiB/rank", "ms/step", "verdict")
    ]
    for t in sorted(plan.tables, key=lambda table: table.table):
        shape, size = f"{t.rows} x {t.columns}", f"{t.bytes_per_rank / _MIB:.2f}"
        verdict = "fits" if t.fits else f"does not fit: {t.advice}"
        rows.append(
            (
                *(t.table, t.sharding, t.kernel, shape, _ranks(t.ranks)),
                *(size, f"{t.cost_ms:.3f}", verdict),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    weights = sum(t.rows * t.columns * t.weight_bytes for t in plan.tables)
    capacity, top, low = plan.capacity_bytes, max(plan.rank_bytes), min(plan.rank_bytes)
    left_out = sum(not t.fits for t in plan.tables)
    mean_ms = sum(plan.rank_cost_ms) / len(plan.rank_cost_ms)
    lines.append(
        f"{len(plan.tables)} tables, {sum(t.rows for t in plan.tables):,} rows, "
        f"{weights / GIB:.2f} GiB of weights on {plan.world_size} {plan.device} ranks; a rank "
        f"holds {low / GIB:.2f} to {top / GIB:.2f} of {capacity / GIB:.2f} GiB for tables (of its "
        f"{capacity / TABLE_SHARE / GIB:.2f} GiB, {1 - TABLE_SHARE:.0%} are for the dense model, "
        f"its optimizer and batches); estimated lookups and exchange {mean_ms:.2f} ms a step on "
        f"average, {max(plan.rank_cost_ms):.2f} on the busiest rank"
    )
    lines.append(
        f"does not fit: {left_out} of {len(plan.tables)} tables" if left_out else "everything fits"
    )
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    """Write ranks shortly: 0-127, or 3,9."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))

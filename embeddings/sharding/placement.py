# SPDX-License-Identifier: MIT
"""Placement of tables: the cost of each way of sharding, and a greedy choice among them.

TorchRec's planner estimates every shard of every choice as an object, which is slow for a thousand
tables on a hundred ranks. Here the cost of a way of sharding has a closed form, the same on all its
ranks:

- bytes of a shard's weights and optimizer state, and of the ids and vectors of a step;
- time: a row that is looked up is read, and read and written again in backward, at the memory's
  speed; ids arrive, vectors leave and their gradients return at the network's speed. Pooled tables
  that are sharded by row send a partial sum from every rank, sequences only their own rows.

Tables are then placed, largest cost first, on the least busy rank that has room (Graham's rule: at
most 4/3 of the best makespan). This is tried for several limits of the cost and the memory up to
which a table stays whole. The attempt with the shortest time of its busiest rank wins; among nearly
equal ones, the attempt whose fullest rank holds least. All of it is deterministic arithmetic, so
all ranks find the same plan.

Shapes: B examples per rank, R ranks, L ranks of a machine, E rows and D columns of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embeddings.sharding.plans import GIB

# A table stays whole up to these parts of a rank's fair share of cost, and of its memory.
_COST_LIMITS = (0.25, 0.5, 1.0, 2.0, 4.0, float("inf"))
_MEMORY_LIMITS = (1.0, 0.5, 0.25, 0.1)
# Fixed cost of a lookup and its exchanges, which tables of one module and kind share.
_GROUP_MS = 0.2


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """The load that a table puts on its ranks.

    Args:
        name: of the table.
        module: path of the collection that holds it.
        rows: E.
        columns: D.
        state_bytes: of the optimizer, and of a dynamic table's map, per row.
        ids: looked up per example.
        vectors: sent per example, one per feature where they are pooled.
        pooled: whether lookups pool.
        kinds: allowed ways to shard it, in order of preference.
        dynamic: whether rows follow ids.
        weight_bytes: of a number in the table; it travels as 4 bytes.
        id_bytes: sent with an id, 4 of them its weight where it has one.
    """

    name: str
    module: str
    rows: int
    columns: int
    state_bytes: int
    ids: int
    vectors: int
    pooled: bool
    kinds: tuple[str, ...]
    dynamic: bool = False
    weight_bytes: int = 4
    id_bytes: int = 8


@dataclass(frozen=True, kw_only=True)
class Machines:
    """R ranks on machines. Bytes are for tables and of one rank; speeds are bytes per ms.

    Args:
        ranks: R.
        local_ranks: L, ranks of one machine.
        batch_size: B, examples per rank.
        capacity_bytes: for tables in device memory (main memory on CPUs).
        spill_bytes: main memory for tables that do not fit device memory; 0 for none.
        memory_speed: of device memory.
        spill_speed: between device and main memory.
        local_speed: between ranks of a machine.
        network_speed: between machines.
    """

    ranks: int
    local_ranks: int
    batch_size: int
    capacity_bytes: int
    spill_bytes: int
    memory_speed: float
    spill_speed: float
    local_speed: float
    network_speed: float


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to shard a table: bytes and milliseconds on each of its `shards` ranks."""

    kind: str
    shards: int
    bytes: int
    cost_ms: float
    spilled_ms: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """A table's way, its ranks, and whether they have room (`spilled`: in main memory)."""

    way: Way
    ranks: tuple[int, ...]
    fits: bool
    spilled: bool


def ways(load: TableLoad, machines: Machines) -> list[Way]:
    """Return the allowed ways to shard a table, in order of preference."""
    ranks, local = machines.ranks, machines.local_ranks
    examples = machines.batch_size * ranks
    vector = 4 * load.columns
    across = machines.network_speed if ranks > local else machines.local_speed
    found = []
    for kind in load.kinds:
        row_shards = {"row_wise": ranks, "table_row_wise": local}.get(kind, 1)
        column_shards = _column_shards(load.columns) if kind == "column_wise" else 1
        width = vector // column_shards
        ids = examples * load.ids / row_shards  # that one rank looks up
        # Each rank that has rows sends a partial sum; a vector of a sequence leaves one rank only.
        vectors = examples * load.vectors if load.pooled else ids
        kept = width * load.weight_bytes // 4
        looked_up = ids * (3 * kept + 2 * load.state_bytes)
        moved = load.id_bytes * ids + 2 * vectors * width
        if ranks == 1:
            network_ms = 0.0
        elif kind == "table_row_wise":  # summed inside the machine first
            network_ms = moved / machines.local_speed + moved / local / across
        else:
            network_ms = moved / across
        shard_rows = -(-load.rows // row_shards)
        found.append(
            Way(
                kind=kind,
                shards=row_shards * column_shards,
                bytes=int(shard_rows * (kept + load.state_bytes) + moved),
                cost_ms=looked_up / machines.memory_speed + network_ms,
                spilled_ms=looked_up / machines.spill_speed + network_ms,
            )
        )
    return found


def place(loads: Sequence[TableLoad], machines: Machines) -> list[Place]:
    """Place every table; those without room have `fits` false."""
    choices = [ways(load, machines) for load in loads]
    fair = sum(options[0].cost_ms for options in choices) / machines.ranks
    best: tuple[tuple[float, ...], list[Place]] | None = None
    for chosen in _proposals(choices, fair, machines.capacity_bytes):
        places, busy = _assign(loads, chosen, machines)
        groups = {(load.module, p.way.kind) for load, p in zip(loads, places, strict=True)}
        busiest = float(busy.max()) + _GROUP_MS * len(groups)
        score = (
            sum(not p.fits for p in places),
            sum(p.spilled for p in places),
            # Times within five percent count as equal; then the better spread of memory wins.
            round(math.log(busiest, 1.05)),
            max(usage(places, machines)[0]),
            busiest,
        )
        if best is None or score < best[0]:
            best = score, places
    assert best is not None
    return best[1]


def usage(places: Sequence[Place], machines: Machines) -> tuple[list[int], list[float]]:
    """Return bytes of capacity and milliseconds of a step on each rank."""
    used = np.zeros(machines.ranks, np.int64)
    busy = np.zeros(machines.ranks)
    for item in places:
        ranks = np.array(item.ranks)
        if not item.spilled:
            np.add.at(used, ranks, item.way.bytes)
        np.add.at(busy, ranks, item.way.spilled_ms if item.spilled else item.way.cost_ms)
    return used.tolist(), busy.tolist()


def advise(load: TableLoad, item: Place, machines: Machines) -> str:
    """Return what would make room for a table that has none."""
    needed, capacity = item.way.bytes, machines.capacity_bytes
    size = f"{needed / GIB:.2f} GiB on each of {item.way.shards} ranks, a rank has "
    text = f"{item.way.kind} needs {size}{capacity / GIB:.2f} GiB for tables; "
    others = [way for way in ("row_wise", "table_row_wise") if way not in load.kinds]
    if item.way.kind != "row_wise" and others:
        return f"{text}allow {' or '.join(others)}, or lower num_embeddings or embedding_dim"
    total = load.rows * (load.weight_bytes * load.columns + load.state_bytes)
    if item.way.kind == "row_wise" and needed > capacity:
        over = needed - total // machines.ranks  # ids and vectors on their way
        if over < capacity:
            return f"{text}use at least {-(-total // (capacity - over))} ranks, or shrink the table"
        return f"{text}lower the batch size ({over / GIB:.2f} GiB are ids and vectors on their way)"
    return f"{text}other tables took the room: add ranks or memory"


def _column_shards(columns: int) -> int:
    """Return into how many parts TorchRec cuts D columns."""
    from torchrec.distributed.sharding_plan import _get_block_size_for_cw_shard

    return columns // _get_block_size_for_cw_shard(columns, None)


def _proposals(choices: list[list[Way]], fair_ms: float, capacity: int) -> Iterator[list[Way]]:
    """Yield one way per table for each pair of limits, without repeats."""
    seen: set[tuple[int, ...]] = set()
    for memory_part in _MEMORY_LIMITS:
        for cost_part in _COST_LIMITS:
            room, time_ms = capacity * memory_part, fair_ms * cost_part
            picked = tuple(_pick(options, room, time_ms) for options in choices)
            if picked not in seen:
                seen.add(picked)
                yield [options[i] for options, i in zip(choices, picked, strict=True)]


def _pick(options: list[Way], room: float, time_ms: float) -> int:
    """Return the first way within both limits, else the one with room, else the smallest."""
    for i, way in enumerate(options):
        if way.bytes <= room and way.cost_ms <= time_ms:
            return i
    order = sorted(
        range(len(options)),
        key=lambda i: (
            options[i].bytes > room,
            options[i].cost_ms if options[i].bytes <= room else options[i].bytes,
        ),
    )
    return order[0]


def _assign(
    loads: Sequence[TableLoad], chosen: Sequence[Way], machines: Machines
) -> tuple[list[Place], np.ndarray]:
    """Give every table its ranks; return the places and each rank's milliseconds."""
    free = np.full(machines.ranks, machines.capacity_bytes, np.int64)
    spill = np.full(machines.ranks, machines.spill_bytes, np.int64)
    busy = np.zeros(machines.ranks)
    order = sorted(
        range(len(loads)),
        key=lambda i: (chosen[i].kind != "row_wise", -chosen[i].cost_ms, loads[i].name),
    )
    places: dict[int, Place] = {}
    for i in order:
        way = chosen[i]
        ranks, fits, spilled = _find(way, free, busy, machines.local_ranks), True, False
        if ranks is None and machines.spill_bytes:
            ranks = _find(way, spill, busy, machines.local_ranks)
            spilled = ranks is not None
        if ranks is None:
            fits = False
            ranks = _find(
                way, np.full_like(free, way.bytes * way.shards), busy, machines.local_ranks
            )
        assert ranks is not None
        np.subtract.at(spill if spilled else free, ranks, way.bytes)
        np.add.at(busy, ranks, way.spilled_ms if spilled else way.cost_ms)
        places[i] = Place(way=way, ranks=tuple(ranks.tolist()), fits=fits, spilled=spilled)
    return [places[i] for i in range(len(loads))], busy


def _find(way: Way, free: np.ndarray, busy: np.ndarray, local: int) -> np.ndarray | None:
    """Return the least busy ranks with room for a table's shards, or None."""
    if way.kind == "row_wise":
        return np.arange(len(free)) if free.min() >= way.bytes else None
    if way.kind == "table_row_wise":
        room = free.reshape(-1, local).min(1) >= way.bytes
        if not room.any():
            return None
        host = int(np.where(room, busy.reshape(-1, local).max(1), np.inf).argmin())
        return np.arange(host * local, (host + 1) * local)
    room = free >= way.bytes
    order = np.argsort(np.where(room, busy, np.inf), kind="stable")[: way.shards]
    if len(order) < way.shards:  # more parts of columns than ranks: some ranks hold several
        order = np.resize(order, way.shards)
        counts = np.bincount(order, minlength=len(free))
        return order if (free >= counts * way.bytes).all() else None
    return order if room[order].all() else None

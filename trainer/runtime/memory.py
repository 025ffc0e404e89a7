# SPDX-License-Identifier: MIT
"""Whether the tables fit into memory, asked before anything is allocated.

Linux hands out memory that it does not have and ends the process once it is touched, minutes later
and without a word; so a table that cannot fit is refused by its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from embeddings.optimizer import SparseOptimizerConfig, state_bytes
from embeddings.schema.schema import Table
from trainer.runtime.runtime import Runtime

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


def table_bytes(table: Table, optimizer: SparseOptimizerConfig) -> int:
    """Return the bytes of a table's weights, its optimizer's state and its map of ids."""
    row = optimizer.weight_bytes(table.name) * table.embedding_dim
    row += state_bytes(optimizer.kind, table.embedding_dim)
    return table.num_embeddings * (row + (table.dynamic.row_bytes if table.dynamic else 0))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`, or in this machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    found += [1024 * kilobytes for kilobytes in _numbers(_MEMORY, "MemAvailable:")]
    for limit in _numbers(_CGROUP / "memory.max"):
        # Pages of files that a container has read count as used, and are given back when needed.
        used = sum(_numbers(_CGROUP / "memory.current"))
        found.append(limit - used + sum(_numbers(_CGROUP / "memory.stat", "inactive_file")))
    return max(0, min(found))


def check_tables(
    tables: Sequence[Table], optimizer: SparseOptimizerConfig, runtime: Runtime
) -> None:
    """Refuse tables that cannot fit even if they are spread evenly over the ranks. Collective.

    Raises:
        ValueError: they do not; bytes needed and available and the largest table are named, the
            same on all ranks.
    """
    sizes = {table.name: table_bytes(table, optimizer) for table in tables}
    total, available = sum(sizes.values()), available_bytes(runtime.device)
    on_gpu = runtime.device.type == "cuda"
    needed = total * (1 if on_gpu else runtime.local_world_size) // runtime.world_size
    messages: list[str | None] = [None] * runtime.world_size
    message = None
    if needed > available:
        largest = max(tables, key=lambda table: sizes[table.name])
        place = f"the GPU of rank {runtime.rank}" if on_gpu else f"rank {runtime.rank}'s machine"
        message = (
            f"schema: the tables do not fit into memory: with {optimizer.kind} they need "
            f"{total:,} bytes, {needed:,} on {place}, where {available:,} are available; the "
            f"largest is {largest.name!r} ({largest.num_embeddings:,} rows x "
            f"{largest.embedding_dim}: {sizes[largest.name]:,} bytes); lower its num_embeddings or "
            "embedding_dim, or train on more machines"
        )
    dist.all_gather_object(messages, message, group=runtime.group)
    for found in messages:
        if found:
            raise ValueError(found)


def _numbers(path: Path, name: str = "") -> list[int]:
    """Return the number after `name` in a file of lines 'NAME NUMBER ...'; none if not there."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    words = [line.removeprefix(name).split() for line in lines if line.startswith(name)]
    return [int(parts[0]) for parts in words[:1] if parts and parts[0].isdecimal()]

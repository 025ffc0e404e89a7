# SPDX-License-Identifier: MIT
"""A dynamic table that has got another number of rows: its ids take theirs with them.

Where an id lies follows from the number of rows, so growing or shrinking moves every id. Each rank
reads the old rows of its share of the ids, one interval, gives the ids rows anew (the latest first,
where not all find room) and moves vectors and optimizer states along.

Shapes: E and E' rows of the table before and now.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from embeddings.collection import local_shards
from embeddings.dynamic.buckets import Layout, num_buckets
from embeddings.dynamic.dynamic import Part
from embeddings.dynamic.slots import Slots
from trainer.warm_start.partial_load import Region

_MAP = ("ids", "seen", "hits")


class Move:
    """The move of one table on this rank.

    Args:
        part: of the table as it is now, without ids.
        old_rows: E.
    """

    def __init__(self, part: Part, old_rows: int) -> None:
        self._part = part
        new = part.map.layout
        ratio = num_buckets(old_rows), num_buckets(new.num_embeddings)
        self._old = Layout(
            num_embeddings=old_rows,
            first_bucket=new.first_bucket * ratio[0] // ratio[1],
            last_bucket=-(-new.last_bucket * ratio[0] // ratio[1]),
        )
        self._read: dict[str, Tensor] = {}
        self._regions: list[Region] = []
        self._moved: list[tuple[Tensor, Tensor]] = []

    def add(self, name: str, source: str, tensor: Tensor | ShardedTensor) -> None:
        """Take a tensor of the table along.

        name: of the tensor among the state. source: of the one it is read from. Ids that wait for a
        row are not taken along: they are counted from the start.
        """
        kind = name.rpartition(".")[2]
        if kind.startswith("waiting_"):
            return
        ((own, _, _),) = local_shards(tensor)
        rows = torch.empty((self._old.num_rows, *own.shape[1:]), dtype=own.dtype, device=own.device)
        offsets = (self._old.first_row, *[0] * (own.dim() - 1))
        self._regions.append(Region(source=source, offsets=offsets, view=rows))
        if kind in _MAP:
            self._read[kind] = rows
        else:
            self._moved.append((rows, own))

    def regions(self) -> Iterator[Region]:
        """Yield what has to be read before `finish`."""
        yield from self._regions

    @torch.no_grad()
    def finish(self) -> None:
        """Give the ids that were read rows, and these what they held."""
        table, layout = self._part.map, self._part.map.layout
        if len(self._read) == len(_MAP):
            found, rows = table.take_over(Slots(**self._read))
        else:  # vectors of ids that are not known serve nobody
            found = rows = torch.empty(0, dtype=torch.int64, device=table.ids.device)
        new = torch.arange(layout.first_bucket, layout.last_bucket, device=found.device)
        buckets = num_buckets(self._old.num_embeddings), num_buckets(layout.num_embeddings)
        old = torch.div(new * buckets[0], buckets[1], rounding_mode="floor")
        old_shared = self._old.default_rows(found.device)[old - self._old.first_bucket]
        found = torch.cat([found, old_shared])
        rows = torch.cat([rows, layout.default_rows(rows.device)])
        if layout.first_bucket == 0:
            found, rows = (torch.cat([part, part.new_zeros(1)]) for part in (found, rows))
        for held, own in self._moved:
            own[rows] = held[found]

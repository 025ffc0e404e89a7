# SPDX-License-Identifier: MIT
"""Where ids may lie in a bounded table: in one bucket, and in one of two sets of rows within it.

A table of E rows is cut into K buckets of consecutive rows; K follows from E alone. An id's bucket
follows from its mixed bits, so ids with a pattern spread evenly, and a rank holds whole buckets:
another number of ranks moves rows and changes nothing inside a bucket. The first row of a bucket is
its default row, read by ids without a row (bucket 0 also keeps row 0 for missing ids); the others
form sets of `WAYS` rows. A new id takes a row in the emptier of its two sets, which fills tables
almost to the last row before an id finds no room.

Source: Azar, Broder, Karlin, Upfal, "Balanced Allocations", SIAM J. Comput. 29(1), 1999; SplitMix64
as in `trainer/data/hashing.py`. Shapes: U ids, E rows, K buckets, W = 2 * `WAYS` rows of two sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from embeddings.schema.lifetime import MISSING_ID, WAYS

_MAX_BUCKETS = 4096
_FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
_FACTOR_2 = 0x94D049BB133111EB - 2**64
_SECOND_SET = 0x9E3779B97F4A7C15 - 2**64
_LOW_31 = 0x7FFFFFFF


def mix64(ids: Tensor) -> Tensor:
    """Mix int64 ids (any shape), bit for bit as `trainer.data.hashing.mix64` does."""
    ids = (ids ^ _shift(ids, 30)) * _FACTOR_1
    ids = (ids ^ _shift(ids, 27)) * _FACTOR_2
    return ids ^ _shift(ids, 31)


def num_buckets(num_embeddings: int) -> int:
    """Return K of a table of E rows: half the root of E, for many buckets of many rows."""
    return max(1, min(_MAX_BUCKETS, math.isqrt(num_embeddings) // 2))


def buckets_of_rank(num_embeddings: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first bucket of a rank, and of the next one.

    Raises:
        ValueError: there are more ranks than buckets.
    """
    buckets = num_buckets(num_embeddings)
    if world_size > buckets:
        raise ValueError(
            f"a dynamic table of {num_embeddings} rows can be on at most {buckets} ranks, got "
            f"{world_size}; raise its num_embeddings to {4 * world_size**2}"
        )
    return rank * buckets // world_size, (rank + 1) * buckets // world_size


def shard_rows(num_embeddings: int, world_size: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of every rank."""
    buckets = num_buckets(num_embeddings)
    bounds = []
    for rank in range(world_size):
        first, last = buckets_of_rank(num_embeddings, rank, world_size)
        start = first * num_embeddings // buckets
        bounds.append((start, last * num_embeddings // buckets - start))
    return bounds


def owners(ids: Tensor, buckets: Tensor | int, world_size: int) -> Tensor:
    """Return the rank that holds each of the ids (int64).

    Args:
        buckets: K, one number or one an id.
    """
    bucket = (_shift(mix64(ids), 33) * buckets) >> 31
    bucket = bucket.masked_fill(ids == MISSING_ID, 0)
    return torch.div((bucket + 1) * world_size - 1, buckets, rounding_mode="floor")


class Places(NamedTuple):
    """Where U ids may lie.

    Attributes:
        rows: (U, W), counted from the shard's first row; a row may occur twice.
        default: (U,), the row that an id without a row of its own reads.
    """

    rows: Tensor
    default: Tensor

    def at(self, chosen: Tensor) -> Places:
        """Return the places of the ids at the positions `chosen`."""
        return Places(*(part.index_select(0, chosen) for part in self))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The buckets `first_bucket` to `last_bucket` - 1 of a table of E = `num_embeddings` rows."""

    num_embeddings: int
    first_bucket: int
    last_bucket: int

    @property
    def first_row(self) -> int:
        """The shard's first row in the table."""
        return self.first_bucket * self.num_embeddings // num_buckets(self.num_embeddings)

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        end = self.last_bucket * self.num_embeddings // num_buckets(self.num_embeddings)
        return end - self.first_row

    @property
    def num_id_rows(self) -> int:
        """Rows of the shard that ids can take."""
        return self.num_rows - (self.last_bucket - self.first_bucket) - (self.first_bucket == 0)

    def holds(self, ids: Tensor) -> Tensor:
        """Return (U,) whether the ids belong to the buckets here."""
        bucket = (_shift(mix64(ids), 33) * num_buckets(self.num_embeddings)) >> 31
        return (bucket >= self.first_bucket) & (bucket < self.last_bucket)

    def default_rows(self, device: torch.device) -> Tensor:
        """Return, for each bucket here, the row of ids without one, from the shard's first row."""
        buckets = torch.arange(self.first_bucket, self.last_bucket, device=device)
        return self._default(buckets)

    def places(self, ids: Tensor) -> Places:
        """Return where U ids, all of this shard's buckets, may lie."""
        mixed = mix64(ids)  # (U,)
        total = num_buckets(self.num_embeddings)
        bucket = (_shift(mixed, 33) * total) >> 31  # (U,) the top 31 bits, scaled to 0 to K - 1
        default = self._default(bucket)
        rows_of_bucket = self._start(bucket + 1) - default - 1
        sets = torch.div(rows_of_bucket + (WAYS - 1), WAYS, rounding_mode="floor")
        first = ((mixed & _LOW_31) * sets) >> 31  # (U,) the low 31 bits choose the first set
        # The second is one of the other sets, or the same where there is only one.
        step = 1 + ((_shift(mixed * _SECOND_SET, 33) * (sets - 1).clamp(min=1)) >> 31)
        second = torch.remainder(first + step, sets)
        pair = torch.stack([first, second], dim=1) + (default + 1)[:, None]  # (U, 2)
        ways = torch.arange(WAYS, device=ids.device)
        # Row j of set s is s + j * sets: (U, 2, WAYS).
        rows = torch.addcmul(pair[:, :, None], ways, sets[:, None, None])
        # Some sets lack their last row: the bucket's last row takes its place.
        rows = torch.minimum(rows, (default + rows_of_bucket)[:, None, None])
        return Places(rows.view(len(ids), 2 * WAYS), default)

    def _start(self, bucket: Tensor) -> Tensor:
        total = num_buckets(self.num_embeddings)
        start = torch.div(bucket * self.num_embeddings, total, rounding_mode="floor")
        return start - self.first_row

    def _default(self, bucket: Tensor) -> Tensor:
        return self._start(bucket) + (bucket == 0)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)

# SPDX-License-Identifier: MIT
"""The map of a dynamic table: 64-bit ids to rows, with admission of new ids and eviction of old.

A ManagedCollisionModule of TorchRec, so that ids travel raw, ahead of time, to the rank that holds
their bucket (`embeddings/dynamic/buckets.py`) and become rows there, in the step that looks them
up. In training an id is looked up, counted, and admitted or not; in evaluation it is only looked
up, and nothing changes. An id without a row reads its bucket's default row; a missing id reads row
0. No id reads another id's row, and an id that is admitted at its first occurrence learns from it.

Time is the log's: `day` is set from each batch and steps are counted here, so a replay of old days
evicts the same ids. The whole state of the map is in its buffers, in the order of the table's rows,
and is cut as the table is cut.

Shapes: E rows of the table, N ids of a step, U different ones among them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from embeddings.dynamic.buckets import Layout, Places, mix64, num_buckets
from embeddings.dynamic.slots import STEP_BITS, Slots
from embeddings.schema.lifetime import MISSING_ID, DynamicConfig

# The counts of `totals`: of occurrences up to `waiting`, of ids from there; in training only.
TOTALS = ("ids", "hits", "missing", "waiting", "admitted", "evicted", "expired", "failed")
# Expired rows are evicted this many times in `ttl_steps` steps.
_SWEEPS = 16


class IdMap(ManagedCollisionModule):
    """Maps the ids of one table, or of the buckets of it that are on this rank.

    Attributes:
        layout: the buckets on this rank.
        day: of the log, in days since the epoch; set it before each step.
        totals: (8,) int64, counts since the map was built (`TOTALS`).

    Args:
        num_embeddings: E.
        config: admission and eviction.
        device: of the buffers.
        layout: the buckets; all of them if None.
    """

    ids: Tensor
    seen: Tensor
    hits: Tensor
    _current_iter_tensor: Tensor

    def __init__(
        self,
        num_embeddings: int,
        config: DynamicConfig,
        device: torch.device,
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout or Layout(
            num_embeddings=num_embeddings, first_bucket=0, last_bucket=num_buckets(num_embeddings)
        )
        super().__init__(device, output_segments=[0, num_embeddings])
        # It would be saved, and holds only how the table is cut now.
        del self._output_segments_tensor
        self.config = config
        self.day = 0
        rows = self.layout.num_rows
        kinds = {"ids": torch.int64, "seen": torch.int64, "hits": torch.int32}
        prefixes = ("", "waiting_") if config.min_occurrences > 1 else ("",)
        for name in (prefix + kind for prefix in prefixes for kind in kinds):
            dtype = kinds[name.removeprefix("waiting_")]
            self.register_buffer(name, torch.empty(rows, dtype=dtype, device=device))
        self._changed: list[Tensor] = []
        self.reset()

    @property
    def slots(self) -> Slots:
        """The rows and their ids."""
        return Slots(ids=self.ids, seen=self.seen, hits=self.hits)

    @property
    def waiting(self) -> Slots | None:
        """The ids that are counted towards admission."""
        if self.config.min_occurrences == 1:
            return None
        return Slots(**{name: getattr(self, f"waiting_{name}") for name in ("ids", "seen", "hits")})

    @property
    def step(self) -> int:
        """Steps trained, over all runs that inherited the map from each other."""
        return int(self._current_iter_tensor.item())

    def reset(self) -> None:
        """Forget every id."""
        self._current_iter_tensor.zero_()
        self.totals = torch.zeros(len(TOTALS), dtype=torch.int64, device=self.ids.device)
        self._swept, self._changed = -1, []
        for slots in (self.slots, self.waiting):
            if slots is not None:
                slots.clear()
        if not self.ids.is_meta:
            # A default row has no id: its `seen` holds how many rows of each set are in use.
            ways = self.config.initial_ways(self.layout.num_embeddings)
            self.seen[self.layout.default_rows(self.ids.device)] = ways

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the ids as they are."""
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the ids as they are: `train_rows` counts them."""
        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Return the rows of the ids, numbered as in the whole table."""
        (values,) = [feature.values() for feature in features.values()]
        rows = self.rows(values) + self.layout.first_row
        return {
            name: JaggedTensor(values=rows, lengths=feature.lengths(), offsets=feature.offsets())
            for name, feature in features.items()
        }

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Return the rows of the ids."""
        return self.remap(features)

    def rows(self, values: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the (N,) rows of N ids, counted from this shard's first row.

        Args:
            values: (N,) int64 ids.
            times: (N,), how often each id occurs; once if None. Used in training only.
        """
        return self.train_rows(values, times) if self.training else self.lookup(values)

    @torch.no_grad()
    def lookup(self, values: Tensor) -> Tensor:
        """Return the (N,) rows of N ids, counted from this shard's first row; changes nothing."""
        ids, inverse = torch.unique(values, return_inverse=True)
        _, rows = self.slots.find(ids, self.layout.places(ids))
        return rows.masked_fill(ids == MISSING_ID, 0).index_select(0, inverse)

    @torch.no_grad()
    def train_rows(self, values: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the (N,) rows of the ids of a training step; admits and evicts ids.

        Args:
            values: (N,) int64 ids.
            times: (N,), how often each id occurs; once if None.
        """
        self._current_iter_tensor += 1
        now = (self.day << STEP_BITS) + self.step
        self._expire()
        # (U,), (N,), (U,)
        ids, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
        if times is not None:
            counts = torch.zeros_like(ids).index_add_(0, inverse, times.long())
        is_id = ids != MISSING_ID
        places = self.layout.places(ids)
        has, rows = self.slots.find(ids, places)
        has &= is_id
        # Positions among the U ids: with a row, and without one.
        known, new = has.nonzero()[:, 0], (is_id & ~has).nonzero()[:, 0]
        self.slots.touch(rows[known], now, counts[known])
        places = places.at(new)
        admitted, total = self._admit(ids[new], places, counts[new], now)
        if admitted is not None:
            new, places, total = new[admitted], places.at(admitted), total[admitted]
        given, evicted = self.slots.place(
            ids[new],
            places,
            now,
            total,
            eviction=self.config.eviction.replace("ttl", "lru"),
            ways=self.seen,
        )
        placed = given >= 0
        rows[new[placed]] = given[placed]
        self._changed.append(given[placed])
        hits, missing, admitted = counts[known].sum(), counts[~is_id].sum(), counts[new].sum()
        waiting = counts.sum() - hits - missing - admitted
        expired = torch.zeros_like(hits)
        ids_of = (placed.sum(), evicted.sum(), expired, (~placed).sum())
        self.totals += torch.stack((counts.sum(), hits, missing, waiting, *ids_of))
        return rows.masked_fill(~is_id, 0).index_select(0, inverse)

    def evict(self) -> Tensor | None:
        """Return the rows, numbered as in the table, whose vector and state must be reset.

        They are the rows that lost an id or got one since the last call; `ids` tells them apart.
        """
        changed, self._changed = self._changed, []
        if not sum(map(len, changed)):
            return None
        return torch.cat(changed) + self.layout.first_row

    def take_over(self, old: Slots) -> tuple[Tensor, Tensor]:
        """Give the ids of another map, of another size, rows here; the latest seen come first.

        Ids of other ranks' buckets are skipped; those without room are counted as evicted.

        Args:
            old: the rows of the other map.

        Returns:
            The positions in `old` of the ids that found a row, and these rows, counted from this
            shard's first row.
        """
        position = ((old.ids != MISSING_ID) & self.layout.holds(old.ids)).nonzero()[:, 0]
        worth = old.hits if self.config.eviction == "lfu" else old.seen
        order = position[torch.argsort(worth[position], descending=True, stable=True)]
        given = self.slots.fill(old.ids[order], self.layout, self.seen)
        placed = given >= 0
        found, rows = order[placed], given[placed]
        self.seen[rows], self.hits[rows] = old.seen[found], old.hits[found]
        self.totals[TOTALS.index("evicted")] += len(given) - len(rows)
        return found, rows

    def occupancy(self) -> tuple[int, int]:
        """Return the ids that have a row here, and the rows that are for ids."""
        held = int((self.ids != MISSING_ID).sum())
        return held, self.layout.num_id_rows

    def output_size(self) -> int:
        """Return the rows of this shard."""
        return self.layout.num_rows

    def input_size(self) -> int:
        """Return 0: ids are unbounded."""
        return 0

    def buckets(self) -> int:
        """Return K, of the whole table."""
        return num_buckets(self.layout.num_embeddings)

    def open_slots(self) -> Tensor:
        """Return the number of free rows, (1,)."""
        held, rows = self.occupancy()
        return torch.tensor([rows - held], device=self.ids.device)

    def validate_state(self) -> None:
        """Drop what was derived from the buffers, which have just been replaced."""
        self._swept, self._changed = -1, []

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> IdMap:
        """Return an empty map of the buckets in these rows of the table."""
        rows = self.layout.num_embeddings
        first, last = (-(-row * num_buckets(rows) // rows) for row in output_id_range)
        layout = Layout(num_embeddings=rows, first_bucket=first, last_bucket=last)
        if (layout.first_row, layout.first_row + layout.num_rows) != tuple(output_id_range):
            raise RuntimeError(
                f"a dynamic table of {rows} rows was cut at rows {output_id_range}, where no "
                "bucket begins; plan again (python -m trainer.plan)"
            )
        return IdMap(rows, self.config, device or self.device, layout)

    def _admit(
        self, ids: Tensor, places: Places, counts: Tensor, now: int
    ) -> tuple[Tensor | None, Tensor]:
        """Decide which ids without a row get one, and count the others.

        Args:
            ids: (U,) int64, sorted and unique.
            places: where they may lie.
            counts: (U,), their occurrences in this step.
            now: 2^40 * day + step.

        Returns:
            Positions among the ids, None for all of them, and (U,) occurrences so far.
        """
        waiting = self.waiting
        if self.config.admission == "probability":
            # From the step and the id only: the same on any number of ranks and after a restart.
            draws = (mix64(mix64(ids) + self.step) >> 11) & ((1 << 53) - 1)
            never = (1 - self.config.probability) ** counts.double()
            return (draws.double() * 2.0**-53 >= never).nonzero()[:, 0], counts
        if waiting is None:
            return None, counts
        has, rows = waiting.find(ids, places)
        total = counts + torch.where(has, waiting.hits.index_select(0, rows).long(), 0)
        enough = total >= self.config.min_occurrences
        again = (has & ~enough).nonzero()[:, 0]
        waiting.touch(rows[again], now, counts[again])
        waiting.free(rows[has & enough])
        fresh = (~has & ~enough).nonzero()[:, 0]
        waiting.place(ids[fresh], places.at(fresh), now, counts[fresh])
        return enough.nonzero()[:, 0], total

    def _expire(self) -> None:
        """Evict the ids that were not seen for `ttl_days` or `ttl_steps`."""
        config = self.config
        if config.ttl_days:
            if self.day == self._swept:  # days may go back: another epoch, or a replay
                return
            self._swept = self.day
            old = (self.seen >> STEP_BITS) < self.day - config.ttl_days
        elif config.ttl_steps and self.step % max(1, config.ttl_steps // _SWEEPS) == 0:
            old = (self.seen & ((1 << STEP_BITS) - 1)) < self.step - config.ttl_steps
        else:
            return
        rows = (old & (self.ids != MISSING_ID)).nonzero()[:, 0]
        self.slots.free(rows)
        self._changed.append(rows)
        self.totals[TOTALS.index("expired")] += len(rows)

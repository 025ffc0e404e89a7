# SPDX-License-Identifier: MIT
"""What a run notes of its tables: what a sampled step asks of them, and what they are used for.

Counting is off but for one step an interval: the first that can be counted, and then the first of
each interval of the log. Its numbers are in the curve: lookup kernels, exchanges, ids and bytes, of
all ranks together. At every evaluation the tables' statistics become a line of DIR/tables.jsonl.
Dynamic tables count what comes and goes; each interval asks them whether they hold their ids, and
checkpoints keep the counts, so that a run that was interrupted has those of all its steps.

Shapes: R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from embeddings.collection import EmbeddingLayer
from embeddings.dynamic.dynamic import dynamic_parts
from embeddings.dynamic.idmap import TOTALS
from embeddings.sharding.counters import Counters, Counts
from embeddings.stats import (
    Hits,
    IdWindow,
    dynamic_numbers,
    merge_numbers,
    rank_numbers,
    shard_stats,
)
from models.batch import Batch
from trainer.distributed.parallelize import Parallel
from trainer.runtime.json_lines import append, truncate
from trainer.runtime.runtime import Runtime
from trainer.telemetry.alerts import ADVICE, full_tables


class TableStats:
    """Counts and statistics of one run's tables.

    Attributes:
        counts: Of the latest sampled step, by name; empty before the first.
        numbers: Of the latest evaluation, by table, on rank 0. Counts of dynamic tables are of the
            latest interval.
        own: The same of this rank alone, on each rank.
        first_steps: The first step of each alert, by name.
    """

    def __init__(self, parallel: Parallel, runtime: Runtime, interval_steps: int) -> None:
        layer = parallel.model.get_submodule("embeddings")
        assert isinstance(layer, EmbeddingLayer)
        self.counts: dict[str, int] = {}
        self.numbers: dict[str, dict[str, Any]] = {}
        self.own: dict[str, dict[str, float]] = {}
        self._layer, self._parallel, self._runtime = layer, parallel, runtime
        self._path: Path | None = None
        self._interval = interval_steps
        self._window = IdWindow(layer.schema)
        self._steps = 0
        self._before: Mapping[str, int] = {}
        self._parts = {part.table.name: part.map for part in dynamic_parts(layer)}
        self.first_steps: dict[str, int] = {}
        self._active: set[tuple[str, str]] = set()
        self._counted = {name: [0] * len(TOTALS) for name in self._parts}

    def start(self, path: Path, step: int) -> None:
        """Write to the file `path` from now on, after `step` finished steps."""
        self._path = path
        if self._runtime.is_first:
            # An evaluation at the step that is resumed from will be made again.
            truncate(self._path, step - 1)

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of training, remembering the ids of the latest."""
        for batch in batches:
            self._window.update(batch.sparse)
            yield batch

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run a training step; count it if it is one of the sample. Collective if so.

        Args:
            step: Its number, from 1.
        """
        # TorchRec builds its exchanges in a process's first step, so the second can be counted.
        due = self._steps > 0 and (not self.counts or step % self._interval == 1 % self._interval)
        self._steps += 1
        if not due:
            yield
            return
        with Counters(self._parallel.module) as counts:
            yield
        self._sum(counts)

    def _sum(self, counts: Counts) -> None:
        """Keep the sums over ranks, unless the pipeline had no next batch to exchange ids of."""
        names, numbers = zip(*counts.to_dict().items(), strict=True)
        total = torch.tensor(numbers, device=self._runtime.device)
        dist.all_reduce(total, group=self._runtime.group)
        found = dict(zip(names, total.tolist(), strict=True))
        if found["ids_in"]:
            found = {"features": len(self._layer.schema.sparse), **found}
            self.counts = {f"step_{name}": number for name, number in found.items()}

    def interval(self, step: int) -> list[str]:
        """End an interval with `step`; return the alerts that begin with it. Collective.

        They are of dynamic tables that cannot hold their ids.
        """
        totals, found = self._totals(), {}
        for table, now in totals.items():
            new = [a - b for a, b in zip(now, self._counted[table], strict=True)]
            for name, text in full_tables(table, dict(zip(TOTALS, new, strict=True))).items():
                found[name, table] = f"ALERT {name} at step {step:,}: {text}. {ADVICE[name]}"
        begun = [key for key in found if key not in self._active]
        self._counted, self._active = totals, set(found)
        if self._runtime.is_first:
            self.numbers = _with_totals(self.numbers, totals)
        counted = {name: table.totals.tolist() for name, table in self._parts.items()}
        self.own = _with_totals(self.own, counted)
        for name, _ in begun:
            self.first_steps.setdefault(name, step)
        return [found[key] for key in begun]

    def state_dict(self) -> dict[str, Any]:
        """Return what dynamic tables have counted, and the active alerts. Collective."""
        return {
            "counts": self.counts,
            "totals": self._totals(),
            "interval": self._counted,
            "active": sorted(map(list, self._active)),
            "first_steps": self.first_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`, of any number of ranks; the first one gets what they counted."""
        for name, table in self._parts.items():
            table.totals.zero_()
            if self._runtime.is_first:
                table.totals += torch.tensor(state["totals"][name], device=table.totals.device)
        self.counts = dict(state["counts"])
        self._counted, self.first_steps = dict(state["interval"]), dict(state["first_steps"])
        self._active = {(name, table) for name, table in state["active"]}

    def _totals(self) -> dict[str, list[int]]:
        """Return what the dynamic tables have counted on all ranks, by table."""
        if not self._parts:
            return {}
        total = torch.stack([table.totals for table in self._parts.values()])
        dist.all_reduce(total, group=self._runtime.group)
        return dict(zip(self._parts, total.tolist(), strict=True))

    def out_of_range(self, *counted: Mapping[str, int]) -> dict[str, int]:
        """Return how many ids of each feature of policy `count` were replaced. Collective.

        The numbers add what this rank's loaders have counted since they were built (`counted`) to
        what `restore` was given.
        """
        schema = self._layer.schema
        names = [feature.name for feature in schema.sparse if feature.out_of_range == "count"]
        if not names:
            return {}
        numbers = [sum(counts.get(name, 0) for counts in counted) for name in names]
        total = torch.tensor(numbers, device=self._runtime.device)
        dist.all_reduce(total, group=self._runtime.group)
        return {
            name: number + self._before.get(name, 0)
            for name, number in zip(names, total.tolist(), strict=True)
        }

    def restore(self, out_of_range: Mapping[str, int]) -> None:
        """Go on from what `out_of_range` has returned, on all ranks, to a run that is resumed."""
        self._before = out_of_range

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """Run an evaluation and write a line of statistics after it. Collective."""
        with Hits(self._layer) as hits:
            yield
        states = self._parallel.fused_optimizer.state_dict()["state"]
        shards = shard_stats(self._layer, states)
        self.own = rank_numbers(
            shards, self._window.stats(), hits.numbers(), dynamic_numbers(self._layer)
        )
        ranks: list[Any] | None = [None] * self._runtime.world_size
        ranks = ranks if self._runtime.is_first else None
        dist.gather_object(self.own, ranks, dst=0, group=self._runtime.group)
        if ranks is not None:
            self.numbers = merge_numbers(ranks)
            if self._path is not None:
                append(self._path, {"step": step, "tables": self.numbers})


def _with_totals(
    numbers: Mapping[str, dict[str, Any]], totals: Mapping[str, list[int]]
) -> dict[str, dict[str, Any]]:
    """Return `numbers` with what dynamic tables have counted meanwhile."""
    found = dict(numbers)
    for table, counts in totals.items():
        named = {f"dynamic_{name}": count for name, count in zip(TOTALS, counts, strict=True)}
        found[table] = {**found.get(table, {}), **named}
    return found

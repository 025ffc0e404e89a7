# SPDX-License-Identifier: MIT
"""What coalescing and deduplication save: against one lookup a table, on two ranks over gloo.

    python -m tests.benchmarks.lookups [--shape criteo|industrial] [--kind table_wise|row_wise]
        [--weighted 5]

Forward and backward of tables alone, one thread a rank, ids drawn from a power law (`--skew` is the
exponent). Candidates: `apart`, a layer and so a lookup and its exchanges for every table;
`together`, as the stack does it; `unpooled`, single ids read one vector each (`unpool_ids`);
`dedup`, with ids that travel once as well. With `--weighted` features are bags of so many ids, each
with a weight, and `bare` is `together` without the weights. Counts and bytes are those of a step of
all ranks. Times are ratios inside a round, of the wall's clock, and of the processor time of both
ranks, which other work on the machine disturbs less but which knows no waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer
from embeddings.optimizer import SparseOptimizerConfig, fuse_optimizer
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from embeddings.sharding.counters import Counters
from embeddings.sharding.sharding import ShardingConfig
from tests.benchmarks.timing import MIN_ROUNDS, Times
from tests.support.processes import Processes
from tests.support.tables import shard_tables
from trainer.runtime.runtime import Runtime

FEATURES = {"criteo": 26, "industrial": 391}
CANDIDATES = ("apart", "together", "unpooled", "dedup")
WEIGHTED = ("apart", "bare", "together", "unpooled", "dedup")
_BATCHES = 4


class Layers(nn.Module):
    """Tables in one layer, or in one layer each."""

    def __init__(self, layers: list[EmbeddingLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors (B, P)."""
        return torch.cat([layer(features).pooled for layer in self.layers], dim=1)


def schema_of(num_features: int, rows: int, width: int, weighted: int) -> Schema:
    """Return single ids, or bags of `weighted` ids with weights, with a table each."""
    bag: dict[str, Any] = {}
    if weighted:
        bag = {"kind": "bag", "max_length": weighted, "pooling": "sum", "weights": "weights"}
    names = [f"f{i}" for i in range(num_features)]
    return Schema(
        tables=tuple(Table(name=n, num_embeddings=rows, embedding_dim=width) for n in names),
        sparse=tuple(SparseFeature(name=n, table=n, **bag) for n in names),
        labels=(Label(name="click"),),
    )


def build(runtime: Runtime, name: str, schema: Schema, kind: Any) -> DistributedModelParallel:
    """Return a candidate, sharded."""
    meta, schemas = torch.device("meta"), [schema]
    if name == "apart":
        schemas = [
            Schema(tables=(table,), sparse=(feature,), labels=schema.labels)
            for table, feature in zip(schema.tables, schema.sparse, strict=True)
        ]
    if name == "bare":
        sparse = tuple(dataclasses.replace(feature, weights="") for feature in schema.sparse)
        schemas = [dataclasses.replace(schema, sparse=sparse)]
    layers = [EmbeddingLayer(part, meta, seed=1) for part in schemas]
    if name in ("unpooled", "dedup"):
        tables = [table.name for table in schema.tables]  # of bags, too, which no setting does
        layers = [EmbeddingLayer(schema, meta, seed=1, by_id=tables)]
    model = Layers(layers)
    fuse_optimizer(model, SparseOptimizerConfig())
    config = ShardingConfig(sharding_types=(kind,), dedup=name == "dedup")
    return shard_tables(model, config, runtime)


def batch(schema: Schema, size: int, skew: float, seed: int) -> KeyedJaggedTensor:
    """Return `size` examples whose ids k = 1, 2, ... come with probability k^-skew."""
    rows = schema.tables[0].num_embeddings
    generator = torch.Generator().manual_seed(seed)
    chances = torch.arange(1, rows, dtype=torch.float64).pow(-skew)
    length = max(1, schema.sparse[0].max_length)
    number = size * len(schema.sparse) * length
    ids = torch.multinomial(chances, number, replacement=True, generator=generator) + 1
    return KeyedJaggedTensor(
        keys=[feature.name for feature in schema.sparse],
        values=ids,
        weights=torch.rand(number, generator=generator) if schema.has_weights else None,
        lengths=torch.full((number // length,), length),
    )


def measure(runtime: Runtime, words: dict[str, Any]) -> Any:
    """Return counts of a step and seconds by candidate and round: of the wall, and of processors.

    Ranks take the same steps in the same order; a round takes `steps` of each candidate.
    """
    schema = schema_of(FEATURES[words["shape"]], words["rows"], words["width"], words["weighted"])
    candidates = WEIGHTED if words["weighted"] else CANDIDATES
    models = {name: build(runtime, name, schema, words["kind"]) for name in candidates}
    size, skew = words["batch"], words["skew"]
    batches = [batch(schema, size, skew, 10 * runtime.rank + i) for i in range(_BATCHES)]

    def steps(name: str, number: int) -> None:
        for i in range(number):
            models[name](batches[i % _BATCHES]).square().sum().backward()

    counts = {}
    for name, model in models.items():
        steps(name, 2)
        with Counters(model) as counted:
            steps(name, 1)
        counts[name] = counted.to_dict()
    seconds: list[dict[str, list[float]]] = [{name: [] for name in models} for _ in range(2)]
    for start in range(words["rounds"]):
        turn = start % len(candidates)
        for name in candidates[turn:] + candidates[:turn]:
            dist.barrier(runtime.group)
            wall, processor = time.perf_counter(), time.process_time()
            steps(name, words["steps"])
            dist.barrier(runtime.group)
            spent = time.perf_counter() - wall, time.process_time() - processor
            for kind, value in zip(seconds, spent, strict=True):
                kind[name].append(value / words["steps"])
    return counts, *seconds


def main() -> None:
    """Print a line a candidate."""
    parser = argparse.ArgumentParser(description="Coalesced and deduplicated lookups")
    parser.add_argument("--shape", choices=list(FEATURES), default="criteo")
    parser.add_argument("--kind", choices=["table_wise", "row_wise"], default="table_wise")
    parser.add_argument("--rows", type=int, default=20_000, help="of a table")
    parser.add_argument("--width", type=int, default=16, help="of a table")
    parser.add_argument("--batch", type=int, default=2048, help="examples a rank and step")
    parser.add_argument("--weighted", type=int, default=0, help="ids of a bag, each with a weight")
    parser.add_argument("--skew", type=float, default=1.1, help="exponent of the power law")
    parser.add_argument("--steps", type=int, default=3, help="steps of a candidate in a round")
    parser.add_argument("--rounds", type=int, default=9)
    words = parser.parse_args()
    if words.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: a median needs at least {MIN_ROUNDS}, got {words.rounds}")
    candidates = WEIGHTED if words.weighted else CANDIDATES
    pool = Processes()
    try:
        outcomes = pool.run(measure, vars(words), timeout_seconds=1800.0)
    finally:
        pool.stop()
    walls, spent = (
        Times(
            seconds={
                name: [sum(of) for of in zip(*(one[k][name] for one in outcomes), strict=True)]
                for name in candidates
            }
        )
        for k in (1, 2)
    )
    print(f"{words.shape}, {words.kind}; medians of {words.rounds} rounds (quartiles), a step")
    for name in candidates:
        total = {key: sum(one[0][name][key] for one in outcomes) for key in outcomes[0][0][name]}
        rate = len(outcomes) * words.batch * len(outcomes) / walls.median(name)
        print(
            f"{name:<9} {total['lookups']:>4} lookups {outcomes[0][0][name]['collectives']:>5} "
            f"exchanges {total['ids_in']:>9,} ids {total['ids_sent']:>9,} sent "
            f"{total['bytes_sent'] / 1e6:>8.2f} MB {rate:>9,.0f} rows/s",
            flush=True,
        )
    pairs = [("apart", "together"), ("together", "unpooled"), ("together", "dedup")]
    for over, under in [*pairs, ("together", "bare")][: 4 if words.weighted else 3]:
        print(
            f"time of {over} / {under}: wall {walls.ratio(over, under)}, processors "
            f"{spent.ratio(over, under)}"
        )


if __name__ == "__main__":
    main()

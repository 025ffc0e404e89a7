# SPDX-License-Identifier: MIT
"""What checking a raw log costs: `pipelines.ingest` against Arrow that only reads and writes it.

    python -m tests.benchmarks.ingest [--rows 1000000] [--rounds 7]

One CSV of two days: three string ids, an integer id, four numbers, a time, a label. Ours types,
checks and hashes every column, counts statistics and writes days; Arrow's `read_csv` guesses types
and `write_table` writes one file of the same compression. Both in one thread, CPU time. The figure
is our speed as a share of Arrow's; at least 0.5 is wanted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv
from pyarrow import parquet as pq

from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature, Table
from pipelines.ingest import ingest
from pipelines.ingestion.parsing import pc
from tests.benchmarks.timing import Line, interleave, single_threaded

_STRINGS, _NUMBERS = ("user", "site", "device"), ("price", "age", "views", "score")
_SCHEMA = Schema(
    tables=(Table(name="ids", num_embeddings=1000, embedding_dim=8),),
    sparse=tuple(SparseFeature(name=name, table="ids") for name in (*_STRINGS, "item")),
    dense=tuple(DenseFeature(name=name) for name in _NUMBERS),
    labels=(Label(name="click"),),
    user="user",
    timestamp="time",
)


def write_log(path: Path, rows: int) -> None:
    """Write a CSV of `rows` rows over two days to `path`."""
    draw = np.random.default_rng(0)
    text = {
        name: pa.array(draw.integers(0, size, rows)).cast(pa.string())
        for name, size in zip(_STRINGS, (rows // 10 + 1, 5000, 40), strict=True)
    }
    columns = {
        **{name: pc.binary_join_element_wise(name, text[name], "-") for name in _STRINGS},
        "item": pa.array(draw.integers(0, 1 << 60, rows)),
        **{name: pa.array(draw.lognormal(size=rows).round(4)) for name in _NUMBERS},
        "time": pa.array(1_767_225_600_000 + np.arange(rows) * (2 * 86_400_000 // rows)),
        "click": pa.array(draw.integers(0, 2, rows)),
    }
    csv.write_csv(pa.table(columns), path)


def measure(rows: int, rounds: int) -> Line:
    """Return our share of Arrow's speed on a log of `rows` rows."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log = folder / "log.csv"
        write_log(log, rows)

        def ours() -> None:
            shutil.rmtree(folder / "days", ignore_errors=True)
            summary = ingest([str(log)], _SCHEMA, folder / "days")
            if sum(summary.days.values()) != rows:
                raise RuntimeError(f"expected {rows} rows without a bad one, got {summary}")

        def arrow() -> None:
            pq.write_table(csv.read_csv(log), folder / "plain.parquet", compression="zstd")

        times = interleave({"arrow": arrow, "ours": ours}, rounds=rounds)
    name = f"speed of ingestion as a share of Arrow's, {rows:,} rows"
    return Line(name=name, ratio=times.ratio("arrow", "ours"), bound="at least", target=0.5)


def main() -> int:
    """Measure, print, and return 1 where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ingest", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    single_threaded()
    pa.set_cpu_count(1)
    line = measure(options.rows, options.rounds)
    print(line)
    return 0 if line.met else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""Small raw logs for the tests of ingestion, their schemas, and what became of them."""

import csv
from datetime import UTC, datetime

import numpy as np
import pyarrow.parquet as pq
import xxhash

from embeddings.schema.schema import schema_from_dict
from pipelines.ingestion.ingestion import IngestConfig

SCHEMA = {
    "tables": [
        {"name": name, "num_embeddings": 100, "embedding_dim": 8}
        for name in ("user", "item", "slot", "age")
    ],
    "sparse": [
        {"name": "user", "table": "user"},
        {"name": "item", "table": "item", "side": "item"},
        {"name": "slot", "table": "slot", "transform": "identity"},
        {
            "name": "hist",
            "table": "item",
            "kind": "sequence",
            "max_length": 5,
            "history": "h",
        },
        {
            "name": "age",
            "table": "age",
            "kind": "sequence",
            "max_length": 5,
            "history": "h",
            "transform": "log_square",
        },
    ],
    "dense": [{"name": "price"}],
    "labels": [{"name": "click"}],
    "user": "user",
    "timestamp": "ts",
    "history_actions": {"h": "action"},
}
COLUMNS = ["user", "item", "slot", "hist", "age", "action", "price", "click", "ts"]
NOON = int(datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp() * 1_000)
GOOD = [
    ["7", "shoe", "3", "shoe|hat", "90|5", "1|0", "1.5", "1", NOON],
    ["8", "hat", "0", "", "", "", "", "0", NOON + 1],
    ["9", "", "98", "bag", "70", "3", "-2e3", "0", NOON + 2],
]
BARS = IngestConfig(list_separator="|")


def schema(**changes):
    return schema_from_dict({**SCHEMA, **changes})


def write_csv(path, rows, header=COLUMNS, opener=open, delimiter=","):
    with opener(path, "wt", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([header, *rows] if header else rows)
    return str(path)


def read_day(output, day="2026-01-01"):
    return pq.read_table(output / f"dt={day}", partitioning=None)


def flat_schema(**changes):
    """A schema without lists: user, click and, unless taken away, a timestamp."""
    return schema_from_dict(
        {
            "tables": SCHEMA["tables"][:1],
            "sparse": SCHEMA["sparse"][:1],
            "labels": SCHEMA["labels"],
            "timestamp": "ts",
            **changes,
        }
    )


def xxh(text):
    return np.array([xxhash.xxh64(text.encode()).intdigest()], np.uint64).view(np.int64)[0]

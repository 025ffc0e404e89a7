# SPDX-License-Identifier: MIT
"""Schemas with dynamic tables: read from YAML, planned, and given ids as the log has them."""

from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
import yaml

from embeddings.optimizer import SparseOptimizerConfig
from embeddings.schema.lifetime import MISSING_ID, DynamicConfig
from embeddings.schema.schema import Schema, Table, load_schema, schema_from_dict
from models.batch import Batch
from tests.support.tiny import TinyRanker
from trainer.config.config import TrainConfig
from trainer.data.collate import pad_batch, to_batch
from trainer.data.files import discover
from trainer.data.hashing import to_rows
from trainer.data.loader import LoaderConfig
from trainer.distributed.log_day import Clock
from trainer.plan import plan_config
from trainer.runtime.memory import table_bytes

SCHEMA: dict[str, Any] = {
    "tables": [
        {
            "name": "item",
            "num_embeddings": 64,
            "embedding_dim": 8,
            "dynamic": {"min_occurrences": 2, "eviction": "ttl", "ttl_days": 3},
        },
        {"name": "user", "num_embeddings": 100, "embedding_dim": 8},
    ],
    "sparse": [
        {"name": "item", "table": "item"},
        {"name": "user", "table": "user"},
        {"name": "last", "table": "item", "column": "hist", "position": -1},
        {"name": "hist", "table": "item", "kind": "sequence", "max_length": 2, "history": "h"},
        {"name": "bag", "table": "item", "column": "hist", "kind": "bag", "max_length": 3},
    ],
    "labels": [{"name": "click"}],
}


def schema(**changes: Any) -> Schema:
    return schema_from_dict({**SCHEMA, **changes})


def records(**changes: Any) -> pa.Table:
    columns = {
        "item": pa.array([7, None, -(2**62)]),
        "user": pa.array([7, None, 3]),
        "hist": pa.array([[1, 2, 3], [], [None, 9]], pa.list_(pa.int64())),
        "click": pa.array([1, 0, 1]),
        "ts": pa.array([86_400_000 * 20_000 + 5, 86_400_000 * 20_001, 0]),
    }
    return pa.table(columns | changes)


def values(batch: Batch) -> dict[str, list[int]]:
    return {name: one.values().tolist() for name, one in batch.sparse.to_dict().items()}


def test_dynamic_tables_get_ids_as_they_are_and_nulls_apart() -> None:
    batch = to_batch(records(), schema())
    assert values(batch) == {
        "item": [7, MISSING_ID, -(2**62)],
        "user": to_rows(pa.array([7, None, 3]), 100).tolist(),
        "last": [3, MISSING_ID, 9],
        "hist": [2, 3, MISSING_ID, 9],
        "bag": [1, 2, 3, MISSING_ID, 9],
    }


def test_strings_become_ids_by_xxh64_and_are_not_mixed_again() -> None:
    batch = to_batch(records(item=pa.array(["shoe", "hat", None])), schema())
    hashed = [
        np.uint64(xxhash.xxh64(text.encode()).intdigest()).astype(np.int64)
        for text in ("shoe", "hat")
    ]
    assert values(batch)["item"] == [*map(int, hashed), MISSING_ID]


def test_padding_rows_hold_missing_ids() -> None:
    batch = pad_batch(to_batch(records(), schema()), 5, schema())
    assert values(batch)["item"][3:] == [MISSING_ID] * 2 and values(batch)["user"][3:] == [0, 0]


def test_a_batch_knows_the_day_of_its_middle_row_from_the_timestamp() -> None:
    assert to_batch(records(), schema(timestamp="ts")).day == 20_000
    times = pa.array([date(2026, 1, 1), date(2026, 1, 3), date(2026, 1, 2)]).cast(
        pa.timestamp("us")
    )
    assert to_batch(records(ts=times), schema(timestamp="ts")).day == 20_455
    wrong = pa.array([date(2026, 1, 1), date(2098, 1, 1), date(2026, 1, 1)]).cast(
        pa.timestamp("us")
    )
    assert to_batch(records(ts=wrong), schema(timestamp="ts")).day == 20_454


def test_without_a_timestamp_the_day_is_the_partitions(tmp_path: Path) -> None:
    for day in ("2026-01-01", "2026-01-02"):
        (tmp_path / f"dt={day}").mkdir()
        pq.write_table(records().drop_columns(["ts"]), tmp_path / f"dt={day}" / "a.parquet")
    files = discover(tmp_path, None, schema())
    loader = LoaderConfig(batch_size=3, shuffle_rows=3, num_workers=0).build(files, schema())
    assert sorted(batch.day for batch in loader) == [20_454, 20_455]


def test_a_log_without_any_time_is_refused_by_tables_that_count_days() -> None:
    tiny = TinyRanker().embeddings.schema
    tables = tuple(
        dataclasses.replace(t, num_embeddings=64, dynamic=DynamicConfig(eviction="ttl", ttl_days=1))
        if t.name == "item"
        else t
        for t in tiny.tables
    )

    class OneRank:
        def size(self) -> int:
            return 1

    model = TinyRanker(schema=dataclasses.replace(tiny, tables=tables))
    clock = Clock(model, OneRank(), torch.device("cpu"))  # type: ignore[arg-type]
    batch = to_batch(records(), schema())
    with pytest.raises(ValueError, match=r"\['item'\] have dynamic.ttl_days, and the log has no"):
        clock.set(batch)
    for day in (5, 20_454_000):  # seconds or microseconds taken for milliseconds
        with pytest.raises(ValueError, match=r"schema.timestamp: .* not between 1990 and 2099"):
            clock.set(dataclasses.replace(batch, day=day))
    clock.set(dataclasses.replace(batch, day=20_454))
    assert (
        next(iter(model.embeddings.dynamic.values()))
        .get_submodule("_managed_collision_collection._managed_collision_modules.item")
        .day
        == 20_454
    )  # type: ignore[attr-defined]


def test_a_dynamic_table_is_read_from_yaml_and_wrong_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    path.write_text(yaml.safe_dump(SCHEMA), "utf-8")
    table = load_schema(path).tables[0]
    assert table.dynamic == DynamicConfig(min_occurrences=2, eviction="ttl", ttl_days=3)
    assert schema_from_dict(schema().to_dict()) == schema()
    wrong = {**SCHEMA["tables"][0], "dynamic": {"ttl_day": 3}}
    with pytest.raises(ValueError, match=r"tables\[0\].dynamic.ttl_day: unknown key, did you mean"):
        schema(tables=[wrong, SCHEMA["tables"][1]])
    wrong = {**SCHEMA["tables"][0], "dynamic": {"ttl_days": 3}}
    with pytest.raises(ValueError, match=r"tables\[0\].dynamic: .*has no effect on eviction 'lru'"):
        schema(tables=[wrong, SCHEMA["tables"][1]])


def test_other_transforms_than_hash_are_refused() -> None:
    sparse = [{"name": "item", "table": "item", "transform": "identity"}, SCHEMA["sparse"][1]]
    with pytest.raises(ValueError, match="'item' reads the dynamic table 'item' and needs"):
        schema(sparse=sparse)


def test_a_fixed_tables_fingerprint_is_what_it_was_before_there_were_dynamic_ones() -> None:
    assert "dynamic" not in schema().to_dict()["tables"][1]


def test_plans_and_memory_count_the_map_of_ids() -> None:
    config = TrainConfig(recipe="r", schema=schema(), sparse=SparseOptimizerConfig())
    plan = plan_config(config, 4, 4, "cpu")
    item = next(table for table in plan.tables if table.table == "item")
    assert item.dynamic and item.sharding == "row_wise" and item.ranks == (0, 1, 2, 3)
    assert item.module == "embeddings.dynamic.dim8"
    with pytest.raises(ValueError, match="'item': a dynamic table of 64 rows can be on at most 4"):
        plan_config(config, 8, 8, "cpu")
    fixed = Table(name="item", num_embeddings=64, embedding_dim=8)
    waiting, at_once = schema().tables[0], dataclasses.replace(fixed, dynamic=DynamicConfig())
    sizes = [table_bytes(table, config.sparse) for table in (fixed, at_once, waiting)]
    assert sizes == [64 * 36, 64 * 56, 64 * 76]

# SPDX-License-Identifier: MIT
"""Raw logs whose lists of ids have weights: typed, checked, and bad rows set aside."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import schema
from pipelines.ingest import ingest
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.nightly.drift import DayStatistics
from tests.support.raw_logs import BARS, NOON, flat_schema, read_day, write_csv
from trainer.data.collate import to_batch
from trainer.data.columns import check_columns

SCHEMA = flat_schema(
    tables=[{"name": name, "num_embeddings": 100, "embedding_dim": 8} for name in ("user", "tag")],
    sparse=[
        {"name": "user", "table": "user"},
        {"name": "tags", "table": "tag", "kind": "bag", "max_length": 5, "weights": "scores"},
    ],
)
COLUMNS = ["user", "tags", "scores", "click", "ts"]


def test_weights_in_text_become_lists_of_float32_that_a_batch_takes(tmp_path):
    rows = [["1", "a|b", "0.5|-2"], ["2", "", ""], ["3", "c", "1e-3"]]
    rows = [[*row, "1", NOON] for row in rows]
    ingest([write_csv(tmp_path / "log.csv", rows, COLUMNS)], SCHEMA, tmp_path / "out", BARS)
    table = read_day(tmp_path / "out")
    assert table.schema.field("scores").type == pa.list_(pa.float32())
    assert table["scores"].to_pylist() == [[0.5, -2.0], [], [pytest.approx(1e-3)]]
    (written,) = (tmp_path / "out").glob("dt=*/_statistics.json")
    check_columns(table.schema, SCHEMA, "the output")
    statistics = DayStatistics(log=tmp_path / "out", schema=SCHEMA, cache=tmp_path / "cache")
    for columns in (statistics.read("2026-01-01"), json.loads(written.read_text("utf-8"))):
        assert columns["columns"]["scores"]["mean"] == pytest.approx((0.5 - 2 + 1e-3) / 3)
    weights = to_batch(table, SCHEMA).sparse["tags"].weights()
    assert weights.tolist() == [0.25, -1.0, pytest.approx(1e-3)]


def test_rows_whose_weights_are_too_few_missing_or_not_finite_are_set_aside(tmp_path):
    good, nan, inf = [0.5, 1.0], float("nan"), float("inf")
    scores = [good, [0.5], [0.5, None], [nan, 1.0], [inf, 1.0], [1e39, 1.0], None, good]
    tags = [["a", "b"]] * 7 + [None]
    table = pa.table(
        {
            "user": list(range(8)),
            "tags": pa.array(tags, pa.list_(pa.string())),
            "scores": pa.array(scores, pa.list_(pa.float64())),
            "click": [0] * 8,
            "ts": [NOON] * 8,
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    config = IngestConfig(max_bad_share=1.0)
    summary = ingest([str(tmp_path / "log.parquet")], SCHEMA, tmp_path / "out", config)
    assert read_day(tmp_path / "out")["user"].to_pylist() == [0]
    with summary.quarantine.open(newline="") as file:
        found = {int(row["row"]): (row["column"], row["reason"]) for row in csv.DictReader(file)}
    length = "weights of 'tags': another length than column 'tags'"
    reasons = [length, "missing a number", "missing a number", "not a finite number"]
    reasons += ["not a finite number", length, length]
    assert [reason for _, reason in found.values()] == reasons
    assert {column for column, _ in found.values()} == {"scores"}


def test_a_proposed_schema_says_whose_weights_a_list_of_numbers_may_be(tmp_path, capsys):
    sizes = [i % 4 for i in range(400)]
    columns = {
        "user_id": [i % 90 for i in range(400)],
        "tags": [[f"t{(i * k) % 40}" for k in range(n)] for i, n in enumerate(sizes)],
        "scores": [[0.37 * i + k for k in range(n)] for i, n in enumerate(sizes)],
        "prices": [[9.5 * i + k for k in range(n + 1)] for i, n in enumerate(sizes)],
        "click": [int(i % 3 == 0) for i in range(400)],
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    assert schema.main([str(tmp_path / "log.parquet")]) == 0
    text = capsys.readouterr().out
    (scores,) = [line for line in text.splitlines() if "name: scores, table" in line]
    (prices,) = [line for line in text.splitlines() if "name: prices, table" in line]
    assert "if these weigh tags, write `weights: scores` there" in scores
    assert "weigh" not in prices


def test_a_column_of_weights_that_is_no_list_is_refused_before_a_row_is_read(tmp_path):
    table = pa.table({"user": [1], "tags": [[1]], "scores": [0.5], "click": [0], "ts": [NOON]})
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=r"column 'scores': expected a list, got double"):
        ingest([str(tmp_path / "log.parquet")], SCHEMA, tmp_path / "out")

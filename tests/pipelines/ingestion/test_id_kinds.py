# SPDX-License-Identifier: MIT
"""Which columns are strings and which integers: decided once, kept from day to day."""

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipelines.ingest import ingest
from pipelines.ingestion.ingestion import IngestConfig
from tests.support.raw_logs import (
    NOON,
    flat_schema,
    read_day,
    write_csv,
    xxh,
)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("click", pa.array([["a"]]), "column 'click': expected a single value a row, got list"),
        ("user", pa.array([{"a": 1}]), r"column 'user': expected an id .*, got struct"),
        ("ts", pa.array([b"x"]).cast(pa.binary()), None),
    ],
)
def test_a_parquet_column_of_a_wrong_type_is_named(tmp_path, column, values, message):
    columns = {"user": pa.array([1]), "ts": pa.array([NOON]), "click": pa.array([1])}
    pq.write_table(pa.table({**columns, column: values}), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=message or "1 of 1 rows are bad"):
        ingest([str(tmp_path)], flat_schema(), tmp_path / "out")


def test_an_id_column_keeps_its_kind_from_day_to_day(tmp_path):
    head = ["user", "ts", "click"]
    day = 86_400_000
    numbers = write_csv(tmp_path / "a.csv", [[5, NOON, 1]], header=head)
    words = write_csv(tmp_path / "b.csv", [["five", NOON + day, 1]], header=head)
    text = pa.table({"user": ["5"], "ts": [NOON + day], "click": [1]})
    pq.write_table(text, tmp_path / "c.parquet")
    ingest([numbers], flat_schema(), tmp_path / "out")
    with pytest.raises(ValueError, match="user: not an integer"):
        ingest([words], flat_schema(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"c.parquet: column 'user': expected int, as in the days"):
        ingest([str(tmp_path / "c.parquet")], flat_schema(), tmp_path / "out")
    with pytest.raises(ValueError, match="choose another output"):
        config = IngestConfig(kinds={"user": "string"})
        ingest([words], flat_schema(), tmp_path / "out", config)
    config = IngestConfig(kinds={"user": "int"})
    ingest([str(tmp_path / "c.parquet")], flat_schema(), tmp_path / "out", config)
    assert read_day(tmp_path / "out", "2026-01-02").column("user").to_pylist() == [5]
    ingest([numbers], flat_schema(), tmp_path / "hashed", IngestConfig(kinds={"user": "string"}))
    assert read_day(tmp_path / "hashed").column("user").to_pylist() == [xxh("5")]


def test_a_postal_code_with_a_leading_zero_makes_its_column_strings(tmp_path):
    rows = [["1234", NOON, 1], ["01234", NOON, 1]]
    path = write_csv(tmp_path / "log.csv", rows, header=["user", "ts", "click"])
    assert ingest([path], flat_schema(), tmp_path / "out").kinds == {"user": "string"}
    assert len(set(read_day(tmp_path / "out").column("user").to_pylist())) == 2


def test_extra_columns_can_be_kept_and_settings_without_effect_are_errors(tmp_path):
    head = ["user", "ts", "click", "session"]
    path = write_csv(tmp_path / "log.csv", [[1, NOON, 1, "s-1"]], header=head)
    ingest([path], flat_schema(), tmp_path / "out", IngestConfig(keep=("session",)))
    assert read_day(tmp_path / "out").column("session").to_pylist() == ["s-1"]
    for config in (
        IngestConfig(keep=("user",)),
        IngestConfig(kinds={"click": "int"}),
        IngestConfig(kinds={"nobody": "int"}),
    ):
        with pytest.raises(ValueError, match="has no effect"):
            ingest([path], flat_schema(), tmp_path / "out", config)
    with pytest.raises(ValueError, match="expected one of"):
        IngestConfig(on_bad_row="ignore")

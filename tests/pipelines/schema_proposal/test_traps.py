# SPDX-License-Identifier: MIT
"""Columns that look like something else than they are: ids as counts, markers as labels."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.schema.schema import load_schema
from pipelines.ingest import describe, ingest
from pipelines.schema import main
from tests.support.raw_logs import NOON, flat_schema

ROWS = 4_000


@pytest.fixture
def propose(tmp_path):
    """Return a function that proposes a schema for columns; it returns schema and text."""

    def run(columns, *arguments):
        rng = np.random.default_rng(0)
        base = {"click": rng.integers(0, 2, ROWS), "item_id": rng.integers(0, 500, ROWS)}
        pq.write_table(pa.table({**base, **columns}), tmp_path / "a.parquet")
        path = tmp_path / "s.yaml"
        assert main([str(tmp_path / "a.parquet"), "--output", str(path), *arguments]) == 0
        text = path.read_text("utf-8")
        path.unlink()
        (tmp_path / "kept.yaml").write_text(text)
        return load_schema(tmp_path / "kept.yaml"), text

    return run


def skewed(largest, seed=0):
    """Return whole numbers that thin out towards `largest`, as the ids of apps do and counts do."""
    draws = np.random.default_rng(seed).exponential(largest / 12, ROWS)
    return np.minimum(draws.astype(np.int64), largest)


@pytest.mark.parametrize("name", ["app", "os", "device", "channel", "site_category", "deviceModel"])
@pytest.mark.parametrize("largest", [60, 700, 4_000])
def test_small_numbers_that_name_things_are_ids(propose, name, largest):
    schema, _ = propose({name: skewed(largest)})
    (feature,) = (one for one in schema.sparse if one.column == name)
    assert feature.transform == "hash"
    assert not schema.dense


@pytest.mark.parametrize("name", ["app_count", "item_views", "channel_score", "clicks_7d"])
def test_counts_of_things_are_numbers(propose, name):
    schema, _ = propose({name: skewed(700)})
    assert [one.column for one in schema.dense] == [name]


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("is_train", np.arange(ROWS) % 2, "marks rows of training and test"),
        ("split", ["train", "valid", "test", "train"] * (ROWS // 4), "marks rows of training"),
        ("fold_id", np.arange(ROWS) % 5, "marks rows of training and test"),
        ("propensity_score", np.linspace(0.01, 0.9, ROWS), "a propensity: .*label's weight"),
        ("pscore", np.linspace(0.01, 0.9, ROWS), "a propensity"),
        ("logging_policy", ["random", "bts"] * (ROWS // 2), "the name of a policy"),
    ],
)
def test_markers_and_what_belongs_to_the_logging_policy_are_left_out(propose, name, values, reason):
    import re

    schema, text = propose({name: values})
    assert not any(one.column == name for one in (*schema.sparse, *schema.dense))
    assert re.search(rf"#   {name}: (it )?{reason}", text)


def test_a_marker_is_no_label(tmp_path, capsys):
    table = {"is_train": np.arange(ROWS) % 2, "x": np.arange(ROWS) % 7, "seen": [0, 1] * 2_000}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert main([str(tmp_path / "a.parquet")]) == 0
    assert "- {name: seen}  # GUESS: the first column of 0 and 1 (seen)" in capsys.readouterr().out


def test_a_log_of_hundreds_of_days_is_doubted(propose, tmp_path):
    seconds = 1_600_000_000 + np.linspace(0, 980 * 86_400, ROWS).astype(np.int64)
    _, text = propose({"ts": seconds * 1_000})
    assert "GUESS: 980 days if it is in ms" in text
    _, text = propose({"ts": 1_600_000_000_000 + np.arange(ROWS)})
    assert "days if it is" not in text
    days = NOON + 86_400_000 * np.arange(450)
    table = pa.table({"user": np.arange(450), "ts": days, "click": np.arange(450) % 2})
    pq.write_table(table, tmp_path / "b.parquet")
    summary = ingest([str(tmp_path / "b.parquet")], flat_schema(), tmp_path / "out")
    assert "note: 450 days from 2026-01-01 to 2027-" in describe(summary)


def test_tables_of_names_that_differ_in_signs_alone_are_told_apart(propose):
    rng = np.random.default_rng(1)
    columns = {name: rng.integers(0, 90, ROWS) for name in ("a.id", "a_id", "a-id")}
    schema, _ = propose(columns)
    tables = {one.column: one.table for one in schema.sparse if one.column in columns}
    assert len(set(tables.values())) == 3


@pytest.mark.parametrize("width", [0, 2])
def test_decimals_that_are_ids_are_left_out_with_the_way_out(propose, width):
    ids = [Decimal(2**60 + i % 40) for i in range(ROWS)]
    schema, text = propose({"user_id": pa.array(ids, pa.decimal128(38, width))})
    assert not any(one.column == "user_id" for one in schema.sparse)
    assert "user_id: ids as decimals" in text and "pipelines.ingest" in text
    price = [Decimal(i % 400) / 4 for i in range(ROWS)]
    schema, _ = propose({"price": pa.array(price, pa.decimal128(10, 2))})
    assert [one.column for one in schema.dense] == ["price"]


@pytest.mark.parametrize(("text", "cut"), [("[1, 2, 3]", ","), ("a|b|c", "|")])
def test_lists_as_text_in_parquet_are_said(propose, text, cut):
    _, said = propose({"tags": [text] * (ROWS // 2) + [text[:-1] + "4" + text[-1]] * (ROWS // 2)})
    assert (
        f"lists as text, each read as ONE id; `python -m pipelines.ingest --list-separator '{cut}'"[
            :60
        ]
        in said
    )


@pytest.mark.parametrize(("delimiter", "said"), [(";", ";"), ("\t", "tab"), ("|", "|")])
def test_a_file_with_another_delimiter_is_told_with_the_way_out(tmp_path, capsys, delimiter, said):
    lines = [delimiter.join(["click", "item"])]
    lines += [delimiter.join([str(i % 2), f"i{i % 9}"]) for i in range(200)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    assert main([str(tmp_path / "a.csv")]) == 2
    assert f"say --delimiter '{said}'" in capsys.readouterr().err
    assert main([str(tmp_path / "a.csv"), "--delimiter", said]) == 0
    assert "{name: click}" in capsys.readouterr().out

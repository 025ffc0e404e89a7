# SPDX-License-Identifier: MIT
from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.experiments import user_totals
from pipelines.experiments.user_totals import Columns, Metric, read_totals

METRICS = (
    Metric.parse("ctr=click/rows"),
    Metric.parse("cvr=day/click"),
    Metric.parse("n=day/users"),
)


def _write(folder, seed=0, rows=5_000, days=("2026-01-01", "2026-01-02")):
    generator = np.random.default_rng(seed)
    parts = []
    for day in days:
        table = pa.table(
            {
                "user": pa.array(
                    generator.integers(0, 300, rows), mask=generator.random(rows) < 0.1
                ),
                "arm": pa.array(
                    np.array(["A", "B"])[generator.integers(0, 2, rows)],
                    mask=generator.random(rows) < 0.1,
                ),
                "click": pa.array(generator.random(rows) < 0.3, mask=generator.random(rows) < 0.2),
                "day": pa.array(generator.integers(0, 5, rows), pa.int32()),
            }
        )
        (folder / f"dt={day}").mkdir(parents=True)
        pq.write_table(table, folder / f"dt={day}" / "a.parquet", row_group_size=700)
        parts.append(table)
    return pa.concat_tables(parts)


@pytest.mark.parametrize("merge", [50, 10**6])
def test_totals_are_the_sums_by_user_and_arm(tmp_path, monkeypatch, merge):
    monkeypatch.setattr(user_totals, "_MERGE_ROWS", merge)
    monkeypatch.setattr(user_totals, "_BATCH_ROWS", 300)
    log = _write(tmp_path).to_pandas()
    totals = read_totals([tmp_path], Columns(user="user"), METRICS)
    users, arms, sums = totals.until()
    kept = log[log.user.notna() & log.arm.notna()]
    rows = kept.click.notna().groupby([kept.user, kept.arm]).sum()
    clicks = kept.click.fillna(False).astype(int).groupby([kept.user, kept.arm]).sum()
    amounts = kept.day.groupby([kept.user, kept.arm]).sum()
    assert totals.sums == ("click", "rows:click", "day")
    found = {
        (user, arm): tuple(row)
        for user, arm, row in zip(users.to_pylist(), arms.to_pylist(), sums.tolist(), strict=True)
    }
    assert found == {
        (int(user), arm): (clicks[user, arm], rows[user, arm], amounts[user, arm])
        for user, arm in clicks.index
    }
    assert totals.rows == len(log)
    assert totals.left_out == {
        "no user": int(log.user.isna().sum()),
        "no arm": int((log.user.notna() & log.arm.isna()).sum()),
    }


def test_days_are_kept_apart_only_when_asked(tmp_path):
    _write(tmp_path)
    totals = read_totals([tmp_path], Columns(user="user", by_day=True), METRICS)
    assert totals.days == ["2026-01-01", "2026-01-02"]
    first = read_totals([tmp_path / "dt=2026-01-01"], Columns(user="user"), METRICS)
    for one, other in zip(totals.until("2026-01-01"), first.until(), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_text_users_of_all_encodings_are_the_same(tmp_path):
    texts = pa.array(["a", "b", "a", None])
    clicks = pa.array([1, 0, 1, 1])
    for number, users in enumerate(
        (texts, texts.dictionary_encode(), texts.cast(pa.large_string()))
    ):
        pq.write_table(pa.table({"u": users, "click": clicks}), tmp_path / f"{number}.parquet")
    totals = read_totals([tmp_path], Columns(user="u", arm=""), METRICS[:1])
    users, _, sums = totals.until()
    assert users.to_pylist() == ["a", "b"] and sums.tolist() == [[6, 6], [0, 3]]
    assert totals.left_out == {"no user": 3}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1], "click": [float("nan")]}, "finite"),
        ({"user": [1], "click": ["yes"]}, "expected numbers or booleans, got string"),
        ({"user": [1.5], "click": [1]}, "expected users as integers or text, got double"),
        ({"user": [1]}, "no column 'click'"),
    ],
)
def test_bad_columns_are_named_with_their_file(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=message) as caught:
        read_totals([tmp_path], Columns(user="user", arm=""), METRICS[:1])
    assert "log.parquet" in str(caught.value)


def test_users_of_two_types_are_refused(tmp_path):
    for number, users in enumerate(([1, 2], ["1", "2"])):
        pq.write_table(pa.table({"user": users, "click": [1, 0]}), tmp_path / f"{number}.parquet")
    with pytest.raises(ValueError, match="text in some files and integers in others"):
        read_totals([tmp_path], Columns(user="user", arm=""), METRICS[:1])


def test_folders_that_hold_something_else_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no Parquet file"):
        read_totals([tmp_path], Columns(user="user"), METRICS)
    (tmp_path / "day.csv").write_text("a\n")
    with pytest.raises(ValueError, match=r"day\.csv: expected Parquet files alone"):
        read_totals([tmp_path], Columns(user="user"), METRICS)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(ValueError, match="not readable as Parquet"):
        read_totals([tmp_path / "broken.parquet"], Columns(user="user"), METRICS)
    _write(tmp_path / "log", days=("2026-01-01",))
    (tmp_path / "log" / "dt=2026-01-01").rename(tmp_path / "log" / "first")
    with pytest.raises(ValueError, match="need folders dt="):
        read_totals([tmp_path / "log"], Columns(user="user", by_day=True), METRICS)


@pytest.mark.parametrize("text", ["ctr", "ctr=click", "=a/b", "a=/rows", "x=rows/click", "x=a/"])
def test_metrics_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match="expected NAME=COLUMN/COLUMN"):
        Metric.parse(text)

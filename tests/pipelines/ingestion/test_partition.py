# SPDX-License-Identifier: MIT
"""Days on disk: exact, complete or absent, in order, in bounded memory."""

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipelines.ingest import ingest
from pipelines.ingestion import partition
from pipelines.ingestion.casting import Times
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.partition import PartitionConfig, Partitions, read_manifests
from pipelines.ingestion.source import SourceConfig
from tests.support.raw_logs import (
    BARS,
    GOOD,
    NOON,
    flat_schema,
    read_day,
    schema,
    write_csv,
)


def test_days_split_exactly_at_utc_midnight_and_keep_their_order(tmp_path):
    midnight = int(datetime(2026, 1, 2, tzinfo=UTC).timestamp() * 1_000)
    times = [midnight - 1, midnight, midnight + 1, midnight - 2, midnight + 86_399_999]
    times += [midnight + 86_400_000, midnight - 1]
    rows = [[i, ts, 1] for i, ts in enumerate(times)]
    path = write_csv(tmp_path / "log.csv", rows, header=["user", "ts", "click"])
    summary = ingest([path], flat_schema(), tmp_path / "out")
    assert summary.days == {"2026-01-01": 3, "2026-01-02": 3, "2026-01-03": 1}
    users = [read_day(tmp_path / "out", day).column("user").to_pylist() for day in summary.days]
    assert users == [[0, 3, 6], [1, 2, 4], [5]]


def test_times_that_are_integers_can_follow_a_pattern(tmp_path):
    raw = pa.table({"user": [1, 2], "ts": pa.array([26010112, 26010200]), "click": [0, 1]})
    pq.write_table(raw, tmp_path / "log.parquet")
    config = IngestConfig(times=Times(pattern="%y%m%d%H"))
    ingest([str(tmp_path / "log.parquet")], flat_schema(), tmp_path / "out", config)
    assert read_day(tmp_path / "out").column("ts").to_pylist() == [NOON]
    assert read_day(tmp_path / "out", "2026-01-02").num_rows == 1


def test_the_day_of_a_log_without_timestamp_comes_from_its_path_or_is_asked_for(tmp_path):
    folder = tmp_path / "raw" / "dt=2026-02-03"
    folder.mkdir(parents=True)
    write_csv(folder / "log.csv", [[1, 0]], header=["user", "click"])
    lone = write_csv(tmp_path / "lone.csv", [[1, 0]], header=["user", "click"])
    timeless = flat_schema(timestamp="")
    assert list(ingest([str(tmp_path / "raw")], timeless, tmp_path / "a").days) == ["2026-02-03"]
    with pytest.raises(ValueError, match=r"lone.csv: its day is unknown.*say --day"):
        ingest([lone], timeless, tmp_path / "b")
    days = ingest([lone], timeless, tmp_path / "b", IngestConfig(day="2026-02-04")).days
    assert list(days) == ["2026-02-04"]
    with pytest.raises(ValueError, match="day: has no effect"):
        ingest([lone], flat_schema(), tmp_path / "c", IngestConfig(day="2026-02-04"))


def test_a_day_that_exists_is_refused_and_replaced_only_when_asked(tmp_path):
    path = write_csv(tmp_path / "log.csv", GOOD)
    out = tmp_path / "out"
    ingest([path], schema(), out, BARS)
    first = (out / "dt=2026-01-01" / "part-00000.parquet").read_bytes()
    with pytest.raises(ValueError, match=r"dt=2026-01-01 already exists \(complete\)"):
        ingest([path], schema(), out, BARS)
    assert (out / "dt=2026-01-01" / "part-00000.parquet").read_bytes() == first
    again = IngestConfig(list_separator="|", partition=PartitionConfig(overwrite=True))
    ingest([path], schema(), out, again)
    assert (out / "dt=2026-01-01" / "part-00000.parquet").read_bytes() == first
    path = write_csv(tmp_path / "log.csv", GOOD[:1])
    ingest([path], schema(), out, again)
    assert read_day(out).num_rows == 1
    left = {found.name for found in out.iterdir()}
    assert left == {"dt=2026-01-01", ".lock"}


def test_the_manifest_is_written_last_so_a_killed_run_leaves_no_complete_day(tmp_path, monkeypatch):
    path, out = write_csv(tmp_path / "log.csv", GOOD), tmp_path / "out"
    written = partition.write_json

    def die_at_manifest(target, values):
        if target.name == partition.MANIFEST:
            assert (target.parent / "part-00000.parquet").exists()
            raise KeyboardInterrupt
        written(target, values)

    monkeypatch.setattr(partition, "write_json", die_at_manifest)
    with pytest.raises(KeyboardInterrupt):
        ingest([path], schema(), out, BARS)
    assert read_manifests(out) == {}
    monkeypatch.undo()
    with pytest.raises(ValueError, match="without a manifest, so from an interrupted run"):
        ingest([path], schema(), out, BARS)
    again = IngestConfig(list_separator="|", partition=PartitionConfig(overwrite=True))
    ingest([path], schema(), out, again)
    manifest = read_manifests(out)["2026-01-01"]
    assert manifest["schema"] == schema().fingerprint()
    assert (manifest["rows"], manifest["files"]) == (3, ["part-00000.parquet"])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_day_comes_back_if_the_run_that_replaces_it_dies(tmp_path, monkeypatch, is_killed):
    path, out = write_csv(tmp_path / "log.csv", GOOD), tmp_path / "out"
    ingest([path], schema(), out, BARS)
    write_csv(tmp_path / "log.csv", GOOD[:1])
    again = IngestConfig(list_separator="|", partition=PartitionConfig(overwrite=True))
    written = partition.write_json

    def die_at_manifest(target, values):
        if target.name == partition.MANIFEST:
            raise KeyboardInterrupt
        written(target, values)

    with monkeypatch.context() as patch:
        patch.setattr(partition, "write_json", die_at_manifest)
        if is_killed:  # nothing is tidied up, only the lock goes with the process
            patch.setattr(Partitions, "__exit__", lambda self, *_: self._locks[0].close())
        with pytest.raises(KeyboardInterrupt):
            ingest([path], schema(), out, again)
    if is_killed:
        assert read_manifests(out) == {}
        with PartitionConfig().build(out):
            pass
    assert read_manifests(out)["2026-01-01"]["rows"] == read_day(out).num_rows == 3
    ingest([path], schema(), out, again)
    assert read_manifests(out)["2026-01-01"]["rows"] == read_day(out).num_rows == 1


def test_two_writers_of_one_folder_are_told_apart(tmp_path):
    path = write_csv(tmp_path / "log.csv", GOOD)
    with (
        PartitionConfig().build(tmp_path / "out"),
        pytest.raises(RuntimeError, match="another process is writing"),
    ):
        ingest([path], schema(), tmp_path / "out", BARS)
    ingest([path], schema(), tmp_path / "out", BARS)


def test_row_groups_are_moderate_and_a_day_can_have_several_files(tmp_path):
    raw = pa.table({"user": np.arange(1_000), "ts": [NOON] * 1_000, "click": [0] * 1_000})
    pq.write_table(raw, tmp_path / "log.parquet")
    config = IngestConfig(
        partition=PartitionConfig(row_group_rows=64, rows_per_file=256),
        source=SourceConfig(batch_rows=100),
    )
    ingest([str(tmp_path / "log.parquet")], flat_schema(), tmp_path / "out", config)
    files = sorted((tmp_path / "out" / "dt=2026-01-01").glob("part-*"))
    groups = []
    for file in files:
        metadata = pq.read_metadata(file)
        groups.append([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
    assert groups == [[64] * 4] * 3 + [[64, 64, 64, 40]]
    users = [pq.read_table(file, partitioning=None).column("user").to_pylist() for file in files]
    assert np.concatenate(users).tolist() == list(range(1_000))


def test_many_interleaved_days_stay_in_order_with_few_files_and_rows_in_memory(tmp_path):
    rows = 3_000
    times = NOON + (np.arange(rows) % 50) * 86_400_000
    raw = pa.table({"user": np.arange(rows), "ts": times, "click": np.zeros(rows, int)})
    pq.write_table(raw, tmp_path / "log.parquet")
    config = IngestConfig(
        partition=PartitionConfig(row_group_rows=40, buffered_rows=300, open_files=7),
        source=SourceConfig(batch_rows=500),
    )
    days = ingest([str(tmp_path / "log.parquet")], flat_schema(), tmp_path / "out", config).days
    assert list(days.values()) == [60] * 50
    for i, day in enumerate(days):
        assert read_day(tmp_path / "out", day).column("user").to_pylist() == list(
            range(i, rows, 50)
        )


def test_the_file_that_was_opened_first_is_finished_first(tmp_path):
    config = PartitionConfig(row_group_rows=1, open_files=2)
    with config.build(tmp_path / "out") as partitions:
        for day in "ABCABA":
            partitions.append(f"2026-01-0{1 + 'ABC'.index(day)}", pa.table({"user": [1]}))
        partitions.commit({}, {})
    files = [len(day["files"]) for day in read_manifests(tmp_path / "out").values()]
    assert files == [2, 2, 1], "the last B ends C's file, not the one that A has just opened"


def test_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    held = []
    append = Partitions.append

    def watch(self, day, table):
        append(self, day, table)
        held.append(pa.total_allocated_bytes())

    monkeypatch.setattr(Partitions, "append", watch)
    config = IngestConfig(
        partition=PartitionConfig(row_group_rows=1_000),
        source=SourceConfig(block_bytes=1 << 16, batch_rows=2_000),
    )
    peaks = {}
    for rows in (20_000, 400_000):
        raw = pa.table({"user": np.arange(rows), "ts": [NOON] * rows, "click": [1] * rows})
        pa.csv.write_csv(raw, tmp_path / f"{rows}.csv")
        pq.write_table(raw, tmp_path / f"{rows}.parquet", row_group_size=10_000)
        for kind in ("csv", "parquet"):
            held.clear()
            log, out = tmp_path / f"{rows}.{kind}", tmp_path / f"{rows}{kind}"
            ingest([str(log)], flat_schema(), out, config)
            peaks[kind, rows] = max(held) - held[0]
            assert len(held) >= rows / 6_000
    for kind in ("csv", "parquet"):
        assert peaks[kind, 400_000] < 2 * peaks[kind, 20_000] + (2 << 20), peaks


def test_statistics_per_column_and_day_and_drift_against_the_day_before(tmp_path):
    rng = np.random.default_rng(0)
    rows, day = 20_000, 86_400_000
    for number in (0, 1):
        raw = pa.table(
            {
                "user": rng.integers(0, 5_000, rows),
                "price": pa.array(rng.normal(number, 1.0, rows), mask=rng.random(rows) < 0.2),
                "ts": np.full(rows, NOON + number * day),
                "click": (rng.random(rows) < 0.3).astype(int),
            }
        )
        pq.write_table(raw, tmp_path / f"{number}.parquet")
        log = str(tmp_path / f"{number}.parquet")
        summary = ingest([log], flat_schema(dense=[{"name": "price"}]), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "dt=2026-01-02" / "_statistics.json").read_text())
    columns = found["columns"]
    assert columns["user"]["count"] == rows and "mean" not in columns["user"]
    distinct = len(set(raw.column("user").to_pylist()))
    assert columns["user"]["cardinality"] == pytest.approx(distinct, rel=0.12)
    assert columns["click"]["cardinality"] == 2
    assert columns["click"]["mean"] == pytest.approx(np.mean(raw.column("click")))
    assert columns["price"]["nulls"] == raw.column("price").null_count
    assert found["drift"]["price"]["mean"] == pytest.approx(1.0, abs=0.1)
    assert summary.drifts and "2026-01-02 price: mean +" in summary.drifts[0]


def test_a_day_of_few_rows_is_no_measure_of_drift(tmp_path):
    # Two prices that are nearly equal: by their deviation, the day after is far away.
    prices = np.concatenate([[0.6, 0.601], np.random.default_rng(0).uniform(0, 1, 500)])
    days = [NOON] * 2 + [NOON + 86_400_000] * 500
    columns = {"user": np.arange(502), "price": prices, "ts": days}
    pq.write_table(pa.table({**columns, "click": np.arange(502) % 2}), tmp_path / "a.parquet")
    schema = flat_schema(dense=[{"name": "price"}])
    summary = ingest([str(tmp_path / "a.parquet")], schema, tmp_path / "out")
    assert not summary.drifts

# SPDX-License-Identifier: MIT
"""Raw logs in, typed days out: ids, bad rows, days, refusals, bounded memory."""

import csv
import gzip
import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema import schema_from_dict
from pipelines import partition
from pipelines.casting import Times
from pipelines.ingest import describe, ingest, main
from pipelines.ingestion import IngestConfig
from pipelines.parsing import parse_floats, parse_integers, parse_times
from pipelines.partition import PartitionConfig, Partitions, read_manifests
from pipelines.sources import SourceConfig
from trainer.data.columns import check_columns

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


def test_csv_strings_become_xxh64_integers_stay_and_lists_become_lists(tmp_path):
    path = write_csv(tmp_path / "log.csv", GOOD)
    summary = ingest([path], schema(), tmp_path / "out", BARS)
    table = read_day(tmp_path / "out")
    shoe, hat, bag = (xxh(text) for text in ("shoe", "hat", "bag"))
    assert table.to_pydict() == {
        "user": [7, 8, 9],
        "item": [shoe, hat, None],
        "slot": [3, 0, 98],
        "hist": [[shoe, hat], [], [bag]],
        "age": [[90, 5], [], [70]],
        "price": [1.5, None, -2000.0],
        "action": [[1, 0], [], [3]],
        "click": [1, 0, 0],
        "ts": [NOON, NOON + 1, NOON + 2],
    }
    types = {field.name: field.type for field in table.schema}
    assert types["price"] == pa.float32() and types["click"] == pa.int8()
    assert types["hist"] == types["age"] == types["action"] == pa.list_(pa.int64())
    assert all(types[name] == pa.int64() for name in ("user", "item", "slot", "ts"))
    assert (summary.rows_in, summary.rows_bad, summary.quarantine) == (3, 0, None)
    check_columns(table.schema, schema(), "the output")


def test_every_container_of_the_same_log_gives_the_same_rows(tmp_path):
    path = write_csv(tmp_path / "a.csv", GOOD)
    write_csv(tmp_path / "b.csv.gz", GOOD, opener=gzip.open)
    write_csv(tmp_path / "c.tsv", GOOD, delimiter="\t")
    write_csv(tmp_path / "d.csv", GOOD, header=None)
    ingest([path], schema(), tmp_path / "a", BARS)
    expected = read_day(tmp_path / "a")
    lists = {
        "hist": pa.array([["shoe", "hat"], None, ["bag"]], pa.large_list(pa.string())),
        "age": pa.array([[90, 5], [], [70]], pa.list_(pa.int32())),
        "action": pa.array([[1, 0], [], [3]], pa.list_(pa.int8())),
    }
    text = pa.array(["shoe", "hat", None])
    raw = pa.table(
        {
            "extra": ["x"] * 3,
            "user": pa.array([7, 8, 9], pa.uint32()),
            "item": text.dictionary_encode(),
            "slot": pa.array([3.0, 0.0, 98.0]),
            "price": pa.array([1.5, None, -2000.0]),
            "click": [True, False, False],
            "ts": pa.array([NOON, NOON + 1, NOON + 2]).cast(pa.timestamp("ms", "Asia/Tokyo")),
            **lists,
        }
    )
    pq.write_table(raw, tmp_path / "e.parquet")
    headless = IngestConfig(list_separator="|", source=SourceConfig(columns=tuple(COLUMNS)))
    for name, config in (
        ("b.csv.gz", BARS),
        ("c.tsv", BARS),
        ("d.csv", headless),
        ("e.parquet", IngestConfig()),
    ):
        ingest([str(tmp_path / name)], schema(), tmp_path / "out" / name, config)
        assert read_day(tmp_path / "out" / name).equals(expected), name


def test_bad_rows_are_set_aside_with_file_row_column_reason_and_value(tmp_path):
    good = GOOD[0]
    rows = [
        good,
        [*good[:6], "cheap", "1", NOON],
        [*good[:7], "2", NOON],
        [*good[:7], "", NOON],
        ["", *good[1:]],
        [*good, "surplus"],
        [*good[:2], "99", *good[3:]],
        [*good[:3], "shoe", *good[4:]],
        [*good[:8], "yesterday"],
        [*good[:8], NOON // 1_000],
        [*good[:5], "1|x", "inf", *good[7:]],
        good,
    ]
    path = write_csv(tmp_path / "log.csv", rows)
    config = IngestConfig(list_separator="|", max_bad_share=1.0)
    summary = ingest([path], schema(), tmp_path / "out", config)
    assert (summary.rows_in, summary.rows_bad, summary.days) == (12, 10, {"2026-01-01": 2})
    assert summary.quarantine == tmp_path / "out" / "_quarantine" / "2026-01-01_2026-01-01.csv"
    with summary.quarantine.open(newline="") as file:
        found = list(csv.reader(file))
    uneven = "history 'h': another length than column 'hist'"
    epoch = "a time before 1990 or after 2099 when read in ms; wrong --timestamp-unit?"
    surplus = "7,shoe,3,shoe|hat,90|5,1|0,1.5,1," + f"{NOON},surplus"
    assert found == [
        ["file", "row", "column", "reason", "value"],
        [path, "2", "price", "not a number", "cheap"],
        [path, "3", "click", "a label other than 0 and 1", "2"],
        [path, "4", "click", "missing a label 0 or 1", ""],
        [path, "5", "user", "missing an id (string or integer)", ""],
        [path, "6", "", "10 columns, expected 9", surplus],
        [path, "7", "slot", "outside [0, 98], the rows of its table", "99"],
        [path, "8", "age", uneven, "90|5"],
        [path, "8", "action", uneven, "1|0"],
        [path, "9", "ts", "not a time", "yesterday"],
        [path, "10", "ts", epoch, str(NOON // 1_000)],
        [path, "11", "price", "not a finite number", "inf"],
        [path, "11", "action", "not an integer", "1|x"],
    ]
    assert "10 quarantined" in describe(summary)


def test_row_numbers_count_skipped_rows_in_every_block(tmp_path):
    lines = [f"{i},{NOON},{2 if i % 7 == 0 else 1}" + ",x" * (i % 5 == 0) for i in range(1, 200)]
    (tmp_path / "log.csv").write_text("user,ts,click\n" + "\n".join(lines) + "\n")
    config = IngestConfig(max_bad_share=1.0, source=SourceConfig(block_bytes=256))
    summary = ingest([str(tmp_path / "log.csv")], flat_schema(), tmp_path / "out", config)
    with summary.quarantine.open(newline="") as file:
        rows = [int(row["row"]) for row in csv.DictReader(file)]
    assert sorted(rows) == [i for i in range(1, 200) if i % 5 == 0 or i % 7 == 0]
    good = [i for i in range(1, 200) if i % 5 and i % 7]
    assert read_day(tmp_path / "out").column("user").to_pylist() == good


def test_bytes_that_are_no_text_are_escaped_and_other_encodings_are_read(tmp_path):
    lines = ["user,ts,click", f"caf\xe9,{NOON},1", f"caf\xe8,{NOON},0", f"\xff,{NOON},1,x"]
    (tmp_path / "log.csv").write_bytes("\n".join(lines).encode("latin-1"))
    for encoding, names in (("utf-8", (r"caf\xe9", r"caf\xe8")), ("latin-1", ("café", "cafè"))):
        out = tmp_path / encoding
        config = IngestConfig(max_bad_share=1.0, source=SourceConfig(encoding=encoding))
        summary = ingest([str(tmp_path / "log.csv")], flat_schema(), out, config)
        assert read_day(out).column("user").to_pylist() == [xxh(name) for name in names]
        assert summary.reasons == "row: 4 columns, expected 3 (1)"


def test_policy_fail_stops_at_the_first_bad_row_and_leaves_nothing(tmp_path):
    path = write_csv(tmp_path / "log.csv", [GOOD[0], [*GOOD[0][:6], "cheap", "1", NOON]])
    config = IngestConfig(list_separator="|", on_bad_row="fail")
    with pytest.raises(ValueError, match=r"log.csv, row 2, column 'price': not a number, got 'ch"):
        ingest([path], schema(), tmp_path / "out", config)
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_too_many_bad_rows_write_no_day_but_the_list_of_them(tmp_path):
    bad = [*GOOD[0][:7], "5", NOON]
    path = write_csv(tmp_path / "log.csv", [GOOD[0]] * 98 + [bad] * 2)
    with pytest.raises(ValueError, match=r"2 of 100 rows are bad \(2.00%\).*click: a label other"):
        ingest([path], schema(), tmp_path / "out", BARS)
    assert [found.name for found in (tmp_path / "out").glob("[!.]*")] == ["_quarantine"]
    assert len((tmp_path / "out" / "_quarantine" / "failed.csv").read_text().splitlines()) == 3
    path = write_csv(tmp_path / "log.csv", [GOOD[0]] * 198 + [bad] * 2)
    assert ingest([path], schema(), tmp_path / "out", BARS).rows_bad == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"", "expected rows, got an empty file"),
        ("header.csv", b"user,ts,click\n", "expected rows, got none in 1 files"),
        ("lacks.csv", b"usr,ts,click\n1,2,3\n", r"missing columns: 'user', did you mean 'usr'\?"),
        ("twice.csv", b"user,ts,click,ts\n1,2,3,4\n", r"more than once: \[\"'ts'\"\]"),
        ("semi.csv", b"user;ts;click\n1;2;0\n", "is --delimiter right"),
        ("text.parquet", b"user,ts,click\n", "expected a Parquet file, got something else"),
        ("cut.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("log.csv", b"PAR1....", "expected text, got a Parquet file; use --format parquet"),
        ("log.data", b"user,ts,click\n", "its name tells no format"),
        ("binary.csv", bytes(range(256)) * 4, "missing columns|cannot be read"),
    ],
)
def test_an_unusable_file_is_one_line_on_stderr_and_exit_code_2(
    tmp_path, capsys, name, content, message
):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "schema.yaml").write_text(json.dumps(flat_schema().to_dict()))
    arguments = ["--schema", str(tmp_path / "schema.yaml"), "--output", str(tmp_path / "out")]
    assert main([str(tmp_path / name), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and name in error
    with pytest.raises(ValueError, match=message):
        ingest([str(tmp_path / name)], flat_schema(), tmp_path / "out")


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


def test_two_writers_of_one_folder_are_told_apart(tmp_path):
    path = write_csv(tmp_path / "log.csv", GOOD)
    with (
        PartitionConfig().build(tmp_path / "out"),
        pytest.raises(RuntimeError, match="another process is writing"),
    ):
        ingest([path], schema(), tmp_path / "out", BARS)
    ingest([path], schema(), tmp_path / "out", BARS)


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


def test_a_missing_label_of_several_can_be_kept_for_the_loader_to_mask(tmp_path):
    two = flat_schema(labels=[{"name": "click"}, {"name": "like"}])
    rows = [[1, NOON, 1, ""], [2, NOON, "", ""], [3, NOON, 0, 1]]
    path = write_csv(tmp_path / "log.csv", rows, header=["user", "ts", "click", "like"])
    mask = IngestConfig(null_labels="mask", max_bad_share=0.5)
    summary = ingest([path], two, tmp_path / "out", mask)
    assert read_day(tmp_path / "out").column("like").to_pylist() == [None, 1]
    assert summary.reasons == "click: every label is missing (1)"


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
    for rows in (20_000, 200_000):
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
        assert peaks[kind, 200_000] < 2 * peaks[kind, 20_000] + (1 << 20), peaks


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


@pytest.mark.parametrize(
    ("unit", "pattern", "text", "expected"),
    [
        ("ms", "", "2026-01-01T12:00:00.25Z", NOON + 250),
        ("ms", "", "2026-01-01 12:00:00", NOON),
        ("ms", "", "2026-01-01 14:00:00+02:00", NOON),
        ("ms", "", "2026-01-01", NOON - 43_200_000),
        ("s", "", str(NOON // 1_000), NOON),
        ("s", "", f"{NOON // 1_000}.5", NOON + 500),
        ("us", "", str(NOON * 1_000 + 999), NOON),
        ("ns", "", str(NOON * 1_000_000), NOON),
        ("ms", "%y%m%d%H", "26010112", NOON),
        ("ms", "", "2026-02-30", None),
        ("s", "", "9" * 19, np.iinfo(np.int64).max),
        ("ms", "", "noon", None),
    ],
)
def test_times_are_read_in_any_unit_and_as_iso_or_pattern(unit, pattern, text, expected):
    Times(unit=unit, pattern=pattern)
    values, unread = parse_times(pa.array([text, None]), unit, pattern)
    assert values.to_pylist() == [expected, None]
    assert unread.tolist() == [expected is None, False]


TEXTS = st.one_of(
    st.integers(-(2**65), 2**65).map(str),
    st.floats(allow_nan=False).map(str),
    st.text(alphabet="0123456789+-.eEx ", max_size=6),
    st.none(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=12))
def test_what_a_text_becomes_does_not_depend_on_its_neighbours(texts):
    for parse in (parse_integers, parse_floats):
        together, unread = parse(pa.array(texts, pa.string()))
        alone = [parse(pa.array([text], pa.string())) for text in texts]
        assert together.to_pylist() == [values[0].as_py() for values, _ in alone]
        assert unread.tolist() == [bool(mask[0]) for _, mask in alone]


@settings(max_examples=150, deadline=None)
@given(st.integers(-(2**63), 2**64 - 1))
def test_every_64_bit_integer_is_read_and_unsigned_ones_keep_their_bits(value):
    values, unread = parse_integers(pa.array([str(value), "x", f" {value}", f"{value}.0"]))
    wrapped = value - 2**64 if value >= 2**63 else value
    assert values.to_pylist() == [wrapped, None, wrapped, wrapped]
    assert unread.tolist() == [False, True, False, False]

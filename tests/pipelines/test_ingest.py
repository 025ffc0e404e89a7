# SPDX-License-Identifier: MIT
"""Raw logs in, typed days out: ids, bad rows, unusable files."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipelines.ingest import _parser, describe, ingest, main
from pipelines.ingestion.column_stats import Texts
from pipelines.ingestion.formats import open_source
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.quarantine import Quarantine
from pipelines.ingestion.source import SourceConfig
from tests.support.raw_logs import (
    BARS,
    COLUMNS,
    GOOD,
    NOON,
    flat_schema,
    read_day,
    schema,
    write_csv,
    xxh,
)
from trainer.data.columns import check_columns


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


def test_the_texts_of_columns_that_have_few_stand_in_the_manifest_beside_their_hashes(tmp_path):
    path = write_csv(tmp_path / "log.csv", GOOD)
    ingest([path], schema(), tmp_path / "out", BARS)
    (manifest,) = (tmp_path / "out").glob("dt=*/_manifest.json")
    texts = json.loads(manifest.read_text("utf-8"))["texts"]
    assert texts == {"item": {"hat": xxh("hat"), "shoe": xxh("shoe")}}, "no null, no list, no int"


def test_a_column_of_many_texts_is_given_up():
    texts = Texts(limit=2)
    for batch in (["a", "b"], ["b"], ["c"], ["a"]):
        assert texts.is_open("few")
        texts.add("few", pa.array(batch[:1]), pa.array([ord(batch[0])]))
        texts.add("many", pa.array(["x", None, *batch]), pa.array([1, None, *map(ord, batch)]))
        if batch == ["c"]:
            break
    assert not texts.is_open("few") and not texts.is_open("many")
    texts.add("one", pa.array(["x"]), pa.array([1]))
    assert texts.columns() == {"one": {"x": 1}}


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
    assert rows == [i for i in range(1, 200) if i % 5 == 0 or i % 7 == 0], "in the file's order"
    good = [i for i in range(1, 200) if i % 5 and i % 7]
    assert read_day(tmp_path / "out").column("user").to_pylist() == good


def test_the_bad_row_that_policy_fail_names_is_the_files_first(tmp_path):
    lines = [f"{i},{NOON},{2 if i == 120 else 1}" + ",x" * (i == 150) for i in range(1, 200)]
    (tmp_path / "log.csv").write_text("user,ts,click\n" + "\n".join(lines) + "\n")
    config = IngestConfig(on_bad_row="fail", source=SourceConfig(block_bytes=256))
    with pytest.raises(ValueError, match=r"log.csv, row 120, column 'click': a label other"):
        ingest([str(tmp_path / "log.csv")], flat_schema(), tmp_path / "out", config)


def test_malformed_rows_are_handed_on_block_by_block(tmp_path):
    lines = ["user,ts,click", *["1,2"] * 1_000, f"1,{NOON},1"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    source = open_source(
        str(tmp_path / "log.csv"), SourceConfig(block_bytes=256, max_field_bytes=9)
    )
    sizes = [len(rows.malformed) for rows in source.rows(["user", "ts"])]
    assert sum(sizes) == 1_000 and max(sizes) < 100, "so that no file of them fills the memory"


def test_bytes_that_are_no_text_are_escaped_and_other_encodings_are_read(tmp_path):
    lines = ["user,ts,click", f"caf\xe9,{NOON},1", f"caf\xe8,{NOON},0", f"\xff,{NOON},1,x"]
    (tmp_path / "log.csv").write_bytes("\n".join(lines).encode("latin-1"))
    for encoding, names in (("utf-8", (r"caf\xe9", r"caf\xe8")), ("latin-1", ("café", "cafè"))):
        out = tmp_path / encoding
        config = IngestConfig(max_bad_share=1.0, source=SourceConfig(encoding=encoding))
        summary = ingest([str(tmp_path / "log.csv")], flat_schema(), out, config)
        assert read_day(out).column("user").to_pylist() == [xxh(name) for name in names]
        assert summary.reasons == "row: 4 columns, expected 3 (1)"


def test_a_file_that_is_named_in_two_ways_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_csv(tmp_path / "log.csv", GOOD)
    summary = ingest(["log.csv", path, ".", "*.csv"], schema(), tmp_path / "out", BARS)
    assert (summary.files, summary.rows_in) == (1, 3)


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


def test_help_gives_every_option_one_line_that_ends_with_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for action in _parser()._actions[2:]:
        option = action.option_strings[0]
        (line,) = (line for line in text.splitlines() if line.strip().startswith(option))
        said = line[line.rindex("(") :]
        if action.required:
            assert said == "(required)", line
        elif action.default:
            assert said == f"(default: {action.default})", line
        else:
            assert said.startswith("(default: "), line
    assert max(map(len, text.splitlines())) <= 105


def test_a_missing_label_of_several_can_be_kept_for_the_loader_to_mask(tmp_path):
    two = flat_schema(labels=[{"name": "click"}, {"name": "like"}])
    rows = [[1, NOON, 1, ""], [2, NOON, "", ""], [3, NOON, 0, 1]]
    path = write_csv(tmp_path / "log.csv", rows, header=["user", "ts", "click", "like"])
    mask = IngestConfig(null_labels="mask", max_bad_share=0.5)
    summary = ingest([path], two, tmp_path / "out", mask)
    assert read_day(tmp_path / "out").column("like").to_pylist() == [None, 1]
    assert summary.reasons == "click: every label is missing (1)"


def test_an_ingestion_that_comes_second_takes_nothing_from_the_first(tmp_path, monkeypatch):
    """While one run writes a day, another of the same output fails and leaves no trace."""
    rows = [[i, NOON, 2 if i in (1, 199) else 1] for i in range(200)]
    path = write_csv(tmp_path / "log.csv", rows, header=["user", "ts", "click"])
    config = IngestConfig(max_bad_share=0.5, source=SourceConfig(block_bytes=256))
    refused, check = [], Quarantine.check

    def second(self, num_rows, *, last):
        if self.rows and not refused:  # the first bad row is set aside
            refused.append(num_rows)
            with pytest.raises(RuntimeError, match="another process is writing"):
                ingest([path], flat_schema(), tmp_path / "out", config)
        check(self, num_rows, last=last)

    monkeypatch.setattr(Quarantine, "check", second)
    summary = ingest([path], flat_schema(), tmp_path / "out", config)
    assert refused and summary.rows_bad == 2
    with summary.quarantine.open(newline="") as file:
        assert [int(row["row"]) for row in csv.DictReader(file)] == [2, 200]


def test_a_quote_that_is_not_closed_costs_its_own_line(tmp_path):
    rows = [f"{i},{NOON},1" for i in range(1, 301)]
    rows[99] = f'"100,{NOON},1'
    (tmp_path / "log.csv").write_text("user,ts,click\n" + "\n".join(rows) + "\n")
    summary = ingest([str(tmp_path / "log.csv")], flat_schema(), tmp_path / "out")
    assert (summary.rows_in, summary.rows_bad) == (300, 1)
    with summary.quarantine.open(newline="") as file:
        (found,) = csv.DictReader(file)
    assert found["row"] == "100" and found["value"] == rows[99]
    assert "a quote opens a field and does not close it" in found["reason"]
    config = IngestConfig(source=SourceConfig(quoting="none"))
    summary = ingest([str(tmp_path / "log.csv")], flat_schema(), tmp_path / "none", config)
    assert (summary.rows_in, summary.rows_bad) == (300, 0)

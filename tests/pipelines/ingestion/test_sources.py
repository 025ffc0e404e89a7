# SPDX-License-Identifier: MIT
"""Which files are raw logs, in which formats: every file is read or named."""

import bz2
import gzip
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.ingest import describe, ingest, main
from pipelines.ingestion.formats import format_of, open_source
from pipelines.ingestion.formats.streams import read_blocks
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.source import SourceConfig
from pipelines.ingestion.sources import list_sources
from tests.support.raw_logs import NOON, flat_schema, read_day

TEXT = f"user,ts,click\n1,{NOON},1\n2,{NOON},0\n".encode()


def packed(codec, data):
    """Return `data` as pyarrow's stream of `codec`."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKED = {
    ".csv": lambda data: data,
    ".CSV": lambda data: data,
    ".txt": lambda data: data,
    ".csv.gz": gzip.compress,
    ".CSV.GZ": lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),
    ".csv.bz2": lambda data: bz2.compress(data[:20]) + bz2.compress(data[20:]),
    ".csv.xz": lambda data: lzma.compress(data[:20]) + lzma.compress(data[20:]),
    ".csv.zst": lambda data: packed("zstd", data[:20]) + packed("zstd", data[20:]),
    ".csv.lz4": lambda data: packed("lz4", data),
    ".Csv.Br": lambda data: packed("brotli", data),
}


@pytest.mark.parametrize("ending", PACKED)
def test_text_is_read_by_any_of_its_names_and_a_cut_file_is_named(tmp_path, ending):
    path = tmp_path / f"log{ending}"
    path.write_bytes(PACKED[ending](TEXT))
    summary = ingest([str(tmp_path)], flat_schema(), tmp_path / "out")
    assert (summary.files, summary.rows_in) == (1, 2)
    assert read_day(tmp_path / "out").column("user").to_pylist() == [1, 2]
    if "." in ending[1:]:
        path.write_bytes(PACKED[ending](TEXT * 50)[:-9])
        with pytest.raises(ValueError, match=rf"log{ending}: cannot be read as .* copy it again"):
            ingest([str(path)], flat_schema(), tmp_path / "cut", IngestConfig(max_bad_share=1))


def test_what_follows_an_xz_stream_is_read_or_named(tmp_path):
    path = tmp_path / "log.csv.xz"
    first, second = lzma.compress(TEXT[:20]), lzma.compress(TEXT[20:])
    for between in (b"", b"\0" * 4, b"\0" * (3 << 20)):
        path.write_bytes(first + between + second + b"\0" * 8)
        for size in (1, 7, 1 << 20):
            assert b"".join(read_blocks(str(path), size)) == TEXT
    for damaged in (first + b"rest", first + b"rest" + second, first + second[1:], first[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"log\.csv\.xz: cannot be read as xz: .* copy it again"
        ):
            list(read_blocks(str(path), 1 << 20))


@pytest.mark.parametrize("name", ["rot13", "zip", "hex", "idna", "undefined", "utf-9", "a\0b", ""])
def test_an_encoding_that_is_not_of_text_is_refused_before_a_file_is_opened(name):
    with pytest.raises(ValueError, match="encoding: expected the name of a text encoding"):
        SourceConfig(encoding=name)


@pytest.mark.parametrize("ending", [".parquet", ".PARQUET", ".parq", ".pq"])
def test_parquet_is_read_by_any_of_its_names(tmp_path, ending):
    table = pa.table({"user": [1], "ts": [NOON], "click": [1]})
    pq.write_table(table, tmp_path / f"log{ending}")
    assert ingest([str(tmp_path)], flat_schema(), tmp_path / "out").rows_in == 1


def test_files_of_unknown_names_are_counted_and_named(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("a.csv", "b.csv.snappy", "c.dat", "d.orc", "e.parquet.gz", "f.csv.zip"):
        (raw / name).write_bytes(TEXT)
    (raw / "_SUCCESS").touch()
    found = list_sources([str(raw)])
    assert [os.path.basename(path) for path in found] == ["a.csv"]
    assert len(found) + len(found.passed_over) == 6, "files seen are files read or passed over"
    summary = ingest([str(raw)], flat_schema(), tmp_path / "out")
    said = "note: 5 files passed over, whose names tell no format: b.csv.snappy, c.dat, d.orc, ..."
    assert said in describe(summary)
    (raw / "a.csv").unlink()
    with pytest.raises(ValueError, match=r"none of a known format \(b\.csv\.snappy, c\.dat"):
        list_sources([str(raw)])
    assert len(list_sources([str(raw)], "csv")) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(TEXT, mtime=0), r"got gzip; its name must end with \.gz"),
        (lzma.compress(TEXT), r"got xz; its name must end with \.xz"),
        (b"PK\x03\x04rest", "got a ZIP archive; unpack it"),
        (b"ORC rest", "got an ORC file"),
        (b"", "got an empty file"),
        (b"\n\r\n\n", "expected a line with the columns' names first"),
    ],
)
def test_a_file_that_is_something_else_than_its_name_says_is_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.csv: .*{message}"):
        open_source(str(tmp_path / "a.csv"), SourceConfig())


def test_links_are_followed_and_each_real_file_is_read_once(tmp_path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "a.csv").write_bytes(TEXT)
    log = tmp_path / "log" / "sub"
    log.mkdir(parents=True)
    (log / "day").symlink_to(tmp_path / "archive")
    (log / "again").symlink_to(tmp_path / "archive")
    (log / "loop").symlink_to("..")
    sources = [str(tmp_path / "log"), str(log / "day" / "a.csv"), str(tmp_path / "archive" / "*")]
    summary = ingest(sources, flat_schema(), tmp_path / "out")
    assert (summary.files, summary.rows_in) == (1, 2)


def test_a_glob_of_folders_reads_what_they_hold(tmp_path):
    for day in ("01", "02"):
        (tmp_path / f"day{day}").mkdir()
        (tmp_path / f"day{day}" / "a.csv").write_bytes(TEXT)
    assert len(list_sources([str(tmp_path / "day*")])) == 2
    assert len(list_sources([str(tmp_path / "**")])) == 2


def test_a_file_of_any_name_is_ingested_and_no_name_forges_a_line(tmp_path, capsys):
    import json

    names = [b"caf\xe9.csv", b"a\ningest: all is well.csv", b"=cmd|calc.csv"]
    (tmp_path / "log").mkdir()
    for name in names:
        content = TEXT + b"3,never,1\n"
        (tmp_path / "log" / os.fsdecode(name)).write_bytes(content)
    (tmp_path / "s.yaml").write_text(json.dumps(flat_schema().to_dict()))
    arguments = [str(tmp_path / "log"), "--schema", str(tmp_path / "s.yaml"), "--output"]
    assert main([*arguments, str(tmp_path / "out"), "--max-bad-share", "1"]) == 0
    (kept,) = (tmp_path / "out" / "_quarantine").glob("*.csv")
    lines = kept.read_text("utf-8").splitlines()
    assert len(lines) == 4 and any(r"caf\xe9.csv" in line for line in lines)
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "strict"), "--on-bad-row", "fail"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_cells_that_a_spreadsheet_would_run_are_texts_in_the_quarantine(tmp_path):
    import csv

    values = ["=1+1", "+cmd", "-2", "-x", "@sum(1)", "+1.5e3", "\tx", "plain"]
    lines = [f"{NOON},2,{value}" for value in values]
    (tmp_path / "=a.csv").write_text("ts,click,user\n" + "\n".join(lines) + "\n")
    config = IngestConfig(max_bad_share=1)
    with pytest.raises(ValueError, match=r"8 of 8 rows are bad.*failed\.csv"):
        ingest([str(tmp_path / "=a.csv")], flat_schema(), tmp_path / "out", config)
    (tmp_path / "b.csv").write_text(
        "ts,click,user\n" + f"{NOON},1,1\n" + "".join(f"{value},1,1\n" for value in values)
    )
    summary = ingest([str(tmp_path / "b.csv")], flat_schema(), tmp_path / "out", config)
    with summary.quarantine.open(newline="") as file:
        found = [row["value"] for row in csv.DictReader(file)]
    assert found == ["'=1+1", "'+cmd", "-2", "'-x", "'@sum(1)", "+1.5e3", "'\tx", "plain"]


def test_formats_are_told_by_their_endings():
    names = {"a.tab": "tsv", "a.TSV.gz": "tsv", "a.csv.xz": "csv", "a.pq": "parquet"}
    assert {name: format_of(name).name for name in names} == names
    assert not any(map(format_of, ("a.pq.gz", "a.zip", "a", "a.gz", "csv")))

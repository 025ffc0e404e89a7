# SPDX-License-Identifier: MIT
"""Every real file once, whatever links, names and table formats a folder holds."""

import json
import os

import pytest

from trainer.data.discovery import day_of, list_files, printable


def lay(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def names(root):
    return [os.path.relpath(path, root) for path in list_files(root)]


def test_links_to_days_and_files_are_followed(tmp_path):
    lay(tmp_path, "log/dt=2026-01-01/a.parquet", "archive/dt=2026-01-02/b.parquet", "c.parquet")
    (tmp_path / "log/dt=2026-01-02").symlink_to(tmp_path / "archive/dt=2026-01-02")
    (tmp_path / "log/dt=2026-01-03").mkdir()
    (tmp_path / "log/dt=2026-01-03/c.parquet").symlink_to("../../c.parquet")
    assert names(tmp_path / "log") == [
        "dt=2026-01-01/a.parquet",
        "dt=2026-01-02/b.parquet",
        "dt=2026-01-03/c.parquet",
    ]


def test_a_folder_of_links_alone_is_a_log(tmp_path):
    lay(tmp_path, "x/a.csv", "y/b.csv")
    (tmp_path / "log").mkdir()
    for name in "xy":
        (tmp_path / "log" / name).symlink_to(tmp_path / name)
    assert names(tmp_path / "log") == ["x/a.csv", "y/b.csv"]
    (tmp_path / "again").symlink_to("log")
    assert names(tmp_path / "again") == ["x/a.csv", "y/b.csv"]


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("log/dt=2026-01-01/up", ".."),
        ("log/here", "."),
        ("log/aaa", "dt=2026-01-01"),
        ("log/dt=2026-01-09", "dt=2026-01-01"),
        ("log/dt=2026-01-01/zzz.parquet", "a.parquet"),
        ("log/dt=2026-01-01/0.parquet", "a.parquet"),
    ],
)
def test_a_loop_or_a_second_link_adds_nothing_and_a_files_own_path_wins(tmp_path, link, target):
    lay(tmp_path, "log/dt=2026-01-01/a.parquet", "log/dt=2026-01-02/b.parquet")
    (tmp_path / link).symlink_to(target)
    assert names(tmp_path / "log") == ["dt=2026-01-01/a.parquet", "dt=2026-01-02/b.parquet"]


def test_of_two_links_to_a_folder_elsewhere_the_one_with_a_day_wins(tmp_path):
    lay(tmp_path, "archive/old/a.parquet")
    (tmp_path / "log").mkdir()
    for name in ("current", "dt=2026-01-01"):
        (tmp_path / "log" / name).symlink_to(tmp_path / "archive/old")
    assert names(tmp_path / "log") == ["dt=2026-01-01/a.parquet"]


def test_two_hard_links_are_one_file(tmp_path):
    lay(tmp_path, "dt=2026-01-01/a.parquet")
    os.link(tmp_path / "dt=2026-01-01/a.parquet", tmp_path / "dt=2026-01-01/b.parquet")
    assert names(tmp_path) == ["dt=2026-01-01/a.parquet"]


def test_hidden_names_and_what_is_no_regular_file_are_passed_over(tmp_path):
    lay(tmp_path, "a.csv", ".b.csv", "_c.csv", "_temporary/d.csv", ".trash/e.csv")
    os.mkfifo(tmp_path / "pipe.csv")  # opening it would wait for ever
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    assert names(tmp_path) == ["a.csv"]


def test_a_link_to_nothing_is_named(tmp_path):
    lay(tmp_path, "a.csv")
    (tmp_path / "dt=2026-01-02").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"dt=2026-01-02: .* a link to nothing; mend"):
        list_files(tmp_path)


@pytest.mark.parametrize(
    ("mark", "inside", "table"),
    [
        ("_delta_log/00000000000000000000.json", "dt=2026-01-01", "Delta Lake"),
        (".hoodie/hoodie.properties", "dt=2026-01-01", "Apache Hudi"),
        ("dt=2026-01-01/.hoodie_partition_metadata", "dt=2026-01-01", "Apache Hudi"),
        ("metadata/v3.metadata.json", "data", "Apache Iceberg"),
        ("metadata/00002-6c.gz.metadata.json", "data/country=US", "Apache Iceberg"),
    ],
)
@pytest.mark.parametrize("place", ["itself", "below", "inside"])
def test_a_table_format_is_refused_from_above_and_from_inside(tmp_path, mark, inside, table, place):
    root = tmp_path / "logs" / "table"
    lay(root, mark, f"{inside}/a.parquet")
    start = {"itself": root, "below": root.parent, "inside": root / inside}[place]
    with pytest.raises(ValueError, match=rf"got a table of {table}, .* export the current version"):
        list_files(start)


def test_a_folder_called_metadata_alone_is_no_table(tmp_path):
    lay(tmp_path, "metadata/columns.json", "a.parquet")
    assert names(tmp_path) == ["a.parquet", "metadata/columns.json"]


def test_days_are_read_from_the_usual_names_of_partitions():
    for name in ("dt", "date", "day", "ds"):
        assert day_of(f"/logs/{name}=2026-01-02/country=US/a.parquet") == "2026-01-02"
    assert day_of("/logs/dt=2026-01-01/dt=2026-01-02/a.parquet") == "2026-01-02"
    assert day_of("/logs/country=US/a.parquet") == day_of("/logs/hour=2026-01-01/a") == ""
    for name in ("dt=20260101", "dt=2026-1-1", "dt=2026-02-30"):
        with pytest.raises(ValueError, match=rf"'{name}': expected dt=YYYY-MM-DD"):
            day_of(f"/logs/{name}/a.parquet")


def test_no_name_forges_a_line_or_breaks_an_encoding():
    for name in ("a\nerror: b", "a\rb", "\x1b[2Jb", "a\u2028b", os.fsdecode(b"caf\xe9")):
        shown = printable(name)
        assert shown.isprintable() and shown.encode() and json.dumps(shown), name
    assert printable("a\nb") == "a\\x0ab" and printable(os.fsdecode(b"\xe9")) == "\\xe9"
    assert printable("café 日本") == "café 日本"

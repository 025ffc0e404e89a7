# SPDX-License-Identifier: MIT
import dataclasses
import logging
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema.schema import Label
from tests.support.logs import SCHEMA, records, write_log
from trainer.data.files import RowInterval, discover, keep_rows
from trainer.data.reader import LogReader

DAYS = ["2026-01-01", "2026-01-02", "2026-01-04"]


def read(files, schema=SCHEMA):
    """Return column `row` of all rows of `files`."""
    reader, rows = LogReader(schema), []
    for file in files:
        for group, count in enumerate(file.row_group_rows):
            start = file.row_group_starts[group] if file.row_group_starts else 0
            place = RowInterval(path=file.path, row_group=group, start=start, stop=start + count)
            for batch in reader.read(place):
                rows += batch["row"].to_pylist()
    return rows


def change(folder, name, column, part=1):
    """Write file `part` of a log again with another column `name`."""
    path = folder / f"part-{part}.parquet"
    table = pq.read_table(path)
    index = table.schema.get_field_index(name)
    pq.write_table(table.set_column(index, name, column), path)


def test_days_are_found_at_any_depth_and_kept_from_first_to_last(tmp_path, caplog):
    write_log(tmp_path / "year=2026" / "log", [[3], [2, 0, 1], [4]], DAYS)
    files = discover(tmp_path, None, SCHEMA)
    assert [(file.day, file.row_group_rows) for file in files] == [
        (DAYS[0], (3,)),
        (DAYS[1], (2, 0, 1)),
        (DAYS[2], (4,)),
    ]
    assert read(files) == list(range(10))
    assert read(discover(tmp_path, (DAYS[0], DAYS[1]), SCHEMA)) == list(range(6))
    with caplog.at_level(logging.WARNING):
        assert read(discover(str(tmp_path), (DAYS[1], DAYS[2]), SCHEMA)) == list(range(3, 10))
    assert "1 of the 3 days from 2026-01-02 to 2026-01-04 have no files" in caplog.text


def test_a_plain_folder_one_file_and_one_partition_are_logs(tmp_path):
    write_log(tmp_path, [[3], [2]])
    (tmp_path / "_quarantine.parquet").write_bytes(b"")
    (tmp_path / ".part-9.parquet").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("not a log")
    assert read(discover(tmp_path, None, SCHEMA)) == [0, 1, 2, 3, 4]
    assert read(discover(tmp_path / "part-1.parquet", None, SCHEMA)) == [3, 4]
    write_log(tmp_path / "daily", [[3]], DAYS)
    (file,) = discover(tmp_path / "daily" / "dt=2026-01-01", (DAYS[0], DAYS[0]), SCHEMA)
    assert file.day == DAYS[0]


@pytest.mark.parametrize(
    ("days", "message"),
    [
        (("2026-02-01", "2026-02-02"), "got none; days available: 2026-01-01 to 2026-01-02"),
        (("2026-01-02", "2026-01-01"), "the first day not after the last"),
        (("2026-1-2", "2026-01-03"), "expected YYYY-MM-DD, got '2026-1-2'"),
        (("20260102", "2026-01-03"), "expected YYYY-MM-DD, got '20260102'"),
    ],
)
def test_wrong_days_are_named(tmp_path, days, message):
    write_log(tmp_path, [[3], [2]], DAYS)
    with pytest.raises(ValueError, match=message):
        discover(tmp_path, days, SCHEMA)


def test_what_is_no_log_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: expected a folder or a Parquet file"):
        discover(tmp_path / "nowhere", None, SCHEMA)
    with pytest.raises(ValueError, match=r"expected files named \*\.parquet"):
        discover(tmp_path, None, SCHEMA)
    (tmp_path / "raw").mkdir()
    text = tmp_path / "raw" / "clicks.csv.gz"
    text.touch()
    for raw in (text.parent, text):
        way_out = (
            rf"got text \(clicks\.csv\.gz\); .* pipelines\.ingest {raw} --schema FILE --output"
        )
        with pytest.raises(ValueError, match=way_out):
            discover(raw, None, SCHEMA)
    write_log(tmp_path, [[0], []])
    with pytest.raises(ValueError, match="expected rows, got 2 files without any"):
        discover(tmp_path, None, SCHEMA)
    with pytest.raises(ValueError, match=r"part-0.parquet lies in no dt=YYYY-MM-DD folder"):
        discover(tmp_path, (DAYS[0], DAYS[0]), SCHEMA)


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_an_empty_or_truncated_file_is_named_before_anything_is_read(tmp_path, size):
    write_log(tmp_path, [[30], [30], [30]])
    path = tmp_path / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"part-1\.parquet: .*empty, truncated or damaged"):
        discover(tmp_path, None, SCHEMA)


def test_a_file_damaged_inside_is_named_with_its_row_group(tmp_path):
    write_log(tmp_path, [[3000, 3000]])
    path = tmp_path / "part-0.parquet"
    files = discover(tmp_path, None, SCHEMA)
    data = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[place : place + 400] = b"\xff" * 400
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"part-0\.parquet, row group 1: cannot be read"):
        read(files)
    path.unlink()
    with pytest.raises(ValueError, match=r"part-0\.parquet, row group 0: cannot be read"):
        read(files)


def test_changed_bytes_of_a_page_with_a_checksum_are_never_taken_for_ids(tmp_path):
    table = records(50)
    path = tmp_path / "part-0.parquet"
    plain = {"compression": None, "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, path, **plain)
    (file,) = discover(path, None, SCHEMA)
    names = table.schema.names
    column = pq.ParquetFile(path).metadata.row_group(0).column(names.index(SCHEMA.columns[0]))
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(content)
    interval = RowInterval(path=file.path, row_group=0, start=0, stop=50)
    with pytest.raises(ValueError, match=r"part-0\.parquet, row group 0: cannot be read .*CRC"):
        list(LogReader(SCHEMA).read(interval))


def test_a_file_replaced_by_a_shorter_one_is_named(tmp_path):
    files = discover(write_log(tmp_path, [[30]]), None, SCHEMA)
    write_log(tmp_path, [[20]])
    with pytest.raises(ValueError, match="ends at row 20, and row 30 was promised"):
        read(files)


def test_added_and_reordered_columns_and_other_widths_are_absorbed(tmp_path):
    write_log(tmp_path, [[3], [3], [3]])
    path = tmp_path / "part-1.parquet"
    table = pq.read_table(path)
    table = table.append_column("new", pa.array([1, 2, 3])).select(
        ["new", *reversed(table.column_names)]
    )
    pq.write_table(table, path)
    change(tmp_path, "place", pa.array([1.0, None, 3.0]))
    change(tmp_path, "ages", pa.array([[1], None, [2**40]], pa.large_list(pa.int64())))
    change(tmp_path, "item", pa.array(["a", "b", "a"]).dictionary_encode())
    change(tmp_path, "tags", pa.nulls(3), part=2)
    change(tmp_path, "clicks", pa.array([[None], [], None], pa.list_(pa.null())), part=2)
    files = discover(tmp_path, None, SCHEMA)
    assert read(files) == list(range(9))
    reader = LogReader(SCHEMA)
    types = {
        batch.schema
        for file in files
        for batch in reader.read(RowInterval(path=file.path, row_group=0, start=0, stop=3))
    }
    assert len({str(sorted(zip(t.names, map(str, t.types), strict=True))) for t in types}) == 1


@pytest.mark.parametrize(
    ("name", "column", "parts"),
    [
        ("clicks", pa.array([1, 2]), ["'clicks'", "a list of integers", "got int64"]),
        ("place", pa.array(["x", "y"]), ["'place'", "integers or floats", "got string"]),
        ("item", pa.array([[1], [2]]), ["'item'", "sparse feature", "got list<"]),
        ("click", pa.array(["0", "1"]), ["'click'", "label", "got string"]),
        ("item", pa.array([1, 2]), ["'item'", "expected text, as in", "got number"]),
    ],
)
def test_a_retyped_column_is_named_with_file_expected_and_got(tmp_path, name, column, parts):
    write_log(tmp_path, [[2], [2]])
    change(tmp_path, name, column)
    with pytest.raises(ValueError) as error:
        discover(tmp_path, None, SCHEMA)
    for part in ["part-1.parquet", *parts]:
        assert part in str(error.value)


def test_a_dropped_column_is_named_with_its_file_and_the_closest_name(tmp_path):
    write_log(tmp_path, [[2], [2]])
    path = tmp_path / "part-1.parquet"
    pq.write_table(pq.read_table(path).rename_columns({"item": "items"}), path)
    with pytest.raises(ValueError) as error:
        discover(tmp_path, None, SCHEMA)
    for part in ("part-1.parquet", "'item'", "no such column", "did you mean 'items'"):
        assert part in str(error.value)


@given(st.lists(st.tuples(st.integers(0, 49), st.integers(0, 50)), max_size=8))
@settings(deadline=None, max_examples=25)
def test_any_intervals_in_any_order_are_read_exactly(log, intervals):
    (file,) = discover(log, None, SCHEMA)
    reader = LogReader(SCHEMA)
    for start, stop in intervals:
        place = RowInterval(path=file.path, row_group=1, start=start, stop=max(start, stop))
        rows = [row for batch in reader.read(place) for row in batch["row"].to_pylist()]
        assert rows == list(range(20 + start, 20 + max(start, stop)))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log"), [[20, 50]])


def test_a_long_row_group_is_decoded_in_parts(tmp_path):
    pq.write_table(records(0), tmp_path / "empty.parquet")
    table = pa.table({"row": pa.array(range(100_000)), "click": pa.array([1] * 100_000)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100_000)
    schema = dataclasses.replace(
        SCHEMA,
        tables=SCHEMA.tables[:1],
        sparse=(dataclasses.replace(SCHEMA.sparse[0], column="row"),),
        dense=(),
    )
    place = RowInterval(path=str(tmp_path / "x.parquet"), row_group=0, start=50_000, stop=90_000)
    sizes = [batch.num_rows for batch in LogReader(schema).read(place)]
    assert sum(sizes) == 40_000 and max(sizes) < 20_000


def test_a_fraction_as_an_id_is_named_with_its_place(tmp_path):
    write_log(tmp_path, [[3], [3]])
    change(tmp_path, "place", pa.array([1.0, 2.0, 2.5]))
    with pytest.raises(ValueError, match=r"got 2\.5, at row 2 of row group 0 of .*part-1\.parquet"):
        read(discover(tmp_path, None, SCHEMA))


def test_a_share_of_the_rows_can_be_kept(tmp_path):
    files = discover(write_log(tmp_path, [[5, 5], [10]]), None, SCHEMA)
    assert read(keep_rows(files, (0, 0.35))) == list(range(7))
    assert read(keep_rows(files, (0.35, 1))) == list(range(7, 20))
    with pytest.raises(ValueError, match="at least one row"):
        keep_rows(files, (0.5, 0.5))


def test_a_label_may_be_a_decimal(tmp_path):
    schema = dataclasses.replace(SCHEMA, labels=(Label(name="click", weight="price"),))
    write_log(tmp_path, [[2], [2]])
    change(tmp_path, "price", pa.array([1, 2], pa.decimal128(10, 2)))
    assert read(discover(tmp_path, None, schema), schema) == [0, 1, 2, 3]


def test_a_dotted_column_beside_a_struct_of_that_field_is_the_one_read(tmp_path):
    schema = dataclasses.replace(
        SCHEMA,
        tables=SCHEMA.tables[:1],
        sparse=(dataclasses.replace(SCHEMA.sparse[0], name="user_id", column="user.id"),),
        dense=(),
        user="user.id",
    )
    struct = pa.array([{"id": 90 + i, "x": {"id": 0}} for i in range(3)])
    for order in (("user", "user.id"), ("user.id", "user")):
        columns = {"user": struct, "user.id": pa.array([7, 8, 9]), "click": pa.array([0, 1, 0])}
        table = pa.table({name: columns[name] for name in (*order, "click")})
        pq.write_table(table, tmp_path / "a.parquet")
        (file,) = discover(tmp_path / "a.parquet", None, schema)
        place = RowInterval(path=file.path, row_group=0, start=1, stop=3)
        (batch,) = LogReader(schema).read(place)
        assert batch["user.id"].to_pylist() == [8, 9]
    pq.write_table(table.drop_columns("user.id"), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'user\.id'.*no such column"):
        discover(tmp_path / "a.parquet", None, schema)


@pytest.mark.parametrize("name", [b"caf\xe9.parquet", b"a\nb.PARQUET", b"\xff\xfe.pq"])
def test_a_file_of_any_name_is_read(tmp_path, name):
    write_log(tmp_path, [[3]])
    (tmp_path / "part-0.parquet").rename(tmp_path / os.fsdecode(name))
    assert read(discover(tmp_path, None, SCHEMA)) == [0, 1, 2]
    (tmp_path / os.fsdecode(name)).write_bytes(b"PAR1")
    with pytest.raises(ValueError) as error:
        discover(tmp_path, None, SCHEMA)
    assert "\n" not in str(error.value).split("(")[0]
    assert str(error.value).encode()


def test_a_column_that_only_a_folders_name_holds_is_named_with_the_way_out(tmp_path):
    write_log(tmp_path / "item=7", [[2]])
    path = tmp_path / "item=7" / "part-0.parquet"
    pq.write_table(pq.read_table(path, partitioning=None).drop_columns("item"), path)
    with pytest.raises(ValueError, match=r"folder item=7 holds it.*write the column into the fi"):
        discover(tmp_path, None, SCHEMA)
    write_log(tmp_path / "log" / "date=2026-01-01" / "country=US", [[2]])
    (file,) = discover(tmp_path / "log", ("2026-01-01", "2026-01-01"), SCHEMA)
    assert (file.day, file.num_rows) == ("2026-01-01", 2)

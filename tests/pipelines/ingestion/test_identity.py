# SPDX-License-Identifier: MIT
"""The same id is the same number, whatever type a file keeps it in; two ids never become one."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.ingest import ingest
from pipelines.ingestion.casting import Times, convert
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.rules import Rule
from pipelines.ingestion.text_lists import split_text
from tests.support.raw_logs import NOON, flat_schema, read_day, schema, xxh
from trainer.data.columns import RowError, to_integers

ID = Rule(column="x", role="id")


def ids(values, kind="int"):
    """Return the ids that a column becomes; None for a bad row."""
    done = convert(ID, kind, values, Times())
    found = done.values.to_pylist()
    for mask, _ in done.problems:
        found = [None if bad else one for one, bad in zip(found, mask, strict=True)]
    return found


NUMBERS = [0, 7, -7, 2**53 - 1, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_integer_is_one_id_in_every_type_that_holds_it_exactly(number):
    columns = {
        "int64": pa.array([number]),
        "decimal(38,0)": pa.array([Decimal(number)], pa.decimal128(38, 0)),
        "decimal(38,4)": pa.array([Decimal(number)], pa.decimal128(38, 4)),
        "decimal256": pa.array([Decimal(number)], pa.decimal256(60, 2)),
        "text": pa.array([str(number)]),
        "text with .0": pa.array([f"{number}.0"]),
        "bytes": pa.array([str(number).encode()]),
        "dictionary": pa.array([str(number)]).dictionary_encode(),
        "dictionary of integers": pa.array([number]).dictionary_encode(),
    }
    if abs(number) < 2**53:
        columns["float64"] = pa.array([float(number)])
    if abs(number) < 2**24:
        columns["float32"] = pa.array([number], pa.float32())
        columns["int32"] = pa.array([number], pa.int32())
    for name, column in columns.items():
        assert ids(column) == [number], name
        if name != "text with .0":
            assert ids(column, "string") == [xxh(str(number))], name


@pytest.mark.parametrize("kind", ["int", "string"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([2.0**53, 2.0**60, 1e300, -(2.0**53), 1.5, float("inf")]),
        pa.array([2.0**24, 2.0**30], pa.float32()),
        pa.array([2.0**11], pa.float16()),
        pa.array([Decimal("1.5"), Decimal("0.01")], pa.decimal128(10, 2)),
        pa.array([Decimal(2**64), Decimal(-(2**63) - 1)], pa.decimal128(38, 0)),
    ],
)
def test_a_number_that_may_stand_for_several_ids_is_a_bad_row(column, kind):
    assert ids(column, kind) == [None] * len(column)


@pytest.mark.parametrize("text", ["007", "+7", "0x7", "-0", "00", "7.5", "1e3", "٧", str(2**64)])
def test_a_text_that_numbers_do_not_write_is_no_integer_id(text):
    assert ids(pa.array([text])) == [None]
    assert ids(pa.array([text]), "string") == [xxh(text)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.decimals(-(10**22), 10**22, places=2) | st.none(), min_size=1, max_size=6))
def test_decimals_never_merge(values):
    column = pa.array(values, pa.decimal128(38, 2))
    found = {}
    for value, one in zip(values, ids(column), strict=True):
        whole = value is not None and value == int(value) and -(2**63) <= value < 2**64
        assert (one is not None) == whole
        if whole:
            assert found.setdefault(one, value) == value


def test_unsigned_ids_keep_their_bits_in_every_type():
    number = 2**64 - 5
    for column in (
        pa.array([number], pa.uint64()),
        pa.array([Decimal(number)], pa.decimal128(38, 0)),
        pa.array([str(number)]),
    ):
        assert ids(column) == [-5]
    assert ids(pa.array([number], pa.uint64()), "string") == [xxh(str(number))]


def test_six_decimals_above_2_to_the_53_stay_six_ids(tmp_path):
    values = [Decimal(2**60 + i) for i in range(6)]
    table = {"user": pa.array(values, pa.decimal128(38, 0)), "ts": [NOON] * 6, "click": [0, 1] * 3}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    ingest([str(tmp_path / "a.parquet")], flat_schema(), tmp_path / "out")
    assert read_day(tmp_path / "out").column("user").to_pylist() == [2**60 + i for i in range(6)]


@pytest.mark.parametrize("width", [None, 3])
def test_bytes_that_are_no_text_are_ids_and_have_no_names(tmp_path, width):
    values = [b"\xff\xfe\x00", b"\x00\x01\x02", b"abc"]
    column = pa.array(values, pa.binary(width) if width else pa.binary())
    table = {"user": column, "ts": [NOON] * 3, "click": [0, 1, 2]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    config = IngestConfig(max_bad_share=0.5)
    summary = ingest([str(tmp_path / "a.parquet")], flat_schema(), tmp_path / "out", config)
    found = read_day(tmp_path / "out").column("user").to_pylist()
    assert found == to_integers(column, "user")[0].tolist()[:2], "as training hashes them"
    assert summary.kinds == {"user": "string"} and summary.rows_bad == 1
    assert xxh("abc") == to_integers(column, "user")[0][2]
    number = IngestConfig(kinds={"user": "int"}, max_bad_share=1)
    with pytest.raises(ValueError, match=r"3 of 3 rows are bad.*user: (bytes that|not an integer)"):
        ingest([str(tmp_path / "a.parquet")], flat_schema(), tmp_path / "int", number)


def test_training_takes_no_float_that_may_stand_for_several_ids():
    assert to_integers(pa.array([2.0**53 - 1, None]), "x")[0].tolist() == [2**53 - 1, 0]
    for column in (pa.array([2.0**53]), pa.array([2.0**24], pa.float32())):
        with pytest.raises(RowError, match="x: expected whole numbers below 2"):
            to_integers(column, "x")


def test_a_date_is_one_id_as_date32_and_date64():
    day = [datetime.date(2026, 1, 2)]
    found = {ids(pa.array(day, kind))[0] for kind in (pa.date32(), pa.date64())}
    assert len(found) == 1
    assert to_integers(pa.array(day, pa.date64()), "x")[0].tolist() == list(found)


LISTS = {
    "3|14": ("|", ["3", "14"]),
    " 3 | 14 ": ("|", ["3", "14"]),
    "3||14": ("|", ["3", None, "14"]),
    "3,14": (",", ["3", "14"]),
    "3, 14": (",", ["3", "14"]),
    "[3,1,2]": (",", ["3", "1", "2"]),
    "[3, 1, 2]": (", ", ["3", "1", "2"]),
    " [ 3 ,1 ] ": (",", ["3", "1"]),
    "[3]": (",", ["3"]),
    "[]": (",", []),
    "[ ]": (",", []),
    "": (",", []),
    '["a", "b c"]': (",", ["a", "b c"]),
    "['a', 'b']": (",", ["a", "b"]),
    "[1, null, None]": (",", ["1", None, None]),
    '["a,b", "c"]': (",", ["a,b", "c"]),
    '["caf\\u00e9", "\\"x\\""]': (",", ["café", '"x"']),
    "[9007199254740993, 1.0]": (",", ["9007199254740993", "1.0"]),
    "[[1, 2], [3]]": (",", None),
    '["a, b]': (",", None),
    '["a", {"b": 1}]': (",", None),
    "[a]|[b]": ("|", ["[a]", "[b]"]),
    "a[1],b": (",", ["a[1]", "b"]),
}


@pytest.mark.parametrize("text", LISTS)
def test_an_entry_of_a_list_is_the_same_id_wherever_it_stands(text):
    separator, expected = LISTS[text]
    column = pa.array([None, "1" + separator + "2", text])
    lists, broken = split_text(column, separator)
    assert lists.to_pylist() == [[], ["1", "2"], expected or []]
    assert broken.tolist() == [False, False, expected is None]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.text(max_size=5).filter(str.strip) | st.integers() | st.none())))
def test_what_json_wrote_is_read(rows):
    for separators in ((",", ":"), (", ", ": ")):
        texts = [json.dumps(row, separators=separators) for row in rows]
        lists, broken = split_text(pa.array(texts, pa.string()), ",")
        wanted = [[None if one is None else str(one) for one in row] for row in rows]
        # Blanks around an entry are no part of it, as they are not outside of quotes.
        found = [[one and one.strip() for one in row] for row in lists.to_pylist()]
        assert found == [[one and one.strip() for one in row] for row in wanted]
        assert not broken.any()


def test_lists_as_text_are_read_in_parquet_too_and_a_broken_one_is_a_bad_row(tmp_path):
    rows = 4
    table = {
        "user": np.arange(rows), "item": ["a"] * rows, "slot": [1] * rows, "price": [1.0] * rows,
        "hist": ['["shoe", "hat"]', "[]", '["hat"]', "[[1]]"],
        "age": ["[3, 4]", "[]", "[5]", "[1]"],
        "action": ["[0, 1]", "[]", "[1]", "[1]"],
        "click": [0, 1, 0, 1], "ts": [NOON] * rows,
    }  # fmt: skip
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'hist': expected a list.*say --list-separator"):
        ingest([str(tmp_path / "a.parquet")], schema(), tmp_path / "none")
    config = IngestConfig(list_separator=",", max_bad_share=0.5)
    summary = ingest([str(tmp_path / "a.parquet")], schema(), tmp_path / "out", config)
    found = read_day(tmp_path / "out")
    assert found.column("hist").to_pylist() == [[xxh("shoe"), xxh("hat")], [], [xxh("hat")]]
    assert found.column("age").to_pylist() == [[3, 4], [], [5]]
    assert summary.rows_bad == 1 and "a list that cannot be read" in summary.reasons

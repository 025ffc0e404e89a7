# SPDX-License-Identifier: MIT
"""Delimited text cut into rows: RFC 4180 at any block size, and stray quotes that cost one line."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.ingestion.formats import open_source
from pipelines.ingestion.source import SourceConfig

FIELD = st.text(alphabet='ab1,;"\n\r\t é', max_size=8)


def read(path, **settings_):
    """Return the columns' names, and (number, row or reason) of every row of a file."""
    source = open_source(str(path), SourceConfig(**settings_))
    names, found = source.schema.names, {}
    for rows in source.rows(names):
        good = [list(row.values()) for row in rows.records.to_pylist()]
        pairs = [*zip(rows.numbers.tolist(), good, strict=True)]
        pairs += [(number, why) for number, why, _ in rows.malformed]
        assert not found.keys() & {number for number, _ in pairs}, "a number for each row"
        found |= dict(pairs)
    assert sorted(found) == list(range(1, len(found) + 1)), "every row has its number"
    return names, [found[number] for number in sorted(found)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(FIELD, min_size=3, max_size=3), min_size=1, max_size=12),
    st.sampled_from([1, 2, 7, 64, 1 << 20]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(",\t;"),
)
def test_what_a_writer_of_csv_wrote_is_read_at_any_block_size(
    tmp_path_factory, rows, block, ending, quoting, delimiter
):
    if ending == "\n":  # Python's writer leaves a CR without quotes then
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    text = io.StringIO()
    csv.writer(text, lineterminator=ending, quoting=quoting, delimiter=delimiter).writerows(
        [["x", "y", "z"], *rows]
    )
    path.write_bytes(text.getvalue().encode())
    options = {"delimiter": delimiter, "quoting": "double", "block_bytes": block}
    got = read(path, **options, max_field_lines=50, null_values=("none",))
    assert got == (["x", "y", "z"], rows)


@pytest.mark.parametrize("block", [16, 100, 1000, 1 << 20])
@pytest.mark.parametrize("title", ["title {i}\n", "title {i}\nsecond line", "\n\n{i}", '"{i}"\n"'])
def test_newlines_in_quotes_are_read_at_the_border_of_every_block(tmp_path, block, title):
    titles = [title.format(i=i) for i in range(300)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "title", "price"], *zip(range(300), titles, range(300), strict=True)]
        )
    _, rows = read(tmp_path / "a.csv", block_bytes=block, null_values=("none",))
    assert rows == [[str(i), titles[i], str(i)] for i in range(300)]


def write(path, stray, delimiter=",", count=1_000):
    """Write rows of which some titles are as `stray` says."""
    lines = [
        delimiter.join([str(i), stray.get(i, f"title {i}"), f"{i * 0.5}", str(i % 2)])
        for i in range(count)
    ]
    path.write_text("\n".join([delimiter.join(["uid", "item", "price", "y"]), *lines]) + "\n")
    return [line.split(delimiter) for line in lines]


STRAY = {
    "opened and opened again": {10: '"best of', 900: '"other'},
    "opened, and closed far away": {10: '"best of', 900: 'other"'},
    "opened, and closed in the next row": {10: '"best of', 11: 'other"'},
    "opened, and closed five rows on": {10: '"best of', 15: 'other"'},
    "opened, with one inside a later title": {10: '"best of', 900: 'a 5" pipe'},
    "opened once": {500: '"best of'},
    "opened in the last row": {999: '"best of'},
    "closed with text behind": {10: '"best" of'},
    "escaped with a backslash": {10: '"the \\"best\\" of"'},
    "doubled at the start": {10: '""best of'},
}


@pytest.mark.parametrize("name", STRAY)
@pytest.mark.parametrize("block", [64, 4096, 1 << 20])
def test_a_stray_quote_costs_its_own_row_and_no_other(tmp_path, name, block):
    stray = STRAY[name]
    expected = write(tmp_path / "a.csv", stray)
    _, rows = read(tmp_path / "a.csv", block_bytes=block)
    assert len(rows) == 1_000
    bad = [i for i, row in enumerate(rows) if isinstance(row, str)]
    assert bad and set(bad) <= set(stray), bad
    assert all(rows[i] == expected[i] for i in range(1_000) if i not in bad)


@pytest.mark.parametrize("name", STRAY)
def test_between_tabs_a_quote_is_a_character(tmp_path, name):
    expected = write(tmp_path / "a.tsv", STRAY[name], "\t")
    source = open_source(str(tmp_path / "a.tsv"), SourceConfig())
    assert read(tmp_path / "a.tsv")[1] == expected
    assert not source.notes
    list(source.rows(["uid"]))
    assert "--quoting double" in source.notes[0]
    assert read(tmp_path / "a.tsv", quoting="none")[1] == expected
    write(tmp_path / "a.csv", STRAY[name])
    assert len(read(tmp_path / "a.csv", quoting="none")[1]) == 1_000


def test_a_quote_inside_a_field_is_a_character(tmp_path):
    expected = write(
        tmp_path / "a.csv", {i: f'a {i}" pipe, 5" wide'.replace(",", "") for i in range(900)}
    )
    assert read(tmp_path / "a.csv")[1] == expected


def test_limits_of_a_quoted_field_are_named_and_can_be_raised(tmp_path):
    field = "\n".join(["a line"] * 80)
    (tmp_path / "a.csv").write_text(f'x,y,z\n1,"{field}",2\n3,4,5\n')
    _, rows = read(tmp_path / "a.csv")
    assert "does not close it within 65,536 bytes, 64 lines" in rows[0] and rows[-1] == [
        "3",
        "4",
        "5",
    ]
    assert len(rows) == 81, "each line is a row that is set aside"
    assert read(tmp_path / "a.csv", max_field_lines=80)[1] == [["1", field, "2"], ["3", "4", "5"]]
    (tmp_path / "a.csv").write_text('x,y,z\n1,"2,3\n4,5",6\n7,8,9\n')  # both lines look like rows
    assert isinstance(read(tmp_path / "a.csv")[1][0], str)
    assert read(tmp_path / "a.csv", max_field_lines=64)[1] == [["1", "2,3\n4,5", "6"], list("789")]


def test_a_line_longer_than_a_block_is_one_bad_row(tmp_path):
    long = "9" * 5_000
    (tmp_path / "a.csv").write_text(f"x,y\n1,2\n3,{long}\n4,5\n{long}")
    _, rows = read(tmp_path / "a.csv", block_bytes=1_000, max_field_bytes=1_000)
    assert rows[0] == ["1", "2"] and rows[2] == ["4", "5"] and len(rows) == 4
    assert rows[1] == rows[3] == "a row longer than 1,000 bytes"


def test_fields_beyond_the_limit_are_doubted_and_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "a.csv").write_text("\n\nx,y\r\n\r\n1,2\r\n\n3," + "a" * 70_000 + "\n\n")
    source = open_source(str(tmp_path / "a.csv"), SourceConfig())
    (rows,) = source.rows(["x", "y"])
    ((column, mask, why),) = rows.doubts
    assert (column, mask.tolist(), rows.numbers.tolist()) == ("y", [False, True], [1, 2])
    assert why == "a field longer than 65,536 bytes (--max-field-bytes)"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-8"])
def test_encodings_with_a_mark_are_known_by_it(tmp_path, encoding):
    (tmp_path / "a.csv").write_bytes('x,y\né,"日\n本"\n'.encode(encoding))
    assert read(tmp_path / "a.csv", block_bytes=5) == (["x", "y"], [["é", "日\n本"]])


def test_utf_16_without_a_mark_is_named_with_the_way_out(tmp_path):
    (tmp_path / "a.csv").write_bytes("x,y\n1,2\n".encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"a\.csv: .*NUL bytes.*--encoding utf-16-le"):
        read(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv", encoding="utf-16-le")[1] == [["1", "2"]]


def test_many_irregular_quotes_take_time_that_grows_with_the_file(tmp_path):
    lines = ['a,"b', '"c"d,e', 'f,"g""h', '""i,j', 'k,l"'] * 20_000
    (tmp_path / "a.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    _, rows = read(tmp_path / "a.csv")
    assert len(rows) <= len(lines) and ["k", 'l"'] in rows

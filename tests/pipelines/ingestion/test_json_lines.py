# SPDX-License-Identifier: MIT
"""JSON Lines: exact values, lists as lists, and bad lines that cost themselves."""

import csv
import gzip
import json

import pyarrow.json as pj
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema.schema import load_schema
from pipelines.ingest import ingest
from pipelines.ingestion.formats import format_of, open_source
from pipelines.ingestion.formats.json_tokens import MAX_DEPTH
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.source import SourceConfig
from pipelines.schema import main as propose
from pipelines.schema_proposal.sampling import read_sample
from tests.support.raw_logs import GOOD, NOON, flat_schema, read_day, schema, write_csv, xxh

FIRST = '{"a": "x", "l": [1], "b": 1}'


def write(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read(path, columns=("a", "l", "b"), **options):
    """Return each row, or what is wrong with it, by its number."""
    found = {}
    for rows in open_source(str(path), SourceConfig(**options)).rows(list(columns)):
        pairs = [*zip(rows.numbers.tolist(), rows.records.to_pylist(), strict=True)]
        pairs += [(number, why) for number, why, _ in rows.malformed]
        assert not found.keys() & {number for number, _ in pairs}, "a number for each row"
        found |= dict(pairs)
    assert sorted(found) == list(range(1, len(found) + 1)), "every row has its number"
    return [found[number] for number in sorted(found)]


def as_text(value):
    """Return a value of JSON as the text of it, and lists as lists of texts."""
    if isinstance(value, list):
        return [as_text(one) for one in value]
    return value if value is None or isinstance(value, str) else json.dumps(value)


TEXT = st.text(alphabet='ab1 ,:{}[]"\\\n\té\x00\u2028😀', max_size=8)
VALUE = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXT | st.floats(
    allow_nan=False, allow_infinity=False
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.fixed_dictionaries(
            {}, optional={"a": VALUE, "l": st.none() | st.lists(VALUE, max_size=4), "b": VALUE}
        ),
        max_size=12,
    ),
    st.sampled_from([200, 512, 1 << 20]),
    st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n", "\r"]),
    st.booleans(),
    st.sampled_from([None, (",", ":"), (" ,\t", " : ")]),
)
def test_what_a_writer_of_json_wrote_is_read_at_any_block_size(
    tmp_path_factory, rows, block, ending, ascii_only, separators
):
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=ascii_only, separators=separators) for row in rows]
    path.write_bytes(ending.join([FIRST, *lines]).encode())
    expected = [{key: as_text(row.get(key)) for key in ("a", "l", "b")} for row in rows]
    found = read(path, block_bytes=block, max_field_bytes=4_096)
    assert found == [{"a": "x", "l": ["1"], "b": "1"}, *expected]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"a": NaN}', "NaN and Infinity are no JSON numbers"),
        ('{"b": [-Infinity]}', "NaN and Infinity are no JSON numbers"),
        ('{"z": NaN}', "NaN and Infinity are no JSON numbers"),
        ('{"a": 01}', "a bare word that is no number"),
        ('{"a": +1}', "a bare word that is no number"),
        ('{"a": .5}', "a bare word that is no number"),
        ('{"a": None}', "a bare word that is no number"),
        ('{"a": 1}\x00', "a bare word that is no number"),
        ('{"a": 1} // a note', "a bare word that is no number"),
        ("{a: 1}", "a bare word that is no number"),
        ("{5: 1}", "a key without quotes"),
        ('{"a": 1, true: 1}', "a key without quotes"),
        ('{"a": 1, "a": 2}', "key 'a' appears more than once"),
        ('{"a": 1, "\\u0061": 1}', "key 'a' appears more than once"),
        ('{"a": "x', "a string is not closed"),
        ('{"a": "x\\"}', "a string is not closed"),
        ('{"a": "x\ty"}', "a control character in a string"),
        ('{"a": "\\ud800"}', "not JSON: The surrogate pair"),
        ('{"a": "\\x"}', "not JSON: Invalid escape"),
        ('{"a": 1,}', "not JSON: Missing a name"),
        ("{'a': 1}", "a bare word that is no number"),
        ('{"a": 1 2}', "not JSON: Missing a comma"),
        ('{"a": "1" 2}', "not JSON: Missing a comma"),
        ('{"a": 1}{"a": 2}', "not one JSON object"),
        ('{"a": 1}, ', "not one JSON object"),
        ('{"a": 1} 5', "not one JSON object"),
        ('null{"a": 1}', "not one JSON object"),
        ('true {"a": 1}', "not one JSON object"),
        ('{"a": 1} null', "not one JSON object"),
        ('{"a": 1} "a"', "not one JSON object"),
        ('{"a": 1}\x00', "a bare word that is no number"),
        ("\x1a", "not a JSON object"),
        (" \x00 \x07", "not a JSON object"),
        ('"a" {"a": 1}', "not one JSON object"),
        ('{"a": [1}', "not one JSON object"),
        ("[1]", "not one JSON object"),
        ("5", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"a": [1]}', "column 'a': expected a single value, got a list"),
        ('{"a": {"x": 1}}', "column 'a': expected a single value, got an object"),
        ('{"l": 5}', "column 'l': expected a list, got a single value"),
        ('{"l": [[1]]}', "column 'l': expected a single value in its list, got a list"),
        ('{"z": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "nested more than 64 deep"),
        ('{"z": ' + "[" * 9_000 + "}", "not one JSON object"),
        ('{"a": "' + "x" * 20_000 + '"}', "a row longer than 16,384 bytes"),
    ],
)
def test_a_bad_line_costs_itself_and_is_bad_by_name(tmp_path, line, why):
    good = [f'{{"a": "{i}", "l": [{i}], "b": {i}}}' for i in range(40)]
    path = write(tmp_path / "a.jsonl", [*good[:20], line, *good[20:]])
    expected = [{"a": str(i), "l": [str(i)], "b": str(i)} for i in range(40)]
    for block in (16_384, 200):
        found = read(path, block_bytes=block, max_field_bytes=16_384)
        assert why in found.pop(20)
        assert found == expected


@pytest.mark.parametrize("raw", [b'{"a": "\xff"}', b'{"a": \xff}', b'{"\xc3": 1}'])
def test_bytes_that_are_no_text_cost_their_line(tmp_path, raw):
    (tmp_path / "a.jsonl").write_bytes(FIRST.encode() + b"\n" + raw + b"\n" + FIRST.encode())
    first, bad, last = read(tmp_path / "a.jsonl")
    assert first == last and bad.startswith("not JSON")


def test_many_kinds_of_bad_lines_in_one_block_are_found_each(tmp_path):
    bad = ['{"a": 1,}', '{"a": [1]}', '{"a": NaN}', "{", '{"a" 1}']
    lines = [FIRST, *(bad[i % 5] if i % 3 else FIRST for i in range(300))]
    found = read(write(tmp_path / "a.jsonl", lines))
    assert [isinstance(row, str) for row in found] == [line in bad for line in lines]


def test_a_block_of_bad_lines_is_read_a_bounded_number_of_times(tmp_path, monkeypatch):
    reads = []
    original = pj.read_json
    monkeypatch.setattr(pj, "read_json", lambda *words: reads.append(1) or original(*words))
    lines = [FIRST, *["{,}"] * 9_000, FIRST]
    found = read(write(tmp_path / "a.jsonl", lines))
    assert len(found) == len(lines) and isinstance(found[0], dict)
    assert all(isinstance(one, str) for one in found[1:-1]), "no bad line is a row"
    assert len(reads) < 8_100


def test_bad_lines_that_only_a_parser_finds_cost_a_read_each_and_no_good_line(
    tmp_path, monkeypatch
):
    sizes = []
    original = pj.read_json
    monkeypatch.setattr(
        pj, "read_json", lambda text, *rest: sizes.append(text.size()) or original(text, *rest)
    )
    bad = ['{"a": [1]}', '{"a": "1", "a": "2"}', '{"a": "1"} {"a": "2"}', '{"a": 1,}']
    lines = [FIRST, *(bad[i // 100 % 4] if i % 100 == 7 else FIRST for i in range(20_000))]
    found = read(write(tmp_path / "a.jsonl", lines))
    assert [isinstance(row, str) for row in found] == [line in bad for line in lines]
    # A bad line of two objects, of which Arrow says another line, halves what is before it.
    assert len(sizes) < 200 * 10, "two reads a bad line, some of them halved"


def log(lines):
    return [json.dumps({"ts": NOON + i, "click": i % 2} | line) for i, line in enumerate(lines)]


def test_ids_of_64_bits_are_exact_and_follow_the_rules_of_identity(tmp_path):
    users = [2**53 + 1, -(2**63), 2**63 - 1, 2**64 - 1, "7", 8]
    bad = ["07", 1.5, 2**64, 1e30, True, "x"]
    path = write(tmp_path / "a.jsonl", log([{"user": one} for one in [*users, *bad]]))
    config = IngestConfig(max_bad_share=1, kinds={"user": "int"})
    summary = ingest([path], flat_schema(), tmp_path / "out", config)
    table = read_day(tmp_path / "out")
    assert table.column("user").to_pylist() == [2**53 + 1, -(2**63), 2**63 - 1, -1, 7, 8]
    with summary.quarantine.open(newline="") as file:
        listed = list(csv.DictReader(file))
    assert [(int(one["row"]), one["column"]) for one in listed] == [
        (i, "user") for i in range(7, 13)
    ]
    assert {one["file"] for one in listed} == {path}
    assert summary.rows_in == 12 == table.num_rows + summary.rows_bad


def test_a_number_among_string_ids_is_the_id_that_its_text_is(tmp_path):
    path = write(tmp_path / "a.jsonl", log([{"user": "u"}, {"user": 7}, {"user": "7"}]))
    ingest([path], flat_schema(), tmp_path / "out")
    assert read_day(tmp_path / "out").column("user").to_pylist() == [xxh("u"), xxh("7"), xxh("7")]


def test_lists_need_no_separator_and_become_what_the_same_csv_becomes(tmp_path):
    names = ["user", "item", "slot", "hist", "age", "action", "price", "click", "ts"]
    write_csv(tmp_path / "a.csv", GOOD)
    ingest([str(tmp_path / "a.csv")], schema(), tmp_path / "csv", IngestConfig(list_separator="|"))
    numbers = {"user": int, "slot": int, "price": float, "click": int, "ts": int}
    lines = []
    for row in GOOD:
        line = {}
        for name, value in zip(names, row, strict=True):
            if name in ("hist", "age", "action"):
                entries = value.split("|") if value else []
                line[name] = entries if name == "hist" else [int(one) for one in entries]
            elif value != "":  # a missing key is null
                line[name] = numbers.get(name, str)(value)
        lines.append(json.dumps(line))
    ingest([write(tmp_path / "a.ndjson", lines)], schema(), tmp_path / "json")
    assert read_day(tmp_path / "json").equals(read_day(tmp_path / "csv"))


def test_a_column_that_is_null_at_first_takes_the_type_of_its_first_value(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.ingestion.formats.json_lines._HEAD_BYTES", 100)
    nulls = ['{"a": "x", "l": null}'] * 30
    lists = ['{"a": "x", "l": [1, null]}', '{"a": 1,}', '{"a": "y"}']
    path = write(tmp_path / "a.jsonl", [*nulls, *lists])
    found = read(path, ("a", "l"), block_bytes=100)
    assert found[:30] == [{"a": "x", "l": None}] * 30
    assert found[30] == {"a": "x", "l": ["1", None]} and found[32] == {"a": "y", "l": None}
    assert "Missing a name" in found[31]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"a": 2}]', r"got an array; .*jq -c '\.\[\]'"),
        (' \n[\n{"a": 1},\n{"a": 2}\n]\n', r"got an array; .*jq -c '\.\[\]'"),
        ('{\n  "a": 1\n}\n', r"got none; write objects of several lines as one line each: jq -c"),
        ("\n \n", "got none"),
        ("", "got an empty file"),
        ("PAR1....", "got a Parquet file"),
    ],
)
@pytest.mark.parametrize("ending", [".json", ".jsonl", ".ndjson"])
def test_a_file_that_holds_no_object_a_line_is_refused_with_a_way_out(
    tmp_path, content, message, ending
):
    (tmp_path / f"a{ending}").write_text(content)
    with pytest.raises(ValueError, match=rf"(?s)a\{ending}: .*{message}"):
        open_source(str(tmp_path / f"a{ending}"), SourceConfig())


def test_columns_of_objects_are_refused_where_the_schema_needs_them(tmp_path):
    for name, user in (("object", {"id": 1}), ("lists", [[1]])):
        path = write(tmp_path / f"{name}.jsonl", log([{"user": user}] * 3))
        with pytest.raises(ValueError, match=rf"{name}\.jsonl: column 'user': .* jq -c"):
            ingest([path], flat_schema(), tmp_path / "out")
    path = write(tmp_path / "flat.jsonl", log([{"user": [1, 2]}] * 3))
    with pytest.raises(ValueError, match=r"flat\.jsonl: column 'user': .* got lists"):
        ingest([path], flat_schema(), tmp_path / "out")
    path = write(tmp_path / "other.jsonl", log([{"user": 1, "more": {"x": [[1]]}}] * 3))
    assert ingest([path], flat_schema(), tmp_path / "out").rows_in == 3


def test_a_schema_is_proposed_from_json_and_the_log_is_ingested_by_it(tmp_path, capsys):
    lines = [
        {"user": f"u{i % 50}", "item": i % 40, "hist": [i % 7, i % 5], "n": {"x": 1}, "void": None}
        for i in range(400)
    ]
    raw = tmp_path / "raw"
    raw.mkdir()
    with gzip.open(raw / "a.json.gz", "wt") as file:
        file.write("\n".join(log(lines)))
    sample = read_sample([str(raw)])
    assert sample.unread.keys() == {"n", "void"} and not sample.lists
    assert sample.columns["hist"].to_pylist()[8] == [1, 3]
    out = tmp_path / "schema.yaml"
    assert propose([str(raw), "--label", "click", "--user", "user", "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert "pipelines.ingest" in said and "--list-separator" not in said
    assert ingest([str(raw)], load_schema(out), tmp_path / "out").rows_in == 400


def test_endings_of_json_tell_the_format():
    names = ("a.json", "a.JSONL.gz", "a.ndjson.zst", "a.json.xz")
    assert {format_of(name).name for name in names} == {"jsonl"}

# SPDX-License-Identifier: MIT
"""Nothing is lost in silence: rows in are rows out and quarantined, and a row out is its source."""

import csv
import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.ingest import ingest
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.ingestion.source import SourceConfig
from tests.support.raw_logs import NOON, flat_schema, read_day, xxh

SCHEMA = flat_schema(dense=[{"name": "price"}])
KEEP = ("row", "title")
COLUMNS = ("row", "user", "title", "price", "click", "ts")
TITLE = st.text(alphabet='ab ,;"\n\té', max_size=6).filter(lambda text: text not in ("", "\\N"))
# What damages a line of text: bytes put into it, cut out of it, or in place of its own.
BYTES = st.sampled_from([b'"', b'""', b"\n", b"\r", b",", b"\t", b"\x00", b"\xff", b"x" * 80, b""])
DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), BYTES), max_size=6)


def rows_of(titles):
    """Return rows that tell by any of their columns which they are."""
    return [
        (str(i), f"u{i}", title, f"{i}.5", str(i % 2), str(NOON + i))
        for i, title in enumerate(titles)
    ]


def damage(content, cuts):
    """Return `content` with bytes put in, cut out or replaced at shares of its length."""
    for share, width, new in cuts:
        place = int(share * len(content))
        content = content[:place] + new + content[place + width :]
    return content


def account(path, config):
    """Ingest a file; return the rows out by number, and rows in, or None if it was refused."""
    out = path.with_name("out")
    try:
        summary = ingest([str(path)], SCHEMA, out, config)
    except ValueError as error:
        assert path.name in str(error) or "rows are bad" in str(error), error
        return None
    found = [row for day in summary.days for row in read_day(out, day).to_pylist()]
    assert summary.rows_in == len(found) + summary.rows_bad, "every row is out or quarantined"
    assert summary.rows_in > 0
    if summary.quarantine:
        with summary.quarantine.open(newline="") as file:
            listed = {int(row["row"]) for row in csv.DictReader(file)}
        assert len(listed) == summary.rows_bad, "each bad row is listed"
        assert listed <= set(range(1, summary.rows_in + 1))
    return found


def equals_source(row, source):
    """Say whether a row that came out is the row of that number that went in."""
    _, user, title, price, click, ts = source
    return (row["user"], row["price"], row["click"], row["ts"], row["title"]) == (
        xxh(user),
        float(price),
        int(click),
        int(ts),
        title,
    )


def text_of(rows, delimiter):
    """Return rows as a writer of CSV, or a dump between tabs, writes them."""
    if delimiter == "\t":
        lines = ["\t".join(row).replace("\n", " ") for row in [COLUMNS, *rows]]
        return "\n".join(lines) + "\n"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", delimiter=delimiter).writerows([COLUMNS, *rows])
    return text.getvalue()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    titles=st.lists(TITLE, min_size=1, max_size=25),
    delimiter=st.sampled_from(",;\t"),
    block=st.sampled_from([64, 200, 1 << 20]),
    cuts=DAMAGE,
    packed=st.booleans(),
)
def test_text_with_random_damage_is_accounted_for(
    tmp_path_factory, titles, delimiter, block, cuts, packed
):
    folder = tmp_path_factory.mktemp("log")
    if delimiter == "\t":
        titles = [title.replace("\t", " ").replace("\n", " ") for title in titles]
    rows = rows_of(titles)
    header, _, body = text_of(rows, delimiter).encode().partition(b"\n")
    content = header + b"\n" + damage(body, cuts)
    path = folder / f"log.{'tsv' if delimiter == chr(9) else 'csv'}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content) if packed else content)
    source = SourceConfig(
        delimiter="" if delimiter in ",\t" else delimiter,
        block_bytes=block,
        max_field_bytes=64,
        null_values=("",),
    )
    config = IngestConfig(source=source, keep=KEEP, max_bad_share=1, kinds={"user": "string"})
    found = account(path, config)
    if not cuts:
        assert found is not None and len(found) == len(rows)
    if found is None:
        return
    # A damaged row may come out as it now is; any other must be its source, and come once.
    by_number = {row[0]: row for row in rows}
    wrong = [
        row for row in found
        if row["row"] not in by_number or not equals_source(row, by_number[row["row"]])
    ]  # fmt: skip
    lost = len(rows) - (len(found) - len(wrong))
    # A byte touches its own line and the one that it joins or cuts off, and a quoted title's lines.
    touched = 2 * len(cuts)
    touched += sum(title.count("\n") for title in titles) if cuts else 0
    assert len(wrong) <= touched
    assert lost <= touched, (lost, touched)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    titles=st.lists(TITLE, min_size=1, max_size=25),
    escapes=st.booleans(),
    numbers=st.booleans(),
    block=st.sampled_from([128, 300, 1 << 20]),
    cuts=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 2),
            BYTES | st.sampled_from([b"{", b"}", b"]", b"[", b":", b"\\", b"NaN", b"7", b" "]),
        ),
        max_size=6,
    ),
    packed=st.booleans(),
)
def test_lines_of_json_with_random_damage_are_accounted_for(
    tmp_path_factory, titles, escapes, numbers, block, cuts, packed
):
    folder = tmp_path_factory.mktemp("log")
    rows = rows_of(titles)
    objects = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    if numbers:
        read = {"price": float, "click": int, "ts": int}
        objects = [{k: read.get(k, str)(v) for k, v in one.items()} for one in objects]
    lines = [json.dumps(one, ensure_ascii=escapes) for one in objects]
    content = lines[0].encode() + b"\n" + damage("\n".join(lines[1:]).encode(), cuts)
    path = folder / f"log.jsonl{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content) if packed else content)
    source = SourceConfig(block_bytes=block, max_field_bytes=64)
    config = IngestConfig(source=source, keep=KEEP, max_bad_share=1, kinds={"user": "string"})
    found = account(path, config)
    assert found is not None, "the first line is good"
    by_number = {row[0]: row for row in rows}
    wrong = [
        row for row in found
        if row["row"] not in by_number or not equals_source(row, by_number[row["row"]])
    ]  # fmt: skip
    lost = len(rows) - (len(found) - len(wrong))
    assert len(wrong) <= 2 * len(cuts)
    assert lost <= 2 * len(cuts), (lost, cuts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    users=st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), min_size=1, max_size=30),
    kind=st.sampled_from(["int64", "decimal", "text", "float"]),
    bad=st.lists(st.sampled_from(["label", "time", "price"]), max_size=4),
    group=st.sampled_from([3, 100]),
)
def test_parquet_with_bad_values_is_accounted_for(tmp_path_factory, users, kind, bad, group):
    folder = tmp_path_factory.mktemp("log")
    count = len(users)
    label, time = np.arange(count) % 2, NOON + np.arange(count)
    price = np.arange(count) + 0.5
    for place, what in enumerate(bad):
        if what == "label":
            label[place % count] = 7
        elif what == "time":
            time[place % count] = 5
        else:
            price[place % count] = np.inf
    column = pa.array(users, pa.int64())
    types = {"decimal": pa.decimal128(38, 0), "text": pa.string()}
    if kind == "float":
        column = pa.array([None if one is None else float(one) for one in users], pa.float64())
    elif kind in types:
        column = column.cast(types[kind])
    columns = {"row": np.arange(count), "title": ["t"] * count, "user": column, "price": price}
    table = pa.table({**columns, "click": label, "ts": time})
    pq.write_table(table, folder / "log.parquet", row_group_size=group)
    config = IngestConfig(
        keep=KEEP, max_bad_share=1, kinds={"user": "int"}, source=SourceConfig(batch_rows=7)
    )
    found = account(folder / "log.parquet", config)
    exact = [one is None or kind != "float" or abs(float(one)) < 2**53 for one in users]
    good = [
        i for i in range(count)
        if label[i] != 7 and time[i] != 5 and np.isfinite(price[i]) and exact[i]
    ]  # fmt: skip
    assert [row["row"] for row in found or []] == good, "every good row, and no other"
    assert [row["user"] for row in found or []] == [users[i] for i in good]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    share=st.floats(0, 1), width=st.integers(0, 40), new=st.binary(max_size=40), cut=st.booleans()
)
def test_a_damaged_parquet_file_is_refused_or_whole(tmp_path_factory, share, width, new, cut):
    folder = tmp_path_factory.mktemp("log")
    rows = rows_of([f"title {i}" for i in range(200)])
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    path = folder / "log.parquet"
    pq.write_table(pa.table(columns), path, write_page_checksum=True, row_group_size=50)
    content = path.read_bytes()
    place = int(share * len(content))
    path.write_bytes(content[:place] if cut else content[:place] + new + content[place + width :])
    config = IngestConfig(keep=KEEP, max_bad_share=1, kinds={"user": "string"})
    found = account(path, config)
    for row in found or []:  # a name of a column in the footer is all that may have changed
        assert equals_source(row, rows[int(row["row"])])
    if path.read_bytes() == content:
        assert found is not None and len(found) == 200

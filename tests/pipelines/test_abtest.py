# SPDX-License-Identifier: MIT
"""The command, from Parquet to the page."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import abtest

METRICS = ["--metric", "ctr=click/rows", "--metric", "orders=order/users"]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Six days of 3,000 users whose arms the command has assigned; arm B clicks 25 % more."""
    folder = tmp_path_factory.mktemp("abtest")
    users = pa.table({"user": [f"u{number}" for number in range(3_000)]})
    pq.write_table(users, folder / "users.parquet")
    words = ["assign", str(folder / "users.parquet"), "--user", "user", "--experiment", "ranker"]
    assert abtest.main([*words, "--output", str(folder / "arms.parquet")]) == 0
    arms = pq.read_table(folder / "arms.parquet")
    generator = np.random.default_rng(0)
    taste = generator.beta(2, 8, 3_000).clip(0, 0.7)
    treated = np.array(arms["arm"].to_pylist()) == "B"
    # Day 0 comes before the experiment.
    for day in range(7):
        rows = generator.integers(0, 3_000, 6_000)
        more = np.where(treated[rows] & (day > 0), 1.25, 1.0)
        clicked = generator.random(6_000) < taste[rows] * more
        table = arms.take(pa.array(rows)).append_column("click", pa.array(clicked))
        order = pa.array(clicked & (generator.random(6_000) < 0.3))
        path = folder / ("log" if day else "before") / f"dt=2026-01-{day + 1:02d}" / "part.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(table.append_column("order", order), path)
    return folder


def test_a_log_becomes_a_verdict_and_a_page(log, capsys):
    words = ["analyze", str(log / "log"), "--user", "user", "--control", "A", "--effect", "0.1"]
    out = log / "out"
    words += [*METRICS, "--before", str(log / "before"), "--output", str(out)]
    assert abtest.main([*words, "--title", "Ranker <b>"]) == 0
    printed = capsys.readouterr().out
    assert "B is better than A in ctr: +" in printed and f"page: {out}" in printed
    result = json.loads((out / "abtest.json").read_text())
    effect = result["metrics"]["ctr"]["effects"]["B"]
    assert effect["lift_low"] < 0.25 < effect["lift_high"]
    assert effect["bootstrap_low"] < 0.25 < effect["bootstrap_high"]
    assert len(effect["looks"]) == 6 and effect["cuped"]["variance_reduction"] > 0
    page = (out / "abtest.html").read_text()
    assert "Ranker &lt;b&gt;" in page and page.count("<svg") >= 4
    assert "http" not in page.replace("http://www.w3.org", "")


def test_sizes_come_from_a_log_or_a_rate(log, capsys):
    words = ["size", "--log", str(log / "log"), "--user", "user", "--effect", "0.05", *METRICS]
    assert abtest.main(words) == 0
    from_log = capsys.readouterr().out
    assert "ctr" in from_log and "orders" in from_log
    assert abtest.main(["size", "--rate", "0.05", "--effect", "0.02"]) == 0
    # (1.95996 + 0.84162)^2 * 4 * 0.05 * 0.95 / (0.05 * 0.02)^2
    assert "1,491," in capsys.readouterr().out
    assert abtest.main(["size", "--effect", "0.02"]) == 2
    assert "--log LOGS or --rate RATE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--user", "nobody", "--control", "A", *METRICS], "no column 'nobody'"),
        (["--user", "user", "--control", "Z", *METRICS], "expected 'Z' and another arm"),
        (["--user", "user", "--control", "A"], "--metric: expected one or more"),
        (["--control", "A", *METRICS], "--user: expected the name of a column"),
        (["--user", "user", "--control", "A", "--arms", "A", *METRICS], "expected NAME=SHARE"),
        (["--user", "user", "--control", "A", "--metric", "x=arm/rows"], "expected numbers"),
        (["--user", "user", "--control", "A", *METRICS, "--before", "LOG"], "also in the exper"),
    ],
    ids=["user", "control", "metric", "no user", "arms", "text", "before"],
)
def test_mistakes_are_one_line(log, capsys, words, message):
    words = [str(log / "log" / "dt=2026-01-02") if word == "LOG" else word for word in words]
    assert abtest.main(["analyze", str(log / "log"), *words]) == 2
    captured = capsys.readouterr().err
    assert message in captured and captured.count("\n") == 1


def test_an_assignment_of_a_damaged_file_leaves_nothing(tmp_path, capsys):
    (tmp_path / "users.parquet").write_bytes(b"PAR1")
    words = ["assign", str(tmp_path / "users.parquet"), "--user", "u", "--experiment", "x"]
    assert abtest.main([*words, "--output", str(tmp_path / "arms.parquet")]) == 2
    assert "users.parquet" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["users.parquet"]

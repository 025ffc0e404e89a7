# SPDX-License-Identifier: MIT
"""Scores of a log are those of the evaluation, whole or absent, on any number of ranks."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import runs
from tests.support.serving import predicted, read, rows_of, trained
from trainer import score
from trainer.serving.scoring import ScoreRequest
from trainer.serving.scoring import score as score_log
from trainer.telemetry.console import Console
from trainer.warm_start.policies import resolve


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=330)


@pytest.fixture(scope="module")
def unlabelled(logs, tmp_path_factory):
    """The same log without labels."""
    folder = tmp_path_factory.mktemp("unlabelled")
    for path in sorted(logs.glob("dt=*/*.parquet")):
        rows = pq.read_table(path, partitioning=None)
        (folder / path.parent.name).mkdir(exist_ok=True)
        kept = rows.drop_columns(["click", "like"])
        pq.write_table(kept, folder / path.parent.name / path.name, row_group_size=100)
    return folder


@pytest.fixture(scope="module")
def run(logs, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "dlrm.demo", logs)


def scored(run, data, output, *words) -> int:
    return score.main([str(run), "--data", str(data), "--output", str(output), "--quiet", *words])


def _predicted(runtime, run, logs):
    return predicted(runtime, run, logs)


def _scored(runtime, run, data, output):
    request = ScoreRequest(data=str(data), output=output, vectors=("representation",), batch_size=7)
    return score_log(resolve(run), request, runtime, Console("quiet"))


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2])
def test_scores_equal_the_trainers_evaluation(
    processes, run, logs, unlabelled, tmp_path, world_size
):
    expected = np.concatenate(processes.run(_predicted, run, logs))
    for found in processes.run(
        _scored, run, unlabelled, tmp_path / "scores", world_size=world_size
    ):
        assert (found["rows"], found["days"], found["there"]) == (660, 2, 0)
    table = read(tmp_path / "scores" / f"dt={runs.DAYS[1]}")
    for task, name in enumerate(("click", "like")):
        np.testing.assert_allclose(
            table[f"{name}_probability"].to_numpy(), expected[:, task], atol=1e-6, rtol=0
        )
    rows = rows_of(unlabelled)
    for name in ("user_id", "item_id"):
        assert table[name].combine_chunks() == rows[name].combine_chunks()
    assert len(set(table["model_version"].to_pylist())) == 1
    assert table["representation_vector"].null_count == 0
    names = sorted(path.name for path in (tmp_path / "scores").iterdir())
    assert names == [*(f"dt={day}" for day in runs.DAYS), "scores.json"]


def test_the_same_command_goes_on_with_the_days_that_are_missing(run, logs, tmp_path, capfd):
    output = tmp_path / "scores"
    assert scored(run, logs, output, "--days", runs.DAYS[0], "--columns", "user_id") == 0
    (first,) = output.glob("dt=*/*.parquet")
    before = first.stat().st_mtime_ns
    (output / f".dt={runs.DAYS[1]}.partial").mkdir()  # what a killed process left
    (output / f".dt={runs.DAYS[1]}.partial" / "part-00007.parquet").write_bytes(b"half")
    assert scored(run, logs, output, "--columns", "user_id") == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["days"], found["there"], found["rows"]) == (1, 1, 330)
    assert first.stat().st_mtime_ns == before
    assert [path.name for path in (output / f"dt={runs.DAYS[1]}").iterdir()] == [
        "part-00000.parquet"
    ]
    assert not list(output.glob(".*"))
    assert found["changed"] == 0


def test_scored_days_whose_rows_have_changed_are_named(run, unlabelled, tmp_path, capfd):
    log, output = tmp_path / "log", tmp_path / "scores"
    shutil.copytree(unlabelled, log)
    assert scored(run, log, output) == 0
    (first,) = (log / f"dt={runs.DAYS[0]}").iterdir()
    pq.write_table(pq.read_table(first, partitioning=None).slice(1), first)
    capfd.readouterr()
    assert scored(run, log, output) == 0
    said = capfd.readouterr()
    assert f"scored from other rows than the log has now: dt={runs.DAYS[0]};" in said.err
    found = json.loads(said.out.splitlines()[-1])
    assert (found["there"], found["changed"], found["rows"]) == (2, 1, 0)


@pytest.mark.dist
def test_ranks_without_rows_of_a_day_leave_files_that_read_as_one(
    processes, run, unlabelled, tmp_path
):
    day = tmp_path / "log" / f"dt={runs.DAYS[0]}"
    day.mkdir(parents=True)
    pq.write_table(rows_of(unlabelled).slice(0, 1), day / "a.parquet")
    processes.run(_scored, run, tmp_path / "log", tmp_path / "scores", world_size=2)
    table = read(tmp_path / "scores" / day.name)
    assert table.num_rows == 1
    assert table["representation_vector"].null_count == 0


def test_a_folder_of_other_scores_is_refused_by_what_differs(run, logs, tmp_path, capfd):
    output = tmp_path / "scores"
    assert scored(run, logs, output, "--days", runs.DAYS[0]) == 0
    assert scored(run, logs, output, "--columns", "item_id") == 2
    assert (
        "holds scores of another request (columns: None, now ['item_id']" in capfd.readouterr().err
    )
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "mine.txt").write_text("mine")
    assert scored(run, logs, tmp_path / "else") == 2
    assert "expected a new or empty folder or scores" in capfd.readouterr().err
    assert (tmp_path / "else" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--columns", "usr_id"], "expected one column 'usr_id', got 0, did you mean 'user_id'?"),
        (["--embeddings", "tower"], "expected some of representation, item, user, got 'tower'"),
        (["--days", "2027-01-01"], "expected files of days 2027-01-01 to 2027-01-01, got none"),
        (["--batch-size", "-1"], "--batch-size: expected at least 0, got -1"),
    ],
    ids=["columns", "embeddings", "days", "batch"],
)
def test_what_cannot_be_done_is_said(run, logs, tmp_path, capfd, words, said):
    assert scored(run, logs, tmp_path / "scores", *words) == 2
    assert said in capfd.readouterr().err


def test_a_row_that_the_schema_refuses_leaves_no_half_day(run, unlabelled, tmp_path, capfd):
    (tmp_path / "log").mkdir()
    rows = rows_of(unlabelled)
    names = rows.column_names
    bad = rows.set_column(names.index("price"), "price", pa.array([float("inf")] * len(rows)))
    pq.write_table(bad, tmp_path / "log" / "a.parquet")
    assert scored(run, tmp_path / "log", tmp_path / "scores") == 2
    assert "column 'price': expected a finite 32-bit number" in capfd.readouterr().err
    assert not (tmp_path / "scores" / "rows").exists()


def test_a_log_without_days_and_columns_of_any_type(run, unlabelled, tmp_path):
    (tmp_path / "log").mkdir()
    rows = rows_of(unlabelled)
    names = pa.array([None if i % 3 else f"row {i}" for i in range(len(rows))])
    rows = rows.append_column("name", names).append_column("tags", pa.array([["a"]] * len(rows)))
    pq.write_table(rows, tmp_path / "log" / "a.parquet", row_group_size=50)
    assert (
        scored(run, tmp_path / "log", tmp_path / "scores", "--columns", "name,tags,hist_item") == 0
    )
    table = read(tmp_path / "scores" / "rows")
    for name in ("name", "tags", "hist_item"):
        assert table[name].combine_chunks() == rows[name].combine_chunks()

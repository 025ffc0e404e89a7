# SPDX-License-Identifier: MIT
"""Inputs that once went wrong, each with what it must give; the files lie outside the repository.

Without the folder ../shared/cases these are skipped. Inputs of the same kinds that need no folder
are in the tests beside this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embeddings.schema.schema import load_schema
from pipelines.ingest import describe, ingest
from pipelines.ingestion.ingestion import IngestConfig
from pipelines.schema import main as propose
from tests.support.raw_logs import xxh
from trainer.config.command_line import apply_overrides
from trainer.config.fit_to_log import choose_split, unsaid
from trainer.data.columns import to_integers
from trainer.data.files import RowInterval, days_of, discover
from trainer.data.loader import LoaderConfig
from trainer.data.reader import LogReader
from trainer.recipes.load import load_recipe

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the folder of cases is not here")


@pytest.fixture
def case(tmp_path, monkeypatch):
    """Return a function that copies a case, makes its input, and goes there."""

    def enter(name: str) -> Path:
        for file in ("gen.py", "schema.yaml"):
            shutil.copyfile(CASES / file, tmp_path / file)
        folder = tmp_path / name
        shutil.copytree(CASES / name, folder, copy_function=shutil.copyfile)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        monkeypatch.chdir(folder)
        if (folder / "make.py").exists():
            subprocess.run([sys.executable, "make.py"], check=True, timeout=120)
        return folder

    return enter


def take(source: str, schema: str = "s.yaml", **settings):
    """Ingest a source into `out`; return the summary and the rows."""
    config = IngestConfig(day="2026-01-01" if schema == "s.yaml" else "", **settings)
    summary = ingest([source], load_schema(schema), "out", config)
    parts = sorted(Path("out").glob("dt=*/*.parquet"))
    return summary, [pq.read_table(part, partitioning=None) for part in parts]


def test_binary_ids_are_hashed_as_training_hashes_them(case):
    case("binary-ids-ingest")
    summary, (rows,) = take("a.parquet")
    raw = pq.read_table("a.parquet").column("item").combine_chunks()
    assert rows.column("item").to_pylist() == to_integers(raw, "item")[0].tolist()
    assert summary.rows_bad == 0


def test_newlines_in_quotes_at_the_border_of_a_block_are_read(case):
    case("csv-newline-at-block-border")
    summary, _ = take("a.csv")
    assert (summary.rows_in, summary.rows_bad) == (400_000, 0)


def test_decimals_stay_six_ids_and_are_proposed(case):
    case("decimal-ids-merge")
    _, (rows,) = take("a.parquet")
    assert sorted(rows.column("uid").to_pylist()) == [2**60 + i for i in range(6)]
    assert propose(["a2.parquet", "--output", "proposed.yaml"]) == 0
    text = Path("proposed.yaml").read_text("utf-8")
    assert "same value in every row" not in text and "dec_id: ids as decimals" in text


def test_a_table_of_delta_lake_is_refused(case):
    case("delta-table-folder")
    schema = load_schema("../schema.yaml")
    with pytest.raises(ValueError, match="a table of Delta Lake"):
        discover("logs", None, schema)
    with pytest.raises(ValueError, match="a table of Delta Lake"):
        ingest(["logs"], schema, "out")
    assert propose(["logs", "--output", "proposed.yaml"]) == 2


def test_a_dotted_column_beside_a_struct_is_read(case):
    case("dotted-column-beside-struct")
    schema = load_schema("s.yaml")
    (file,) = discover("a.parquet", None, schema)
    place = RowInterval(path=file.path, row_group=0, start=0, stop=file.row_group_rows[0])
    got = [value for part in LogReader(schema).read(place) for value in part["user.id"].to_pylist()]
    assert got == pq.ParquetFile("a.parquet").read_row_group(0).column("user.id").to_pylist()


def test_a_file_whose_name_is_not_utf_8_is_read(case):
    case("file-name-not-utf8")
    schema = load_schema("../schema.yaml")
    assert sum(file.num_rows for file in discover("logs", None, schema)) == 1_800
    summary, _ = take("logs", "../schema.yaml")
    assert summary.rows_in == 1_800
    assert propose(["logs", "--output", "s.yaml"]) == 0


def test_files_of_every_name_are_read_or_named(case):
    case("files-skipped-by-name")
    summary, _ = take("logs")
    assert (summary.files, summary.rows_bad) == (3, 0)


def test_lists_as_json_writes_them_are_lists(case):
    case("json-lists-in-csv")
    assert propose(["a.csv", "--output", "s.yaml"]) == 0
    _, (rows,) = take("a.csv", list_separator=",")
    ids = np.unique(rows.column("hist").combine_chunks().flatten().to_numpy())
    assert ids.tolist() == list(range(7))
    assert xxh("[3") not in ids


def test_the_last_day_of_an_own_log_tests(case):
    case("recipe-days-on-own-log")
    base = load_recipe("dlrm.demo")
    words = ["--data.path", "logs", "--data.schema", "../schema.yaml"]
    config, note = choose_split(apply_overrides(base, words), unsaid(base.data, words), Path("run"))
    assert config.data.train_days == "2026-01-03:2026-01-11"
    assert config.data.test_days == "2026-01-12" and "rows chosen" in note


def test_the_file_that_a_resume_is_refused_for_is_named(case):
    case("recipe-days-on-own-log")
    schema = load_schema("../schema.yaml")
    config = LoaderConfig(batch_size=64)
    loader = config.build(discover("logs", None, schema), schema)
    next(iter(loader))
    shutil.copyfile("logs/dt=2026-01-04/a.parquet", "logs/dt=2026-01-05/late.parquet")
    again = config.build(discover("logs", None, schema), schema)
    with pytest.raises(ValueError, match=r"new: 2026-01-05/late\.parquet.*begin a new pass"):
        again.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_stray_quotes_lose_no_row(case, name):
    case("stray-quotes-lose-rows")
    summary, (rows,) = take(name)
    assert summary.rows_in == 1_000
    assert rows.num_rows + summary.rows_bad == 1_000
    assert summary.rows_bad == (0 if name == "a.tsv" else 1)
    assert set(rows.column("price").to_pylist()) <= {i * 0.5 for i in range(1, 1_001)}
    summary = ingest([name], load_schema("s.yaml"), "none", IngestConfig(day="2026-01-01"))
    assert ("note: tab-separated" in describe(summary)) == (name == "a.tsv")


def test_a_day_behind_a_link_is_a_day(case):
    case("symlinked-day-skipped")
    schema = load_schema("../schema.yaml")
    days = ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert days_of("logs") == days
    summary, _ = take("logs", "../schema.yaml")
    assert (summary.files, list(summary.days)) == (3, days)
    assert propose(["logs", "--output", "proposed.yaml"]) == 0
    assert "in 3 days" in Path("proposed.yaml").read_text("utf-8")
    for day in days[::2]:
        os.rename(f"logs/dt={day}", f"archive/dt={day}")
        os.symlink(os.path.abspath(f"archive/dt={day}"), f"logs/dt={day}")
    assert days_of("logs") == days and len(discover("logs", None, schema)) == 3
    assert ingest(["logs"], schema, "again").rows_in == 1_800


def test_a_repeated_key_of_a_schema_is_refused(case):
    case("yaml-repeated-key")
    with pytest.raises(ValueError, match=r"s\.yaml, line \d+: key 'sparse' is already given"):
        load_schema("s.yaml")

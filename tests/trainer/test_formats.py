# SPDX-License-Identifier: MIT
"""This version loads the run and the checkpoints that lie in tests/data, or refuses them by name.

The folder was written by `python -m tests.data.write_run` when its format was new. Metrics are
compared with a tolerance: another machine may take other kernels.
"""

import json
import shutil

import pytest

from tests.data import write_run
from tests.support.runs import DAYS
from trainer import compare, evaluate
from trainer.checkpoint.layout import FORMAT, MANIFEST

STEP = "run/checkpoints/step-3"
NAMES = ("auc", "logloss", "ne", "calibration", "rows")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the written folder, in which the test works."""
    copied = shutil.copytree(write_run.FOLDER, tmp_path / "copy")
    monkeypatch.chdir(copied)
    return copied


def close(found, written):
    assert {name: found[name] for name in NAMES} == {
        name: pytest.approx(written[name], rel=1e-3) for name in NAMES
    }


@pytest.mark.parametrize("path", ["run", STEP])
def test_the_written_model_is_evaluated_as_it_was(folder, capsys, path):
    assert evaluate.main([path, "--data", "logs", "--days", DAYS[1]]) == 0
    close(
        json.loads(capsys.readouterr().out), json.loads((folder / "run/metrics.json").read_text())
    )


def test_the_written_model_is_compared_with_itself(folder, capsys):
    assert compare.main([STEP, STEP, "--data", "logs", "--replicates", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["auc"]["difference"] == 0


def test_the_written_run_is_resumed_and_ends_as_it_did(folder, capsys):
    written = json.loads((folder / "run/metrics.json").read_text())
    (folder / "run/metrics.json").unlink()
    shutil.rmtree(folder / STEP)
    assert write_run.train(folder / "run") == 0
    assert "resumed at step 2 of 3" in capsys.readouterr().err
    found = json.loads((folder / "run/metrics.json").read_text())
    close(found, written)
    assert found["steps"] == written["steps"] and found["train_rows"] == written["train_rows"]


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused_by_its_number(folder, capsys, number):
    content = json.loads((folder / STEP / MANIFEST).read_text())
    del content["checksum"]
    (folder / STEP / MANIFEST).write_text(json.dumps(content | {"format": number}))
    assert evaluate.main(["run", "--data", "logs"]) == 2
    told = capsys.readouterr().err
    assert f"a checkpoint of format {number}, this version reads format {FORMAT}" in told


def test_the_written_folder_is_small_and_names_no_machine():
    files = [path for path in write_run.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        if path.suffix in (".json", ".jsonl", ".yaml"):
            assert not any(word in path.read_text() for word in ("/home", "/tmp", "/root", "/work"))

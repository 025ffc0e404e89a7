# SPDX-License-Identifier: MIT
"""The demo's own logic and, through torchx, one recipe on two nodes from logs to table and page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.train import main

ROOT = Path(__file__).resolve().parents[2]


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


@pytest.mark.launch
def test_one_recipe_goes_from_logs_to_table_and_page_through_torchx(tmp_path):
    output = tmp_path / "demo"
    done = command(
        *("-m", "pipelines.demo", "--output", str(output), "--recipes", "dlrm.demo"),
        *("--rows-per-day", "1500"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "$ torchx run -s local_cwd deploy/components.py:train" in done.stdout
    metrics = json.loads((output / "dlrm.demo/metrics.json").read_text())
    ceiling = json.loads((output / "logs/ceiling.json").read_text())
    assert metrics["world_size"] == 2
    assert metrics["rows"] == 1500
    assert metrics["ceiling_auc"] == ceiling["days"]["2026-01-04"]["click"]["auc"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("dlrm.demo"))
    auc, ceiling = metrics["auc"], metrics["ceiling_auc"]
    shown = f"{auc:.4f} ± {metrics['auc_standard_error']:.4f} {ceiling:.4f} {ceiling - auc:.4f}"
    assert " ".join(row.split()[1:6]) == shown
    page = (output / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    evaluated = command(
        *("-m", "trainer.evaluate", str(output / "dlrm.demo"), "--data", str(output / "logs")),
        *("--days", "2026-01-04"),
    )
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    assert json.loads(evaluated.stdout)["auc"] == pytest.approx(metrics["auc"], rel=1e-6)
    again = command(
        *("-m", "trainer.train", "dlrm.demo", "--output", str(output / "dlrm.demo")),
        *("--data.path", str(output / "logs")),
    )
    assert again.returncode == 2
    assert "holds a finished run" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["specfomer.demo", "--output", "x"], "did you mean 'specformer.demo'"),
        (["dlrm.demo", "--output", "x", "--data.pth", "y"], "did you mean '--data.path'"),
        (["dlrm.demo"], "--output DIR is needed"),
    ],
)
def test_a_wrong_command_ends_with_one_message_and_code_2(words, expected, tmp_path, capsys):
    words = [str(tmp_path / "x") if word == "x" else word for word in words]
    assert main(words) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.launch
def test_a_wrong_path_ends_with_one_message_and_code_2(tmp_path):
    words = ("--output", str(tmp_path / "x"), "--data.path", "/nowhere")
    done = command("-m", "trainer.train", "dlrm.demo", *words)
    assert done.returncode == 2
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_setting_that_no_log_can_have_ends_with_one_message(tmp_path):
    done = command("-m", "pipelines.demo", "--output", str(tmp_path / "x"), "--rows-per-day", "0")
    assert done.returncode == 1
    assert done.stderr == "error: rows_per_day must be at least 1, got 0\n"


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    done = command("-m", "pipelines.demo", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty" in done.stderr

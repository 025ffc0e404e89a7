# SPDX-License-Identifier: MIT
"""What the runbook tells whoever is on call to type, set or look at is there and works."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from trainer.config.overrides import setting_names
from trainer.recipes.load import load_recipe
from trainer.telemetry.alerts import ADVICE
from trainer.telemetry.prometheus_metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "deploy" / "RUNBOOK.md").read_text("utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", RUNBOOK, re.DOTALL | re.MULTILINE)
# Commands of the shell, in blocks and in sentences; ours are in tests/test_howto.py.
SHELL = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("python")]
SHELL += re.findall(r"`((?:curl|grep|ls|rm) [^`]+)`", RUNBOOK)
# What only whoever is on call can run: it reads the kernel's log, wants a package, a run or takes.
UNTRIED = ("dmesg", "py-spy", "nproc; iostat", "curl", "rm")


@pytest.fixture
def run(tmp_path):
    """A folder with what a run and a night that once failed have left."""
    (tmp_path / "RUN" / "checkpoints" / "step-2").mkdir(parents=True)
    lines = ["step 1", "ALERT auc_stuck", "error: something", "error: again"]
    (tmp_path / "RUN.log").write_text("\n".join(lines))
    candidate = tmp_path / "DIR" / "nights" / "DATE" / ".candidate.unfinished"
    candidate.mkdir(parents=True)
    (candidate / "log.txt").write_text("error: something\n")
    (candidate.parent / ".lock").write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize("line", SHELL)
def test_a_command_of_the_shell_runs(line, run):
    subprocess.run(["bash", "-n", "-c", line], check=True)
    if line.startswith(UNTRIED):
        return
    done = subprocess.run(["bash", "-c", line], cwd=run, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_there_are_as_many_that_run_as_there_are_that_cannot():
    untried = [line for line in SHELL if line.startswith(UNTRIED)]
    assert len(untried) == len(UNTRIED) <= len(SHELL) / 2


def test_every_setting_series_alert_and_panel_it_names_exists():
    settings = set(re.findall(r"--[a-z]+\.[a-z.-]+[a-z]", RUNBOOK))
    assert settings <= set(setting_names(load_recipe("specformer.demo")))
    assert len(settings) >= 8
    named = set(re.findall(r"`(fullrank_[a-z_]+)`", RUNBOOK))
    assert named and named <= {metric.full_name for metric in METRICS}
    section = RUNBOOK.partition("## FullRankAlert")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z_]+)`[:, and]", section)) - {"alert"} >= set(ADVICE)
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "fullrank.json").read_text("utf-8"))
    titles = {panel["title"] for panel in dashboard["panels"]}
    panels = re.findall(r'(?:dashboard\'s "([^"]+)"|"([^"]+)" on the dashboard)', RUNBOOK)
    assert len(panels) >= 2 and {one or other for one, other in panels} <= titles

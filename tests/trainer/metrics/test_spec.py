# SPDX-License-Identifier: MIT
"""A metric is one entry and one function: every place that shows metrics has it then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.metrics.functions import FUNCTIONS
from trainer.metrics.spec import METRICS, choosable
from trainer.telemetry.dashboard import with_metrics

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "fullrank.json").read_text("utf-8"))
# What adds a metric: an entry of spec.py and a function of functions.py, before others read them.
ADD = """
import json
import numpy as np
from trainer.metrics import functions, spec
spec.METRICS["brier"] = spec.Metric(
    name="brier", title="Brier score", meaning="Mean squared error", better="lower", gate=0.01
)
functions.FUNCTIONS["brier"] = functions.row_mean("squares", lambda p, y: (p - y) ** 2)

import argparse, pathlib, torch
from pipelines.nightly.gates import GateConfig
from pipelines.nightly.night_metrics import collect
from pipelines.orchestration.run_status import RunStatus
from pipelines.orchestration.threshold_options import add_thresholds
from pipelines.report import report
from trainer.evaluation.comparison import Paired
from trainer.evaluation.slices import reported
from trainer.metrics.details import Details
from trainer.metrics.metrics import Metrics
from trainer.telemetry.dashboard import with_metrics
from trainer.telemetry.prometheus_metrics import BY_NAME, document
from trainer.telemetry.summary_lines import difference_line, evaluation_line

draw = np.random.default_rng(0)
p, q = (torch.tensor(draw.random((500, 1)), dtype=torch.float32) for _ in range(2))
y = (torch.tensor(draw.random((500, 1))) < p).float()
ones, users = torch.ones(500, 1), torch.arange(500) // 5 + 1
metrics, details = Metrics(["click"]), Details(10)
details.begin(metrics)
for one in (metrics, details):
    one.update(p, y, ones, users)
values = metrics.compute()
details.finish(values)
pair = Paired(2, 10, grouped=True)
pair.update(torch.cat([p, q], 1), y[:, 0], ones[:, 0], users)
compared = pair.finish()
run = pathlib.Path("run")
run.mkdir()
(run / "config.json").write_text("{}")
(run / "metrics.json").write_text(json.dumps(values))
(run / "evaluation.json").write_text(json.dumps(details.values))
page = report([run], pathlib.Path("page.html")).read_text("utf-8")
parser = argparse.ArgumentParser()
add_thresholds(parser, "gate", GateConfig)
differences = {**compared["differences"], "brier": {"difference": 0.05, "interval": [0.02, 0.08]}}
reasons = GateConfig().reasons(values, values, differences)
night = collect("2026-01-01", RunStatus(metrics={"evaluation": {"models": [values]}}))
dashboard = with_metrics(json.load(open("dashboard.json")))
print(json.dumps({
    "value": [values["brier"], float(((p - y) ** 2).mean())],
    "interval": details.values["intervals"]["brier"],
    "difference": [compared["differences"]["brier"], float(((p - y) ** 2 - (q - y) ** 2).mean())],
    "lines": [evaluation_line(values), difference_line("a", "b", compared["differences"])],
    "series": BY_NAME["evaluation_brier"].help,
    "document": document(),
    "panels": [(one["title"], one.get("targets")) for one in dashboard["panels"]],
    "page": page,
    "slices": reported(["click"]),
    "options": parser.format_help(),
    "reasons": reasons,
    "night": [*night.values],
    "choosable": spec.choosable(),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process with a metric more has, place by place."""
    folder = tmp_path_factory.mktemp("added")
    (folder / "dashboard.json").write_text(json.dumps(DASHBOARD))
    done = subprocess.run(
        [sys.executable, "-c", ADD],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_metric_has_its_value_an_interval_and_a_difference(found):
    value, expected = found["value"]
    assert value == pytest.approx(expected, abs=1e-6)
    low, high = found["interval"]
    assert low < value < high
    difference, expected = found["difference"]
    assert difference["difference"] == pytest.approx(expected, abs=1e-6)
    assert difference["interval"][0] < expected < difference["interval"][1]


def test_a_new_metric_is_in_logs_series_documents_panels_and_the_report(found):
    evaluated, compared = found["lines"]
    assert f"brier {found['value'][0]:.4f}" in evaluated and "brier " in compared
    assert found["series"].startswith("Mean squared error")
    assert "`fullrank_evaluation_brier`" in found["document"]
    panels = dict(found["panels"])
    (target,) = panels["Brier score, test rows"]
    assert target["expr"] == 'fullrank_evaluation_brier{run=~"$run"}'
    assert found["page"].count("Brier score</th>") + found["page"].count(">Brier score<") >= 2
    assert f"{found['value'][0]:.4f}" in found["page"]


def test_a_new_metric_is_in_slices_gates_nights_and_choices(found):
    assert "brier" in found["slices"] and "brier" in found["choosable"]
    assert "--gate-max-brier-gain" in found["options"]
    assert any(one.startswith("gain of brier (difference +0.05000") for one in found["reasons"])
    assert 'brier{model="candidate"}' in found["night"]


def test_every_entry_has_a_function_and_every_function_an_entry():
    assert FUNCTIONS.keys() == METRICS.keys()
    assert {name for name, one in METRICS.items() if one.name != name} == set()
    assert choosable() == ("auc", "gauc", "logloss", "ne")


def test_the_dashboard_shows_every_metric():
    assert with_metrics(DASHBOARD) == DASHBOARD


def test_a_metric_whose_panel_exists_is_added_to_it():
    panels = DASHBOARD["panels"]
    less = DASHBOARD | {
        "panels": [
            one | {"targets": one["targets"][:-1]} if one["title"] == "AUC" else one
            for one in panels
        ]
    }
    found, expected = (
        [
            target["expr"]
            for one in dashboard["panels"]
            if one["title"] == "AUC"
            for target in one["targets"]
        ]
        for dashboard in (with_metrics(less), DASHBOARD)
    )
    assert found == expected and len(found) == 3


def test_the_list_needs_neither_torch_nor_numpy():
    code = "import sys, trainer.metrics.spec; print(sorted({'torch', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("name", "better", "worse"), [("auc", 0.8, 0.7), ("logloss", 0.1, 0.2), ("calibration", 0.9, 2)]
)
def test_a_score_is_higher_for_a_better_value(name, better, worse):
    assert METRICS[name].score(better) > METRICS[name].score(worse)
    assert METRICS["calibration"].score(0.5) == pytest.approx(METRICS["calibration"].score(2.0))

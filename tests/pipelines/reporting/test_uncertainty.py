# SPDX-License-Identifier: MIT
"""Intervals, calibration, surroundings and nights on the page; the page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from pipelines.report import main
from pipelines.reporting.run_data import CHANGES
from tests.support.report_pages import page, write_run

STYLE = Path(__file__).resolve().parents[3] / "pipelines/reporting/templates/style.css"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVALUATION = {
    "step": 300,
    "intervals": {"auc": [0.737, 0.743], "logloss": [0.208, 0.212]},
    "reliability": {
        "bins": [
            {"low": 0.0, "high": 0.1, "weight": 900.0, "prediction": 0.05, "label": 0.04},
            {"low": 0.1, "high": 1.0, "weight": 900.0, "prediction": 0.3, "label": 0.35},
        ],
        "ece": 0.03,
    },
    "user_activity": [
        {
            "from_rows": 1,
            "to_rows": 1,
            "users": 5.0,
            "users_with_both": 0.0,
            "rows": 5.0,
            "gauc": None,
        },
        {
            "from_rows": 3,
            "to_rows": 4,
            "users": 9.0,
            "users_with_both": 4.0,
            "rows": 31.0,
            "gauc": 0.61,
        },
    ],
    "sampled_steps": 10,
    "phase_seconds": {"input_wait": 0.1, "dense_forward": 0.3},
}


def trusted(folder: Path, auc: float = 0.74, charts: bool = False, **config) -> Path:
    run = write_run(folder, auc, charts=charts)
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    old = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(old | config))
    return run


def test_intervals_calibration_activity_and_time_are_on_the_page(tmp_path):
    _, found = page([trusted(tmp_path / "run"), write_run(tmp_path / "old")], tmp_path)
    cells = next(row for row in found.cells if row[:1] == ["run"] and "[0.7370" in row[1])
    assert cells[1] == "0.7400 [0.7370, 0.7430]"
    assert cells[4] == "0.8800", "a metric without an interval stands alone"
    assert cells[-1] == "0.0300"
    assert "calibration-title" in found.ids
    assert found.row("0.1000 to 1.0000")[1:] == ["0.3000", "0.3500", "900"]
    assert found.row("3 to 4")[1:] == ["9", "4", "31", "0.6100"]
    assert ["run", "40.0", "25.0%", "75.0%"] in found.cells
    assert "bootstrap over users" in found.text
    _, bare = page([write_run(tmp_path / "bare", charts=False)], tmp_path)
    assert "No run has an evaluation.json with intervals" in bare.text


def test_each_label_of_a_run_of_several_has_its_intervals_and_its_plot(tmp_path):
    run = trusted(tmp_path / "run")
    metrics = json.loads((run / "metrics.json").read_text())
    like = {f"like_{key}": metrics[key] for key in ("auc", "ne", "logloss", "calibration")}
    (run / "metrics.json").write_text(json.dumps(metrics | like | {"click_auc": 0.74}))
    labels = {"click": EVALUATION, "like": EVALUATION | {"intervals": {"auc": [0.70, 0.78]}}}
    (run / "evaluation.json").write_text(json.dumps(EVALUATION | {"labels": labels}))
    _, found = page([run], tmp_path)
    assert found.row("run: click")[1] == "0.7400 [0.7370, 0.7430]"
    rows = [row for row in found.cells if row[:1] == ["run: like"]]
    assert "0.7400 [0.7000, 0.7800]" in [row[1] for row in rows]
    assert {"calibration-title", "calibration-1-title"} <= {*found.ids}
    assert "run: like: the bins" in found.text and "GAUC of run: like by users'" in found.text


def test_values_of_a_kind_that_no_run_writes_are_passed_over(tmp_path):
    run = trusted(tmp_path / "run")
    odd = {"alerts": 5, "nonfinite_predictions": "many", "gauc_users_sampled": "some"}
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, **odd}))
    kept = json.loads((run / "evaluation.json").read_text())
    odd = {"phase_seconds": "long", "intervals": 3, "reliability": [1], "user_activity": {"a": 1}}
    (run / "evaluation.json").write_text(json.dumps({**kept, **odd}))
    assert "predictions of the evaluation were not finite" not in page([run], tmp_path)[0]


def test_settings_that_are_not_the_recipes_are_listed(tmp_path):
    run = trusted(tmp_path / "run", recipe="dlrm.demo")
    setting = {"setting": "dense.learning_rate", "recipe": 0.002, "run": 0.5}
    (run / CHANGES).write_text(json.dumps({"recipe": "dlrm.demo", "settings": [setting]}))
    _, found = page([run], tmp_path)
    assert found.row("dense.learning_rate") == ["dense.learning_rate", "0.002", "0.5"]
    (run / CHANGES).write_text(json.dumps({"recipe": "dlrm.demo", "settings": []}))
    assert "every setting is that of dlrm.demo" in page([run], tmp_path)[1].text
    _, other = page([trusted(tmp_path / "other", recipe="acme:feed")], tmp_path)
    assert f"its folder has no {CHANGES}" in other.text


def test_a_run_stands_beside_the_one_before_it_and_the_best_on_the_same_rows(tmp_path):
    data = {"path": "logs", "test_days": "2026-01-02"}
    for number, (name, auc) in enumerate((("a", 0.75), ("b", 0.70), ("c", 0.74), ("d", 0.73))):
        run = trusted(tmp_path / "runs" / name, auc, data=data)
        os.utime(run / "metrics.json", (1_000 + number, 1_000 + number))
    trusted(tmp_path / "runs" / "elsewhere", 0.9, data=data | {"test_days": "2026-01-03"})
    _, found = page([tmp_path / "runs" / "c"], tmp_path)
    assert found.row("the one before: b")[-1] == "+0.0400"
    assert found.row("the best beside it: a")[-1] == "-0.0100"
    assert not [row for row in found.cells if row and "elsewhere" in row[0]]


def test_the_data_of_the_test_day_is_compared_with_the_day_before(tmp_path):
    day = tmp_path / "logs" / "dt=2026-01-02"
    day.mkdir(parents=True)
    statistics = {
        "columns": {
            "calm": {"count": 100, "nulls": 0, "cardinality": 9},
            "price": {"count": 100, "nulls": 20, "cardinality": 50, "mean": 3.5, "std": 1.0},
        },
        "drift": {
            "calm": {"null_share": 0.0, "cardinality": 1.0},
            "price": {"null_share": 0.1, "cardinality": 0.5, "mean": -0.75},
        },
    }
    (day / "_statistics.json").write_text(json.dumps(statistics))
    data = {"path": str(tmp_path / "logs"), "test_days": "2026-01-02"}
    _, found = page([trusted(tmp_path / "run", data=data)], tmp_path)
    assert found.row("price")[1:] == ["20.00%", "+10.00%", "50", "0.50", "3.5", "-0.75"]
    assert found.text.index("price") < found.text.index("calm")


def test_where_no_day_tests_or_none_has_statistics_it_is_said_which(tmp_path):
    share = trusted(tmp_path / "share", data={"path": "logs", "test_rows": "0.8:1"})
    assert "The run tests a share of the rows and no day" in page([share], tmp_path)[1].text
    day = trusted(tmp_path / "day", data={"path": "logs", "test_days": "2026-01-02"})
    assert "The log has no statistics of the test day" in page([day], tmp_path)[1].text


def stage(night: Path, name: str, **metrics) -> None:
    (night / name).mkdir(parents=True)
    manifest = {"metrics": metrics, "started": "2026-01-03T01:00:00Z", "seconds": 12.5}
    (night / name / "manifest.json").write_text(json.dumps(manifest))


def test_a_night_has_a_page_with_its_verdict_and_the_candidates_run(tmp_path):
    night = tmp_path / "nights" / "2026-01-02"
    stage(
        night,
        "days",
        date="2026-01-02",
        new=["2026-01-01"],
        rows={"2026-01-01": 900, "2026-01-02": 300},
    )
    stage(night, "candidate", summary="auc 0.74")
    trusted(night / "candidate" / "run")
    models = [{"auc": 0.74, "rows": 300.0}, {"auc": 0.75, "rows": 300.0}]
    differences = {"auc": {"difference": -0.01, "interval": [-0.015, -0.005]}, "mean_move": 0.05}
    stage(night, "evaluation", models=models, differences=differences)
    stage(night, "verdict", promote=False, reasons=["auc fell by <0.01>"])
    _, found = page([night], tmp_path)
    assert "FullRank night of 2026-01-02" in found.text
    assert "Refused: the model before goes on serving." in found.text
    assert "auc fell by <0.01>" in found.text
    assert found.row("serving before")[1] == "0.7500"
    assert ["AUC", "-0.0100", "-0.0150 to -0.0050"] in found.cells
    assert found.row("Mean move")[1:] == ["0.0500", "–"]
    links = {one["href"][1:] for tag, one in found.attributes if tag == "a"}
    assert links <= {*found.ids} and "night" in links
    assert found.row("2026-01-02")[1] == "tests"
    assert found.row("publication")[1] == "not made"
    assert found.row("candidate")


def test_a_night_that_ended_early_shows_what_it_made_and_stands_alone(tmp_path, capsys):
    night = tmp_path / "2026-01-02"
    stage(night, "days", date="2026-01-02", new=[], rows={})
    _, found = page([night], tmp_path)
    assert "The night ended before its verdict." in found.text
    assert "before its candidate was trained" in found.text
    assert main([str(night), str(night), "--output", str(tmp_path / "x.html")]) == 2
    assert "a night has a page of its own" in capsys.readouterr().err


def colours(text: str) -> dict[str, str]:
    """Return the colours that a block of the page's style names."""
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", text))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_have_the_contrast_that_wcag_aa_asks_for(scheme):
    style = STYLE.read_text("utf-8")
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    found = colours(light) | (colours(dark) if scheme == "dark" else {})
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert {"ink", "soft", "warn", "series-7"} <= found.keys()
    for text, grounds in {
        "ink": ("page", "card", "best"),
        "soft": ("page", "card"),
        "warn": ("warn-page",),
    }.items():
        for ground in grounds:
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for name in found:
        if name.startswith("series"):  # parts of a figure that carry its meaning: 3
            assert contrast(found[name], found["card"]) >= 3, name
    others = {name for name in found if not name.startswith("series")}
    assert others == {"page", "card", "ink", "soft", "grid", "best", "warn", "warn-page"}


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_on_a_phone_in_both_schemes(tmp_path, scheme):
    page([trusted(tmp_path / "run", charts=True)], tmp_path)
    words = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        f"--user-data-dir={tmp_path / 'profile'}",
        *(
            ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
            if scheme == "dark"
            else ()
        ),
        "--window-size=500,2000",
    ]
    address = (tmp_path / "out" / "report.html").as_uri()
    shot = tmp_path / "shot.png"
    subprocess.run(
        [CHROMIUM, *words, f"--screenshot={shot}", address],
        check=True,
        capture_output=True,
        timeout=120,
    )
    picture = shot.read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (500, 2000)
    if scheme == "dark":
        return
    done = subprocess.run(
        [CHROMIUM, *words, "--dump-dom", address], check=True, capture_output=True, timeout=120
    )
    dom = done.stdout.decode()
    for heading in ("Summary", "Intervals and calibration", "Training curves", "Configuration"):
        assert f">{heading}</h2>" in dom
    assert dom.count("<svg") >= 6

# SPDX-License-Identifier: MIT
"""Runs' folders as a trainer leaves them, the page of a report, and what a test asks of it."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

from pipelines.report import report

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(html.parser.HTMLParser):
    """Checks nesting while it collects what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.feed(text)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.attributes.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1][-1] += data

    def row(self, name: str) -> list[str]:
        return next(cells for cells in self.cells if cells[0] == name)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.attributes)


def write_run(folder: Path, auc: float = 0.74, charts: bool = True, **metrics) -> Path:
    """Write a run's folder; without charts the page is ten times as fast to make."""
    folder.mkdir(parents=True)
    tower = {"type": "SpecFormerConfig", "num_layers": 2}
    config = {"model": {"tower": tower}, "schema": {"user": "user_id"}, "seed": 7}
    (folder / "config.json").write_text(json.dumps(config))
    values = {
        "auc": auc,
        "auc_standard_error": 0.0012,
        "label_mean": 0.1,
        "gauc": None,
        "logloss": 0.21,
        "ne": 0.88,
        "calibration": 1.01,
        "rows_per_second": 21000.4,
        "input_wait": 0.034,
        "world_size": 2,
        "rows": 180000.0,
    }
    (folder / "metrics.json").write_text(json.dumps(values | metrics))
    with (folder / "curves.jsonl").open("w") as file:
        for step in range(10, 310, 10) if charts else ():
            point = {"step": step, "rows": step * 100, "loss": 1 / step, "auc": 0.5 + step / 1000}
            point |= {"rows_per_second": 2e4, "input_wait": 0.03, "alerts": []}
            file.write(json.dumps(point if step > 10 else point | {"auc": None}) + "\n")
    if charts:
        records = [
            {
                "step": step,
                "layer": layer,
                "module": module,
                "path": f"layers.{layer}.{module}",
                "erank": 5.0,
                "ferank": 0.5 + layer / 10,
                "stable_rank": 2.0,
                "tau": 0.5 if module == "attention" else None,
                "beta": [0.0, 1.0, 0.125],
            }
            for step in (100, 300)
            for layer in range(2)
            for module in ("tokens", "attention")
        ]
        once = {"layer": 0, "step": 300}
        records += [
            once | {"module": "gradient", "path": "inputs", "spectrum": [0.6, 0.9, 1.0]},
            once | {"module": "table", "path": "item", "ferank": 0.8, "spectrum": [0.7, 1.0]},
            once | {"module": "layer", "path": "inputs", "ferank": 0.9, "spectrum": [0.4, 1.0]},
            once | {"module": "clusters", "mutual_information": 0.03, "label_entropy": 0.6},
        ]
        (folder / "ranks.json").write_text(json.dumps(records))
    return folder


def page(runs, tmp_path) -> tuple[str, Page]:
    text = report(runs, tmp_path / "out" / "report.html").read_text()
    return text, Page(text)

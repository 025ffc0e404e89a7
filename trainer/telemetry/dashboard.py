# SPDX-License-Identifier: MIT
"""Keeps the Grafana dashboard in step with the list of metrics.

Each metric of `trainer/metrics/spec.py` is shown in the panel that its entry names; one that no
panel shows gets a panel of its own, below the others, which may then be moved by hand.
python -m trainer.telemetry.dashboard deploy/grafana/fullrank.json
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from trainer.metrics.spec import METRICS
from trainer.runtime.program import Parser, program
from trainer.telemetry.prometheus_metrics import PREFIX

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
# The panel that new ones are made like.
_MODEL = "Normalised entropy, test rows"


def with_metrics(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard with every metric in it; the same where nothing is missing."""
    dashboard = copy.deepcopy(dashboard)
    panels = dashboard["panels"]
    shown = json.dumps(panels)
    bottom = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels)
    added = 0
    for metric in METRICS.values():
        series = f"{PREFIX}{metric.prometheus}{{"
        if series in shown:
            continue
        expression = f'{series}run=~"$run"}}'
        panel = next((one for one in panels if one["title"] == metric.panel_title), None)
        if panel is None:
            panel = copy.deepcopy(next(one for one in panels if one["title"] == _MODEL))
            place = divmod(added, _COLUMNS // _WIDTH)
            panel |= {
                "title": metric.panel_title,
                "description": f"{metric.meaning}.",
                "id": 1 + max(one["id"] for one in panels),
                "gridPos": {
                    "x": place[1] * _WIDTH,
                    "y": bottom + place[0] * _HEIGHT,
                    "w": _WIDTH,
                    "h": _HEIGHT,
                },
            }
            panel["targets"] = [panel["targets"][0] | {"expr": expression}]
            panels.append(panel)
            added += 1
        else:
            last = panel["targets"][-1]
            letter = chr(ord(last["refId"]) + 1)
            panel["targets"].append(last | {"expr": expression, "refId": letter})
    return dashboard


def main(arguments: list[str] | None = None) -> None:
    """Write the dashboard with the metrics that it lacked."""
    about = "Add panels for metrics that the dashboard does not show."
    parser = Parser(prog=program("trainer.telemetry.dashboard"), description=about)
    parser.add_argument("dashboard", type=Path, help="the dashboard's JSON")
    path: Path = parser.parse_args(arguments).dashboard
    found = with_metrics(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

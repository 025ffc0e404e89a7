# SPDX-License-Identifier: MIT
"""The page of a sweep: the best settings, what each setting matters, every trial."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pipelines.reporting.svg_charts import Axes, Line, chart
from trainer.runtime.printable import printable

_DASH = "–"


def sweep_page(result: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return the page of a sweep's result.

    Args:
        result: as `pipelines.tuning.sweep.Sweep.result` returns it.
        words: the best trial's settings as words of the command line.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True
    )
    trials, metric, best = result["trials"], result["metric"], result["best"]
    finished = sum(one["state"] == "complete" for one in trials)
    importance = sorted(result["importance"].items(), key=lambda pair: -pair[1])
    return environment.get_template("sweep.html.j2").render(
        title=f"Sweep of {printable(result['recipe'])}",
        counts=f"{finished} trials finished, {len(trials) - finished} ended early",
        best=f"{metric} {best[metric]:.4f} in trial {best['trial']}" if best else "",
        words=printable(shlex.join(words)),
        pictures=_pictures(trials, metric, [one["setting"] for one in result["space"]]),
        importance=_table(
            ("setting", "share"), [(printable(name), f"{value:.0%}") for name, value in importance]
        ),
        trials=_table(*_trials(trials, metric)),
    )


def _pictures(
    trials: Sequence[Mapping[str, Any]], metric: str, settings: Sequence[str]
) -> list[tuple[str, Markup]]:
    """Return the metric by trial, and by the value of each setting that is a number."""
    done = [one for one in trials if one["state"] == "complete"]
    if len(done) < 2:
        return []
    found = []
    for number, name in enumerate(["", *settings]):
        values = [one["settings"].get(name) if name else one["trial"] for one in done]
        if not all(isinstance(value, int | float) for value in values):
            continue
        points = sorted((float(x), one[metric]) for x, one in zip(values, done, strict=True))
        label = printable(name) if name else "trial"
        axes = Axes(title=f"{metric} by {label}", x=label, y=metric, plain_x=bool(name))
        svg = chart(f"by-{number}", axes, [Line(label=metric, series=0, points=points)])
        if svg:
            found.append((f"{metric} by {label}", Markup(svg)))
    return found


def _trials(
    trials: Sequence[Mapping[str, Any]], metric: str
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table of trials."""
    names = list(dict.fromkeys(name for one in trials for name in one["settings"]))
    rows = []
    for one in trials:
        value = f"{one[metric]:.4f}" if one[metric] is not None else _DASH
        settings = [_value(one["settings"].get(name)) for name in names]
        state = "finished" if one["state"] == "complete" else "ended early"
        seconds = f"{one['seconds']:.0f}" if one["seconds"] is not None else _DASH
        rows.append((str(one["trial"]), value, *settings, state, seconds))
    return ("trial", metric, *map(printable, names), "state", "seconds"), rows


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    return {"header": list(head), "rows": list(rows), "best": {}, "hints": {}}

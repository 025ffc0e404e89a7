# SPDX-License-Identifier: MIT
"""The page of an A/B test: the verdict, a picture of every lift, what makes it doubtful, tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pipelines.reporting.interval_chart import Interval, interval_chart
from pipelines.reporting.svg_charts import Axes, Line, chart
from trainer.runtime.printable import printable

DASH = "–"


def experiment_page(result: Mapping[str, Any], title: str) -> str:
    """Return the page of what `pipelines.experiments.analysis.analyse` has found."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=False,
    )
    template = environment.get_template("experiment.html.j2")
    return template.render(
        title=printable(title),
        verdicts=result["verdicts"],
        doubts=result["doubts"],
        pictures=_pictures(result),
        looks=_looks(result),
        arms=_arms(result),
        metrics=_metrics(result),
        level=f"{result['level']:.0%}",
        rows=f"{result['rows']:,}",
        ratio=f"{result['sample_ratio_p']:.3g}",
    )


def _pictures(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Return a picture of the lifts of each metric, one dot an arm and kind of estimate."""
    pictures = []
    for number, (name, metric) in enumerate(result["metrics"].items()):
        lines = []
        for arm, effect in metric["effects"].items():
            kinds = [(arm, effect, "lift_low", "lift", "lift_high")]
            kinds += [(f"{arm}, bootstrap", effect, "bootstrap_low", "lift", "bootstrap_high")]
            kinds += [(f"{arm}, CUPED", effect.get("cuped", {}), "lift_low", "lift", "lift_high")]
            kinds += [
                (f"{arm}, any look", look, "low", "lift", "high")
                for look in effect.get("looks", [])[-1:]
            ]
            for label, source, *keys in kinds:
                values = [source.get(key) for key in keys]
                if None not in values:
                    lines.append(
                        Interval(label=label, low=values[0], value=values[1], high=values[2])
                    )
        svg = interval_chart(f"lift-{number}", f"Lift of {name}", lines, _percent)
        if svg:
            pictures.append((f"Lift of {printable(name)} over {result['control']}", Markup(svg)))
    return pictures


def _looks(result: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Return a chart of the lift and its ends by look, of each metric and arm."""
    charts = []
    for name, metric in result["metrics"].items():
        for arm, effect in metric["effects"].items():
            looks = effect.get("looks", [])
            lines = []
            for series, key in enumerate(("lift", "low", "high")):
                points = [
                    (i + 1, 100 * one[key]) for i, one in enumerate(looks) if one[key] is not None
                ]
                label = {"lift": "lift", "low": "lower end", "high": "upper end"}[key]
                lines.append(Line(label=label, series=series, points=points))
            title = f"{name}, {arm}: lift by look"
            axes = Axes(title=title, x="days", y="lift, %", whole_x=True)
            if svg := chart(f"look-{len(charts)}", axes, lines):
                charts.append((printable(title), Markup(svg)))
    return charts


def _arms(result: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        (printable(name), f"{arm['users']:,}", f"{arm['share']:.2%}", f"{arm['planned']:.2%}")
        for name, arm in result["arms"].items()
    ]
    return _table(("arm", "users", "share", "planned"), rows)


def _metrics(result: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return a table for each metric: one row an arm."""
    tables = []
    for name, metric in result["metrics"].items():
        rows = []
        for arm, value in metric["values"].items():
            effect = metric["effects"].get(arm, {})
            cuped = effect.get("cuped", {})
            rows.append(
                (
                    printable(arm),
                    _number(value),
                    _range(effect.get("lift"), effect.get("lift_low"), effect.get("lift_high")),
                    _number(effect.get("p_value")),
                    _range(cuped.get("lift"), cuped.get("lift_low"), cuped.get("lift_high")),
                    _percent(cuped.get("variance_reduction")),
                    _number(effect.get("p_holm")),
                )
            )
        head = ("arm", "value", "lift", "p", "lift, CUPED", "variance less", "p, all arms")
        below = printable(metric["denominator"])
        tables.append(
            (f"{printable(name)}: {printable(metric['numerator'])} / {below}", _table(head, rows))
        )
    return tables


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> dict[str, Any]:
    """Return what the template's `table` takes, without columns that hold nothing."""
    full = [i for i in range(len(head)) if any(row[i] != DASH for row in rows)]
    picked = [tuple(row[i] for i in full) for row in rows]
    return {"header": [head[i] for i in full], "rows": picked, "best": {}, "hints": {}}


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:+.2%}"


def _range(value: float | None, low: float | None, high: float | None) -> str:
    if value is None or low is None or high is None:
        return DASH
    return f"{value:+.2%} ({low:+.2%} to {high:+.2%})"

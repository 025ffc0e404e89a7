# SPDX-License-Identifier: MIT
"""Line charts as SVG for an HTML page that may be light or dark.

Matplotlib draws. Its colours are then replaced by the page's own (`currentColor`, CSS variables),
so that a chart is readable on either background. Metadata, namespaces and document-wide ids are
removed, so that a chart stands inline, is small and has no external address. Lines differ in dash
as well as in colour.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.runtime.printable import printable

# Stand-ins that nothing else draws with, and what the page puts in their place.
_INK, _GRID = "#0a0b0c", "#0a0b0d"
_NUM_COLOURS = 8
_SERIES = [f"#0e0f{index:02x}" for index in range(_NUM_COLOURS)]
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D")
_MAX_POINTS = 400
_WIDTH = 4.8  # inches; a phone shows them on 2.5, so that text must not be small in it
# More lines than a legend can tell apart.
_MAX_LINES = 32
_MAX_LABEL = 60
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # `$` in a name is a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "figure",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Args:
        label: In the legend. It may be of any text.
        series: Index of its run, which fixes colour and dash.
        points: (x, y) in order of x.
        variant: Index that fixes the form of the points, for several lines of one run.
    """

    label: str
    series: int
    points: Sequence[tuple[float, float]]
    variant: int = 0


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What a chart shows.

    Args:
        title: For those who cannot see it.
        x: Title of the x axis.
        y: Title of the y axis.
        y_limits: None: from the data.
        y_span: The least range of y that limits from the data have, so that noise does not look
            large.
        whole_x: Ticks of x are whole numbers.
        plain_x: Ticks of x are decimals (0.2), not in thousands (2k).
    """

    title: str
    x: str
    y: str
    y_limits: tuple[float, float] | None = None
    y_span: float = 0.0
    whole_x: bool = False
    plain_x: bool = False


def chart(name: str, axes: Axes, lines: Sequence[Line]) -> str:
    """Return an inline SVG of `lines`, or an empty string if no line has a point.

    Args:
        name: Prefix of every id, unique in the page.
        axes: What the chart shows.
        lines: The lines, of which the first 32 are drawn.
    """
    drawn = [line for line in lines if line.points][:_MAX_LINES]
    if not drawn:
        return ""
    # Takes longer to import than a page without charts to make.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser's fonts show it
        labels = [printable(line.label)[:_MAX_LABEL] for line in drawn]
        # A letter of the legend is about 0.065 inches wide, the line before it takes 0.5.
        longest = max(map(len, labels))
        columns = max(1, min(len(drawn), 3, int(_WIDTH / (0.065 * longest + 0.5))))
        legend_inches = 0.18 * -(-len(drawn) // columns) + 0.05 if len(lines) > 1 else 0.0
        height = 2.7 + legend_inches
        figure = Figure(figsize=(_WIDTH, height))
        plot = figure.subplots()
        # Fixed margins: a layout engine would draw every chart several times.
        bottom = (0.5 + legend_inches) / height
        figure.subplots_adjust(left=0.15, right=0.97, top=1 - 0.12 / height, bottom=bottom)
        handles = [_draw(plot, line) for line in drawn]
        _set_axes(plot, axes, drawn)
        if len(lines) > 1:
            place = {"loc": "lower center", "ncols": columns, "fontsize": 8, "borderpad": 0}
            legend = figure.legend(handles, ["-"] * len(handles), **place)
            # Afterwards, because a legend leaves out what is called _something.
            for text, label in zip(legend.get_texts(), labels, strict=True):
                text.set_text(label)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _inline(file.getvalue(), name, printable(f"{axes.title}: {axes.y} over {axes.x}"))


def _draw(plot: Any, line: Line) -> Any:
    """Draw a line and return it."""
    x, y = zip(*_thinned(line.points), strict=True)
    few = len(x) <= 12
    (handle,) = plot.plot(
        x,
        y,
        color=_SERIES[line.series % _NUM_COLOURS],
        linestyle=_DASHES[line.series % len(_DASHES)],
        linewidth=1.6,
        marker=_MARKERS[line.variant % len(_MARKERS)] if few else "",
        markersize=4,
    )
    return handle


def _set_axes(plot: Any, axes: Axes, drawn: Sequence[Line]) -> None:
    """Set titles, limits and ticks."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    plot.set_xlabel(axes.x)
    plot.set_ylabel(axes.y)
    values = [y for line in drawn for _, y in line.points]
    plot.set_ylim(axes.y_limits or _limits(values, axes.y_span))
    plot.ticklabel_format(axis="y", useOffset=False)  # ticks show whole values
    if axes.whole_x:
        plot.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        whole = {x for line in drawn for x, _ in line.points}
        if len(whole) == 1:
            plot.set_xlim(min(whole) - 0.5, min(whole) + 0.5)
    elif not axes.plain_x:
        plot.xaxis.set_major_formatter(EngFormatter(sep=""))


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `_MAX_POINTS` points, evenly chosen, the last always among them."""
    step = -(-len(points) // _MAX_POINTS)
    return points if step == 1 else [*points[:-1:step], points[-1]]


def _limits(values: Sequence[float], span: float) -> tuple[float, float]:
    """Return y limits at least `span` apart that a few high points at the start do not stretch."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[math.ceil(0.95 * (len(ordered) - 1))]
    if len(ordered) > 20 and high - low > 2 * (usual - low):
        high = usual
    margin = 0.05 * (high - low) or (0.0 if span else 0.05 * abs(high) or 1.0)
    margin = max(margin, (span - (high - low)) / 2)
    return low - margin, high + margin


def _inline(svg: str, name: str, title: str) -> str:
    """Turn a matplotlib document into an element of the page."""
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    body = svg[svg.index("<svg") :]
    found = re.search(r'viewBox="([^"]+)"', body)
    assert found is not None
    body = body[body.index(">") + 1 :].replace("xlink:href", "href")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    # Black is an SVG element's colour when matplotlib names none.
    for index, colour in enumerate(_SERIES):
        body = body.replace(colour, f"var(--series-{index})")
    body = body.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px var(--font)", body)
    return (
        f'<svg viewBox="{found.group(1)}" role="img" aria-labelledby="{name}-title" '
        f'class="chart"><title id="{name}-title">{html.escape(title)}</title>{body}'
    )

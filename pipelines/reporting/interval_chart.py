# SPDX-License-Identifier: MIT
"""Estimates with their intervals, one a line, as SVG: a dot, a bar and a line at zero.

Drawn without matplotlib, so that a page of them costs nothing. Colours are the page's own.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.runtime.printable import printable

_WIDTH, _LEFT, _RIGHT, _LINE, _BOTTOM = 640, 170, 24, 26, 34
_MAX_LINES, _MAX_LABEL, _MAX_TICKS = 40, 26, 5


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One line.

    Args:
        label: Of any text.
        low: Lower end.
        value: The estimate.
        high: Upper end.
    """

    label: str
    low: float
    value: float
    high: float


def interval_chart(
    name: str, title: str, intervals: Sequence[Interval], text: Callable[[float], str]
) -> str:
    """Return an inline SVG, or an empty string if there is no finite interval.

    Args:
        name: Unique in the page.
        title: For those who cannot see it.
        intervals: From top to bottom; the first 40 are drawn.
        text: A number as the axis shows it.
    """
    drawn = [one for one in intervals if all(map(math.isfinite, (one.low, one.value, one.high)))]
    drawn = drawn[:_MAX_LINES]
    if not drawn:
        return ""
    low, high = min(0.0, *(one.low for one in drawn)), max(0.0, *(one.high for one in drawn))
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin
    bottom = _LINE * len(drawn) + 8

    def x(value: float) -> str:
        return f"{_LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    parts = [
        f'<line x1="{x(tick)}" x2="{x(tick)}" y1="4" y2="{bottom}" stroke="var(--grid)"/>'
        f'<text x="{x(tick)}" y="{bottom + 18}" text-anchor="middle">'
        f"{html.escape(text(tick))}</text>"
        for tick in _ticks(low, high)
    ]
    parts.append(
        f'<line x1="{x(0)}" x2="{x(0)}" y1="4" y2="{bottom}" stroke="currentColor" '
        'stroke-dasharray="4 3"/>'
    )
    for index, one in enumerate(drawn):
        y = _LINE * index + 20
        label = printable(one.label)
        label = label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"
        sure = one.low > 0 or one.high < 0
        colour = "var(--series-0)" if sure else "var(--soft)"
        parts.append(
            f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{html.escape(label)}</text>'
            f'<line x1="{x(one.low)}" x2="{x(one.high)}" y1="{y}" y2="{y}" stroke="{colour}" '
            f'stroke-width="2.5"/><circle cx="{x(one.value)}" cy="{y}" r="4.5" fill="{colour}"/>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {bottom + _BOTTOM}" role="img" class="chart" '
        f'aria-labelledby="{name}-title" fill="currentColor" font-size="13" '
        f'font-family="var(--font)"><title id="{name}-title">{html.escape(printable(title))}'
        f"</title>{''.join(parts)}</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between `low` and `high`."""
    step = 10 ** math.floor(math.log10(high - low))
    for divisor in (10, 5, 2, 1, 0.5):
        if (high - low) / (step / divisor) <= _MAX_TICKS:
            step /= divisor
            break
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]

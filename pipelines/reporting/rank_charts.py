# SPDX-License-Identifier: MIT
"""The report's effective ranks: charts over layers, and what a reader must know to read them.

Records are those of ranks.json: `layer` (from 1; 0 is the tower's input), `module` (the kind of
what was measured), `path` (where in the tower; runs of old lack it) and the values. Several
modules of a layer may be of one kind; they are told apart by their path, or by their order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pipelines.reporting.run_data import Run, is_number, written
from pipelines.reporting.svg_charts import Axes, Line, chart

FERANK = (
    "ferank = erank / r, where erank = exp(−Σ pᵢ ln pᵢ) with pᵢ = σᵢ / Σσ is the effective number "
    "of directions that the singular values σ of an output spread over, and r, the smaller side of "
    "the matrix, is the most there can be. It lies between 1/r and 1: near 1 all directions are "
    "used alike (full rank), near 1/r the output has collapsed onto one, and its tokens all say "
    "the same. Of an attention map, low means that all tokens attend alike."
)
PLACES = (
    "Layer 0 is the tower's input; a layer is measured at its output, and inside at its token "
    "mixing, attention map and feed-forward (ffn), on at most 256 test rows, at the last "
    "evaluation: example by example, but TokenFormer's context as one matrix of all rows"
)
TAU = (
    "Singular values enter attention as σ^τ: 1 leaves them as they are, 0 makes all alike. τ "
    "starts at 0.5 and is learned, one a layer. The axis shows the range of the values, or 0.02 "
    "where they differ less."
)
SPECTRUM = (
    "ρ(k) is the share of Σσ² that the k largest singular values hold: a curve that reaches 1 at "
    "once belongs to an output with one direction, the flattest possible rises in equal steps. "
    "Shown are the tower's input and the output of its last layer."
)
GRADIENT = (
    "The share of the loss's gradient at the tower's input that lies along the input's first k "
    "singular directions (u₁ has the largest σ). A curve that rises at once means that training "
    "moves the embeddings along the direction that already dominates."
)
CLUSTERS = (
    "The tower's outputs are put into 10 clusters by k-means, without the labels; the mutual "
    "information of cluster and first label, as a share of the label's entropy, says how much of "
    "the label the representation separates by itself."
)
# Kinds that are measured per layer; the others are measured once.
_KINDS = {
    "layer": "layer output",
    "mixing": "token mixing",
    "attention": "attention map",
    "ffn": "feed-forward (ffn)",
}
_TAU_SPAN = 0.02
_MAX_PLACES = 32  # of one kind in a layer
_MAX_RECORDS, _MAX_KEYS = 400, 50


@dataclass(frozen=True)
class RankChart:
    """A chart, its title and a sentence below it."""

    title: str
    svg: Markup
    note: str = ""


def rank_charts(runs: Sequence[Run]) -> list[RankChart]:
    """Return charts of effective ranks by kind of module, and of τ, at each run's last diagnosis.

    An output of one row is left out: its rank is 1 whatever it holds.
    """
    latest = [_latest(run) for run in runs]
    kinds = dict.fromkeys(
        kind
        for records in latest
        for one in records
        if (kind := str(one.get("module", ""))) in _KINDS
    )
    found = []
    for number, kind in enumerate(kinds):
        lines = []
        for index, (run, records) in enumerate(zip(runs, latest, strict=True)):
            shown = [one for one in records if one.get("module") == kind and not _is_row(one)]
            lines += _lines(run.name, index, shown)
        title = f"Effective rank share: {_KINDS[kind]}"
        axes = Axes(title=title, x="layer", y="ferank", y_limits=(0.0, 1.05), whole_x=True)
        found.append(RankChart(title, Markup(chart(f"rank-{number}", axes, lines))))
    lines = [
        Line(label=run.name, series=index, points=_points(records, "tau"))
        for index, (run, records) in enumerate(zip(runs, latest, strict=True))
    ]
    title = "Softening exponent τ"
    axes = Axes(title=title, x="layer", y="τ = sigmoid(a)", y_span=_TAU_SPAN, whole_x=True)
    found.append(RankChart(title, Markup(chart("rank-tau", axes, lines)), TAU))
    found += [_spectra(runs, latest), _gradients(runs, latest), _clusters(runs)]
    return [one for one in found if one.svg]


def _spectra(runs: Sequence[Run], latest: Sequence[list[dict[str, Any]]]) -> RankChart:
    """Return ρ(k) of each run's input and last layer."""
    lines = []
    for index, (run, records) in enumerate(zip(runs, latest, strict=True)):
        layers = [one for one in records if one.get("module") == "layer" and not _is_row(one)]
        ends = layers[:1] + layers[1:][-1:]
        lines += [
            Line(
                label=f"{run.name}: {one.get('path') or one.get('layer')}",
                series=index,
                points=_spectrum(one),
                variant=variant,
            )
            for variant, one in enumerate(ends)
        ]
    title = "Cumulative spectrum ρ(k)"
    axes = Axes(title=title, x="k", y="ρ(k)", y_limits=(0.0, 1.05), whole_x=True)
    return RankChart(title, Markup(chart("rank-spectrum", axes, lines)), SPECTRUM)


def _gradients(runs: Sequence[Run], latest: Sequence[list[dict[str, Any]]]) -> RankChart:
    """Return the gradient's cumulative share along each run's singular directions."""
    lines = [
        Line(
            label=run.name,
            series=index,
            points=[
                p for one in records if one.get("module") == "gradient" for p in _spectrum(one)
            ],
        )
        for index, (run, records) in enumerate(zip(runs, latest, strict=True))
    ]
    title = "Gradient energy along singular directions"
    axes = Axes(title=title, x="k", y="share of ‖G‖²", y_limits=(0.0, 1.05), whole_x=True)
    return RankChart(title, Markup(chart("rank-gradient", axes, lines)), GRADIENT)


def _clusters(runs: Sequence[Run]) -> RankChart:
    """Return what the clusters of each run's outputs knew of the label, over its evaluations."""
    lines = []
    for index, run in enumerate(runs):
        points = [
            (one["step"], one["mutual_information"] / one["label_entropy"])
            for one in run.ranks
            if one.get("module") == "clusters"
            and all(is_number(one.get(key)) for key in ("step", "mutual_information"))
            and is_number(one.get("label_entropy"))
            and one["label_entropy"] > 0
        ]
        lines.append(Line(label=run.name, series=index, points=points))
    title = "Label information of the output's clusters"
    axes = Axes(title=title, x="step", y="I(cluster; label) / H(label)", whole_x=True)
    return RankChart(title, Markup(chart("rank-clusters", axes, lines)), CLUSTERS)


def _spectrum(record: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the points (k, ρ(k)) of a record."""
    values = record.get("spectrum")
    values = values if isinstance(values, list) else []
    return [(k, value) for k, value in enumerate(values, start=1) if is_number(value)]


def rank_notes(runs: Sequence[Run]) -> list[str]:
    """Return what ferank is, where it was measured and what is left out; nothing without ranks."""
    records = [one for run in runs for one in _latest(run)]
    if not any(is_number(one.get("ferank")) for one in records):
        return []
    left_out = any(_is_row(one) for one in records)
    more = ". Outputs of a single row are left out: their rank is 1 whatever they hold"
    return [FERANK, f"{PLACES}{more if left_out else ''}."]


def rank_table(run: Run) -> dict[str, Any]:
    """Return the values of the last diagnosed step, of as many records as a page can hold."""
    records = _latest(run)
    shown = records[:_MAX_RECORDS]
    known = ("step", "layer", "module", "path", "spectrum")
    keys = [key for key in dict.fromkeys(key for one in shown for key in one) if key not in known]
    keys = keys[:_MAX_KEYS]
    rows = [[_name(one), *(written(one.get(key)) for key in keys)] for one in shown]
    if len(records) > len(shown):
        rows.append([f"… and {len(records) - len(shown):,} more"])
    return {"header": ["Module and layer", *keys], "rows": rows, "hints": {}, "best": {}}


def _latest(run: Run) -> list[dict[str, Any]]:
    """Return the records of the run's last diagnosed step."""
    steps = [step if is_number(step := one.get("step")) else 0 for one in run.ranks]
    last = max(steps, default=0)
    return [one for one, step in zip(run.ranks, steps, strict=True) if step == last]


def _name(record: dict[str, Any]) -> str:
    name = f"{record.get('module', '')} {record.get('layer', '')}"
    return f"{name} ({record['path']})" if record.get("path") else name


def _is_row(record: dict[str, Any]) -> bool:
    """Return whether the measured matrix can have no rank but 1."""
    return record.get("erank") == 1.0 and record.get("ferank") == 1.0


def _points(records: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (layer, value) of the records that have both, in order of the layers."""
    both = [(one.get("layer"), one.get(key)) for one in records]
    return sorted((x, y) for x, y in both if is_number(x) and is_number(y))


def _lines(run: str, series: int, records: Sequence[dict[str, Any]]) -> list[Line]:
    """Return one line for each place in a layer at which a run was measured."""
    # Layers are built alike, so the n-th of a kind is the same module in each of them.
    places: list[list[dict[str, Any]]] = []
    seen: dict[Any, int] = {}
    for one in records:
        layer = str(one.get("layer"))
        order = seen[layer] = seen.get(layer, -1) + 1
        if order == _MAX_PLACES:
            break
        if order == len(places):
            places.append([])
        places[order].append(one)
    # The first number of a path counts the layers, as `layer` does.
    paths = [re.sub(r"\d+", "*", str(some[-1].get("path") or ""), count=1) for some in places]
    names = [
        path if paths.count(path) == 1 else f"{path} no. {number}".strip()
        for number, path in enumerate(paths, start=1)
    ]
    # A run that has none is still counted, so that a single line of several runs is named.
    return [
        Line(
            label=run if len(places) < 2 else f"{run}: {name}",
            series=series,
            points=_points(some, "ferank"),
            variant=variant,
        )
        for variant, (name, some) in enumerate(zip(names or [""], places or [[]], strict=True))
    ]

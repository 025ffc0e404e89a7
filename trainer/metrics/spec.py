# SPDX-License-Identifier: MIT
"""The one list of quality metrics: what each is called, which way is better, how it is shown.

A metric appears in metrics.json, log lines, Prometheus, METRICS.md, Grafana, the report, slices,
comparisons and gates by its entry here and its function of the same name in `functions.py`. This
module imports neither NumPy nor torch, so that reports and options of commands can read it.
`CONTEXT` lists what an evaluation gives beside the metrics: counts, means and standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["higher", "lower", "one"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One quality metric.

    Args:
        name: The key in metrics.json, in log lines and of the function.
        title: The heading of columns and panels.
        meaning: What it is, in a phrase without a full stop.
        better: `higher`, `lower`, or `one`: the nearer to 1 the better.
        unit: Of the value; empty for a ratio.
        form: The format of the value.
        per_user: Whether it needs users; it is absent where the schema names none.
        interval: Whether the bootstrap gives it an interval.
        compared: Whether log lines of comparisons show it.
        series: The name in Prometheus after `evaluation_`; empty: `name`.
        panel: The Grafana panel that shows it; empty: a panel of its own.
        gate: By how much a nightly candidate may be worse, of a metric that is best at 1 in
            |ln value|; None: no gate.
    """

    name: str
    title: str
    meaning: str
    better: Better
    unit: str = ""
    form: str = ".4f"
    per_user: bool = False
    interval: bool = True
    compared: bool = True
    series: str = ""
    panel: str = ""
    gate: float | None = None

    @property
    def prometheus(self) -> str:
        """The name of its gauge, without the prefix of the program."""
        return f"evaluation_{self.series or self.name}"

    @property
    def panel_title(self) -> str:
        """The title of the Grafana panel that shows it."""
        return self.panel or f"{self.title}, test rows"

    @property
    def gate_setting(self) -> str:
        """The name of the threshold by which it may be worse."""
        return f"max_{self.name}_{'loss' if self.better == 'higher' else 'gain'}"

    @property
    def difference(self) -> str:
        """The key of the difference that decides which of two models is better."""
        return f"{self.name}_error" if self.better == "one" else self.name

    def score(self, value: float) -> float:
        """Return a number that is higher for a better value."""
        if self.better == "one":
            return -abs(math.log(value)) if value > 0 else -math.inf
        return value if self.better == "higher" else -value


_ENTRIES = (
    Metric(
        name="auc",
        title="AUC",
        meaning="Area under the ROC curve",
        better="higher",
        panel="AUC",
        gate=0.002,
    ),
    Metric(
        name="gauc",
        title="GAUC",
        meaning="AUC within users, averaged by their weight",
        better="higher",
        per_user=True,
        panel="AUC",
        gate=0.01,
    ),
    Metric(
        name="logloss",
        title="Logloss",
        meaning="Mean cross-entropy in nats",
        better="lower",
        unit="nats",
        panel="Loss",
        gate=0.005,
    ),
    Metric(
        name="ne",
        title="NE",
        meaning="Logloss over the entropy of the label mean",
        better="lower",
        # It moves with the logloss; comparisons show one of the two.
        compared=False,
        series="normalized_entropy",
        panel="Normalised entropy, test rows",
    ),
    Metric(
        name="calibration",
        title="Calibration",
        meaning="Mean prediction over mean label",
        better="one",
        series="calibration_ratio",
        panel="Calibration",
        gate=0.15,
    ),
)
METRICS: dict[str, Metric] = {one.name: one for one in _ENTRIES}
# What every label has beside the metrics, and what it means.
CONTEXT = {
    "auc_standard_error": "Standard error of the AUC, by DeLong's estimate",
    "gauc_unweighted": "Mean AUC over users, each counted once",
    "gauc_users": "Users with both values of the label, whom GAUC averages over",
    "gauc_share": "Share of the weight that these users have",
    "gauc_top_share": "Share of their weight that the heaviest user has",
    "prediction_mean": "Mean prediction",
    "label_mean": "Mean label",
    "positive_rows": "Sum of the labels over the rows",
    "rows": "Rows with weight",
    "weight": "Sum of the weights",
}


def with_intervals() -> tuple[str, ...]:
    """Return the names of the metrics that the bootstrap gives intervals of."""
    return tuple(name for name, metric in METRICS.items() if metric.interval)


def choosable() -> tuple[str, ...]:
    """Return the names of the metrics by which the best checkpoint or epoch can be chosen."""
    return tuple(name for name, metric in METRICS.items() if metric.better != "one")


def described(metrics: Mapping[str, Any]) -> str:
    """Return the metrics that have a value in a few words: `auc 0.7000, logloss 0.5000`."""
    return ", ".join(
        f"{name} {metrics[name]:{metric.form}}"
        for name, metric in METRICS.items()
        if metric.compared and metrics.get(name) is not None
    )

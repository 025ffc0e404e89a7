# SPDX-License-Identifier: MIT
"""Numbers as one line: what a run says of an interval of training and of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def interval_line(record: Mapping[str, Any]) -> str:
    """Return the interval's main numbers as one line."""
    return (
        f"loss {record['loss']:.4f}  auc {record['auc']:.4f}  "
        f"{record['rows_per_second']:,.0f} rows/s  input wait {record['input_wait']:.0%}"
    )


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """Return an evaluation's main numbers as one line; a GAUC that a log cannot have is left out.

    Behind the AUC stands its standard error, without which two evaluations cannot be compared.
    """
    parts = []
    for name in ("auc", "gauc", "logloss", "ne", "calibration"):
        if name not in metrics or (name == "gauc" and math.isnan(metrics[name])):
            continue
        parts.append(f"{name} {metrics[name]:.4f}")
        error = metrics.get(f"{name}_standard_error", math.nan)
        if not math.isnan(error):
            parts[-1] += f" ± {error:.4f}"
    return ", ".join(parts)

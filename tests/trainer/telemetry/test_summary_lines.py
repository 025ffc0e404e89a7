# SPDX-License-Identifier: MIT
"""People are told in lines what programs read as JSON."""

import math

import pytest

from trainer.telemetry.summary_lines import difference_line, evaluated_lines

METRICS = {"auc": 0.71234, "auc_standard_error": 0.0041, "gauc": math.nan, "rows": 4000.0}


def differences(low, high):
    nothing = {"difference": math.nan, "interval": [math.nan, math.nan]}
    auc = {"difference": (low + high) / 2, "interval": [low, high]}
    return {"auc": auc, "logloss": {"difference": -0.001, "interval": [-0.002, 0.0]}} | {
        "gauc": nothing
    }


def test_an_evaluation_is_a_line_and_each_of_its_slices_one_below():
    slices = {"country": [{"slice": "de", "auc": 0.7, "rows": 1234.0}]}
    assert evaluated_lines("runs/a", METRICS | {"slices": slices}) == [
        "runs/a: auc 0.7123 ± 0.0041 over 4,000 rows",
        "  country de: auc 0.7000 over 1,234 rows",
    ]


def test_labels_after_the_first_have_a_line_each():
    own = {f"{label}_{key}": one for label in ("click", "like") for key, one in METRICS.items()}
    assert evaluated_lines("runs/a", METRICS | own | {"like_auc": 0.6, "like_rows": 7.0}) == [
        "runs/a: auc 0.7123 ± 0.0041 over 4,000 rows",
        "  label like: auc 0.6000 ± 0.0041 over 7 rows",
    ]


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.01, 0.03, "a has the higher AUC"),
        (-0.03, -0.01, "b has the higher AUC"),
        (-0.01, 0.03, "the AUC of these rows does not tell them apart"),
        (math.nan, math.nan, "the AUC of these rows does not tell them apart"),
    ],
)
def test_a_difference_says_which_is_better_only_where_its_interval_leaves_no_zero(low, high, told):
    line = difference_line("a", "b", differences(low, high))
    assert line.startswith("a - b: ")
    assert line.endswith(f"logloss -0.0010 [-0.0020, +0.0000] (95 % intervals); {told}")
    assert "gauc" not in line
    assert ("auc +0.0200 [+0.0100, +0.0300]" in line) == (low == 0.01)

# SPDX-License-Identifier: MIT
"""Which rows of a log train, warm up and choose between epochs; none of them is a test row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.data.splits import parse_days


def check_apart(valid_days: str, test_days: str) -> None:
    """Raise a ValueError if a day of validation is a test day."""
    valid, test = parse_days(valid_days), parse_days(test_days)
    if valid and test and valid[0] <= test[1] and test[0] <= valid[1]:
        raise ValueError(
            f"--valid-days: expected days before the test days {test_days}, which nothing may look "
            f"at before the end, got {valid_days}; set --valid-days or --data.test-days"
        )


def split(
    data: Any, days: Sequence[str], valid_days: str, share: float
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the words that choose the rows of the epochs, of the warm-up and of validation.

    Args:
        data: the run's DataConfig.
        days: of the log, none for a log without.

    Raises:
        ValueError: there is no day left to train on.
    """
    if days:
        first, _, last = (data.train_days or f"{days[0]}:{days[-1]}").partition(":")
        inside = [day for day in days if first <= day <= (last or first)]
        held = valid_days or (inside[-1] if inside else "")
        check_apart(held, data.test_days)
        kept = [day for day in inside if day < held.partition(":")[0]]
        if not kept:
            raise ValueError(
                f"--valid-days: expected a training day before {held or 'them'}, got training days "
                f"{inside or 'none'} of {data.path}; set --data.train-days or --valid-days"
            )
        train = ("--data.train-days", f"{kept[0]}:{kept[-1]}")
        valid = ("--data.test-days", held, "--data.test-path", "")
        return train, (*train, "--data.train-rows", f"0:{share:g}"), valid
    low, _, high = (data.train_rows or "0:1").partition(":")
    start, stop = float(low or 0), float(high or 1)
    cut = stop - 0.1 * (stop - start)
    train = ("--data.train-rows", f"{start:g}:{cut:g}")
    rows = f"{start:g}:{start + share * (cut - start):g}"
    valid = ("--data.test-rows", f"{cut:g}:{stop:g}", "--data.test-path", "")
    return train, ("--data.train-rows", rows), valid

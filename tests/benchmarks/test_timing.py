# SPDX-License-Identifier: MIT
"""The timing of benchmarks: ratios of work that is known to differ come out right."""

import pytest

from tests.benchmarks import timing
from tests.benchmarks.timing import Line, Ratio, Times, interleave


def test_twice_the_work_takes_twice_as_long_by_the_clock_of_the_process(monkeypatch) -> None:
    # The clock is the test's own: a real one would also count what else the machine does.
    now = [0.0]
    monkeypatch.setattr(timing.time, "process_time", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    times = interleave({"one": lambda: work(0.001), "two": lambda: work(0.002)}, min_seconds=0.005)
    assert len(times.seconds["one"]) == len(times.seconds["two"]) == 9
    assert times.median("one") == pytest.approx(0.001), "of one repetition, not of a round"
    assert times.ratio("two", "one").median == pytest.approx(2.0)


def test_a_ratio_is_the_median_of_ratios_within_rounds() -> None:
    # Rounds 2 and 3 ran on a busy machine; the ratio does not see it.
    times = Times(seconds={"a": [1.0, 9.0, 5.0], "b": [2.0, 18.0, 10.0]})
    assert times.ratio("b", "a") == Ratio(median=2.0, low=2.0, high=2.0)
    assert times.median("a") == 5.0


def test_every_candidate_starts_some_rounds() -> None:
    order: list[str] = []
    interleave({n: lambda n=n: order.append(n) for n in "abc"}, rounds=9, min_seconds=0.0)
    rounds = ["".join(order[i : i + 3]) for i in range(6, len(order), 3)]
    assert rounds == ["abc", "bca", "cab"] * 3


def test_a_line_says_whether_its_bound_is_kept() -> None:
    ratio = Ratio(median=1.3, low=1.2, high=1.4)
    assert str(Line(name="x", ratio=ratio, bound="at most", target=1.2)).endswith("MISSED")
    assert str(Line(name="x", ratio=ratio, bound="at least", target=1.2)).endswith("met")
    assert Line(name="x", ratio=ratio).met


def test_too_few_rounds_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 7"):
        interleave({"a": lambda: None}, rounds=3)

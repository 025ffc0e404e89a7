# SPDX-License-Identifier: MIT
"""Text to numbers and times: exact, and the same whatever stands beside it."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.ingestion.casting import Times
from pipelines.ingestion.parsing import parse_floats, parse_integers, parse_times
from tests.support.raw_logs import (
    NOON,
)


@pytest.mark.parametrize(
    ("unit", "pattern", "text", "expected"),
    [
        ("ms", "", "2026-01-01T12:00:00.25Z", NOON + 250),
        ("ms", "", "2026-01-01 12:00:00", NOON),
        ("ms", "", "2026-01-01 14:00:00+02:00", NOON),
        ("ms", "", "2026-01-01", NOON - 43_200_000),
        ("s", "", str(NOON // 1_000), NOON),
        ("s", "", f"{NOON // 1_000}.5", NOON + 500),
        ("us", "", str(NOON * 1_000 + 999), NOON),
        ("ns", "", str(NOON * 1_000_000), NOON),
        ("ms", "%y%m%d%H", "26010112", NOON),
        ("ms", "", "2026-02-30", None),
        ("s", "", "9" * 19, np.iinfo(np.int64).max),
        ("ms", "", "noon", None),
    ],
)
def test_times_are_read_in_any_unit_and_as_iso_or_pattern(unit, pattern, text, expected):
    Times(unit=unit, pattern=pattern)
    values, unread = parse_times(pa.array([text, None]), unit, pattern)
    assert values.to_pylist() == [expected, None]
    assert unread.tolist() == [expected is None, False]


TEXTS = st.one_of(
    st.integers(-(2**65), 2**65).map(str),
    st.floats(allow_nan=False).map(str),
    st.text(alphabet="0123456789+-.eEx ", max_size=6),
    st.none(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=12))
def test_what_a_text_becomes_does_not_depend_on_its_neighbours(texts):
    for parse in (parse_integers, parse_floats):
        together, unread = parse(pa.array(texts, pa.string()))
        alone = [parse(pa.array([text], pa.string())) for text in texts]
        assert together.to_pylist() == [values[0].as_py() for values, _ in alone]
        assert unread.tolist() == [bool(mask[0]) for _, mask in alone]


@settings(max_examples=60, deadline=None)
@given(st.integers(-(2**63), 2**64 - 1))
def test_every_64_bit_integer_is_read_and_unsigned_ones_keep_their_bits(value):
    values, unread = parse_integers(pa.array([str(value), "x", f" {value}", f"{value}.0"]))
    wrapped = value - 2**64 if value >= 2**63 else value
    assert values.to_pylist() == [wrapped, None, wrapped, wrapped]
    assert unread.tolist() == [False, True, False, False]

# SPDX-License-Identifier: MIT
from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from pipelines.experiments.arms import Experiment

USERS = pa.array(np.arange(200_000))


def _codes(experiment, users=USERS):
    return experiment.assign(users).indices.to_numpy(zero_copy_only=False)


def test_arms_get_their_shares():
    experiment = Experiment(name="ranker", arms={"A": 1, "B": 2, "C": 1})
    counts = np.bincount(_codes(experiment), minlength=3)
    assert stats.chisquare(counts, len(USERS) * np.array([0.25, 0.5, 0.25])).pvalue > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        Experiment(name="colour"),
        Experiment(name="ranker", salt="again"),
        Experiment(name="rankes"),
        Experiment(name="r", salt="anker"),
    ],
)
def test_assignments_of_two_experiments_are_independent(other):
    first, second = _codes(Experiment(name="ranker")), _codes(other)
    table = np.histogram2d(first, second, bins=2)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert (table > 0.24 * len(USERS)).all()


def test_arm_is_independent_of_taking_part_and_of_the_order_of_users():
    part = Experiment(name="ranker", traffic=0.3).assign(USERS)
    taking = part.is_valid().to_numpy(zero_copy_only=False)
    assert abs(taking.mean() - 0.3) < 0.005
    codes = _codes(Experiment(name="ranker"))
    assert abs(codes[taking].mean() - 0.5) < 0.01
    order = np.random.default_rng(0).permutation(len(USERS))
    assert (_codes(Experiment(name="ranker"), USERS.take(pa.array(order))) == codes[order]).all()


def test_more_traffic_moves_nobody_to_another_arm():
    some = Experiment(name="ranker", traffic=0.2).assign(USERS)
    more = Experiment(name="ranker", traffic=0.7).assign(USERS)
    taking = some.is_valid()
    assert more.filter(taking).null_count == 0
    assert some.filter(taking).to_pylist() == more.filter(taking).to_pylist()


def _mix(value):
    """The SplitMix64 finaliser in Python's integers."""
    value &= 2**64 - 1
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_the_assignment_is_the_same_in_every_version():
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (b"arm", b"ranker", b"s"))
    digest = hashlib.blake2b(text, digest_size=16).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in (0, 8)]
    ids = [0, 1, 2, 3, 2**62, -5, 1234567890123]
    places = [(_mix(_mix(_mix((i % 2**64) ^ keys[0]) + keys[1])) >> 11) / 2**53 for i in ids]
    arms = Experiment(name="ranker", salt="s", arms={"A": 1, "B": 3}).assign(pa.array(ids))
    assert arms.to_pylist() == ["A" if place < 0.25 else "B" for place in places]
    assert set(arms.to_pylist()) == {"A", "B"}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_text_users_of_every_type_get_one_arm(kind):
    texts = pa.array([f"user-{number}" for number in range(500)])
    plain = Experiment(name="x").assign(texts).to_pylist()
    assert Experiment(name="x").assign(texts.cast(kind)).to_pylist() == plain
    encoded = pa.chunked_array([texts[:100], texts[100:]])
    assert Experiment(name="x").assign(encoded).to_pylist() == plain
    assert Experiment(name="x").assign(texts.dictionary_encode()).to_pylist() == plain


def test_a_null_takes_no_part_and_other_types_are_refused():
    assert Experiment(name="x").assign(pa.array([None, 1], pa.int64()))[0].as_py() is None
    wide = pa.array([2**64 - 1, 5, None], pa.uint64())
    assert Experiment(name="x").assign(wide).null_count == 1
    with pytest.raises(ValueError, match="expected integers, strings or bytes, got double"):
        Experiment(name="x").assign(pa.array([1.5]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "expected a name"),
        ({"name": "x", "arms": {"A": 1.0}}, "two or more"),
        ({"name": "x", "arms": {"A": 1.0, "B": 0.0}}, "above 0"),
        ({"name": "x", "arms": {"A": 1.0, "B": float("nan")}}, "above 0"),
        ({"name": "x", "traffic": 1.5}, "from 0 to 1"),
    ],
)
def test_impossible_experiments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Experiment(**settings)

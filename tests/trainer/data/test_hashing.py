# SPDX-License-Identifier: MIT
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.columns import to_integers
from trainer.data.hashing import hash_strings, mix64, permutation, to_rows

ANY_BYTES = st.lists(st.none() | st.binary(max_size=100), max_size=30)


def reference(values):
    return [None if v is None else xxhash.xxh64_intdigest(v) for v in values]


def unsigned(hashed):
    assert hashed.type == pa.int64()
    return [None if v is None else v % 2**64 for v in hashed.to_pylist()]


@given(ANY_BYTES, st.integers(0, 5), st.integers(0, 30))
@settings(deadline=None, max_examples=60)
def test_hashes_equal_those_of_the_xxhash_library_for_any_bytes_and_slice(values, start, count):
    for type_ in (pa.binary(), pa.large_binary(), pa.binary_view()):
        array = pa.array(values, type_)
        assert unsigned(hash_strings(array)) == reference(values)
    array = pa.array(values, pa.binary()).slice(start, count)
    assert unsigned(hash_strings(array)) == reference(values[start : start + count])


@given(st.lists(st.none() | st.text(max_size=40), max_size=30))
@settings(deadline=None, max_examples=20)
def test_text_is_hashed_by_its_utf8_bytes_whatever_the_arrow_type(values):
    expected = reference([None if v is None else v.encode() for v in values])
    array = pa.array(values, pa.string())
    for same in (
        array,
        array.cast(pa.large_string()),
        array.cast(pa.string_view()),
        array.dictionary_encode(),
        pa.chunked_array([array.slice(0, 3), array.slice(3)]),
    ):
        assert unsigned(hash_strings(same)) == expected


@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 31, 32, 33, 63, 64, 1000])
def test_every_branch_of_the_hash_is_right_at_its_boundary(length):
    values = [bytes(range(7, 7 + 13)) * 80, b"", None, b"x" * 5]
    values = [None if v is None else v[:length] for v in values]
    assert unsigned(hash_strings(pa.array(values, pa.binary()))) == reference(values)


def test_one_long_string_among_short_ones_is_hashed_right():
    values = [b"a", b"y" * 40_001, b"bc"]
    assert unsigned(hash_strings(pa.array(values))) == reference(values)


def test_blocks_longer_than_the_cache_block_are_hashed_right():
    values = [str(i).encode() for i in range(20_000)]
    assert unsigned(hash_strings(pa.array(values))) == reference(values)


def test_a_null_that_owns_bytes_stays_null():
    whole = pa.array(["ab", "cd"])
    valid = pa.py_buffer(bytes([0b10]))
    array = pa.Array.from_buffers(pa.string(), 2, [valid, *whole.buffers()[1:]])
    assert unsigned(hash_strings(array)) == [None, xxhash.xxh64_intdigest(b"cd")]


def test_numbers_are_refused():
    with pytest.raises(TypeError, match="strings or bytes, got int64"):
        hash_strings(pa.array([1]))


def test_mix64_is_the_splitmix64_finaliser():
    # The first outputs of SplitMix64 seeded with 0, whose state is a multiple of the golden gamma.
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert [hex(v) for v in mix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(2, 2**40))
@settings(deadline=None, max_examples=30)
def test_ids_keep_off_row_0_and_inside_the_table(ids, num_embeddings):
    rows = to_rows(np.array(ids, np.int64), num_embeddings)
    assert rows.dtype == np.int64
    assert all(1 <= row < num_embeddings for row in rows)


def test_a_date_has_one_id_however_a_file_keeps_it():
    day = pa.array([20_000, None], pa.date32())
    for column in (day, day.cast(pa.date64())):
        ids, missing = to_integers(column, "day")
        assert ids[0] == 20_000
        assert missing is not None and missing.tolist() == [False, True]


def test_a_null_id_is_row_0():
    rows = to_rows(pa.array([5, None, 5]), 100)
    assert rows[1] == 0 and rows[0] == rows[2] > 0


def test_rows_are_spread_evenly():
    used = np.bincount(to_rows(np.arange(100_000) * 1024, 101), minlength=101)
    assert used[0] == 0 and used[1:].min() > 850 and used[1:].max() < 1150


def test_a_permutation_depends_on_its_key_alone_and_does_not_change_between_releases():
    assert permutation(8, 2026, 1).tolist() == permutation(8, 2026, 1).tolist()
    assert sorted(permutation(1000, 1)) == list(range(1000))
    assert permutation(1000, 1, 2).tolist() != permutation(1000, 2, 1).tolist()
    assert permutation(8, 0).tolist() == [5, 4, 3, 2, 7, 6, 0, 1]


def test_strings_are_hashed_in_less_memory_than_python_objects_of_them_would_take():
    rows = 100_000
    column = pa.array(np.char.add(8 * "a-session", np.arange(rows).astype(str)))
    to_integers(column[:10], "a")  # what is allocated once
    tracemalloc.start()
    try:
        values, _ = to_integers(column, "a")
        hashing = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    objects = sum(map(sys.getsizeof, column.to_pylist())) + 8 * rows
    assert len(values) == rows and hashing < 0.75 * objects, (hashing, objects)

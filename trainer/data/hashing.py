# SPDX-License-Identifier: MIT
"""Turn raw ids into 64-bit integers and those into table rows, without a Python object per id.

A string id becomes the XXH64 (seed 0) of its UTF-8 bytes. Every public xxHash library gives the
same number, so any tool can hash a log. The hash is computed over Arrow's offset and data buffers.
The only loops run over word positions inside a string, and all rows advance together. Rows are
ordered by length, so one long string costs only its own length.

A 64-bit integer becomes a table row through the SplitMix64 finaliser. The low bits of raw ids are
seldom uniform, so a remainder alone would fill a table unevenly.

Source: the xxHash specification (XXH64); Steele, Lea and Flood, "Fast Splittable Pseudorandom
Number Generators", 2014 (SplitMix64).

Shapes: N ids, E table rows.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import pyarrow as pa

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)
_STRIPE_BYTES = 32
_LANE_ROTATIONS = (1, 7, 12, 18)
_BLOCK_ROWS = 8192


def is_text(type_: pa.DataType) -> bool:
    """Return whether `hash_strings` takes arrays of this Arrow type."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return (
        pa.types.is_string(type_)
        or pa.types.is_large_string(type_)
        or pa.types.is_string_view(type_)
        or pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_binary_view(type_)
        or pa.types.is_fixed_size_binary(type_)
    )


def hash_strings(array: pa.Array | pa.ChunkedArray) -> pa.Int64Array:
    """Hash N strings or byte strings to N int64 (XXH64, seed 0, of UTF-8 bytes); null stays null.

    Takes string, large_string, string_view, binary, large_binary, binary_view, fixed_size_binary
    and dictionaries of them, sliced or chunked. A dictionary's values are hashed once each.

    Raises:
        TypeError: the array holds anything else.
    """
    if isinstance(array, pa.ChunkedArray):
        hashed = [hash_strings(chunk) for chunk in array.chunks]
        return pa.concat_arrays(hashed) if hashed else pa.array([], pa.int64())
    if not is_text(array.type):
        raise TypeError(f"hash_strings takes strings or bytes, got {array.type}")
    if isinstance(array, pa.DictionaryArray):
        return hash_strings(array.dictionary).take(array.indices)
    if pa.types.is_string_view(array.type):
        array = array.cast(pa.large_string())
    elif pa.types.is_binary_view(array.type) or pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.large_binary())
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, data_buffer = array.buffers()
    if len(array) == 0 or offset_buffer is None:
        return pa.nulls(len(array), pa.int64())
    offsets = np.frombuffer(offset_buffer, np.int64 if large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer if data_buffer is not None else b"", np.uint8)
    lengths = np.diff(offsets)
    if array.null_count:  # a null may own bytes: they are not read
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        hashes = _xxh64(data, offsets[:-1], np.where(valid, lengths, 0))
        return pa.array(hashes.view(np.int64), mask=~valid)
    return pa.array(_xxh64(data, offsets[:-1], lengths).view(np.int64))


def mix64(ids: np.ndarray) -> np.ndarray:
    """Mix N int64 or uint64 ids to N uint64 (the SplitMix64 finaliser, a bijection)."""
    mixed = np.array(ids, dtype=np.int64 if ids.dtype != np.uint64 else np.uint64, copy=True)
    mixed = mixed.view(np.uint64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def to_rows(ids: np.ndarray | pa.Array, num_embeddings: int) -> np.ndarray:
    """Map N 64-bit ids to N int64 rows of a table of E = `num_embeddings` rows.

    Row = 1 + mix64(id) % (E - 1); a null of an Arrow array is row 0, the row of missing ids.
    """
    if isinstance(ids, np.ndarray):
        rows, divisor = mix64(ids), np.uint64(num_embeddings - 1)
        # NumPy has vector instructions for a quotient by one number, and none for the remainder.
        whole = rows // divisor
        whole *= divisor
        rows -= whole
        rows += np.uint64(1)
        return rows.view(np.int64)
    rows = to_rows(ids.fill_null(0).to_numpy(), num_embeddings)
    if ids.null_count:
        rows[ids.is_null().to_numpy(zero_copy_only=False)] = 0
    return rows


@functools.cache
def routing_fingerprint() -> str:
    """Return a hash that identifies how ids are mapped to table rows, computed from sample ids.

    Tables trained under another fingerprint hold the vectors of other ids.
    """
    words = pa.array([chr(97 + length % 26) * length for length in range(70)])
    numbers = np.arange(-35, 35) * 0x1234567
    found = [to_rows(hash_strings(words), 1_000_003), to_rows(numbers, 1_000_003)]
    return hashlib.sha256(np.concatenate(found).astype("<i8").tobytes()).hexdigest()[:16]


def permutation(num_items: int, *key: int) -> np.ndarray:
    """Return a permutation of `num_items` positions that depends only on the integers of `key`.

    It sorts positions by a SplitMix64 stream. A library's generator could change with the library;
    this way a run resumed a year later sees the same order.

    Args:
        num_items: positions to permute.
        *key: integers that select the permutation.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = mix64(state + _PRIME_1 + np.array([part], np.int64).view(np.uint64))
    steps = np.arange(1, num_items + 1, dtype=np.uint64)  # (num_items,)
    # Two steps never mix to one number, so every way of sorting gives the same permutation.
    return np.argsort(mix64(state + steps * np.uint64(0x9E3779B97F4A7C15)))


def _xxh64(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash N byte ranges (`starts`, `lengths`, int64) of `data` (uint8) to N uint64."""
    if len(lengths) > 1 and lengths.min() != lengths.max():
        order = np.argsort(-lengths, kind="stable")  # longest first: active rows are a prefix
        hashes = np.empty(len(lengths), np.uint64)
        hashes[order] = _hash_ordered(data, starts[order], lengths[order])
        return hashes
    return _hash_ordered(data, starts, lengths)


def _hash_ordered(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash byte ranges that come longest first, in blocks whose temporaries stay in the cache."""
    words, halves = _unaligned(data, "<u8"), _unaligned(data, "<u4")
    hashes = np.empty(len(starts), np.uint64)  # (N,)
    for first in range(0, len(starts), _BLOCK_ROWS):
        block = slice(first, first + _BLOCK_ROWS)
        hashed = _hash_stripes(words, starts[block], lengths[block] >> 5)
        hashed += lengths[block].view(np.uint64)
        _hash_rest(hashed, (words, halves, data), starts[block], lengths[block])
        hashed ^= hashed >> np.uint64(33)
        hashed *= _PRIME_2
        hashed ^= hashed >> np.uint64(29)
        hashed *= _PRIME_3
        hashed ^= hashed >> np.uint64(32)
        hashes[block] = hashed
    return hashes


def _hash_rest(
    hashes: np.ndarray,
    views: tuple[np.ndarray, np.ndarray, np.ndarray],
    starts: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """Fold each row's last 0 to 31 bytes into `hashes`: whole words, then a half word, then bytes.

    Args:
        hashes: (N,) uint64 accumulators, changed in place.
        views: the data as overlapping 8-byte words, 4-byte half words and single bytes.
        starts: (N,) int64 first byte of each row.
        lengths: (N,) int64 bytes of each row.
    """
    words, halves, data = views
    # (N,) each: position of the next unread byte, and number of bytes left.
    cursor, rest = starts + (lengths & -_STRIPE_BYTES), lengths & (_STRIPE_BYTES - 1)
    for position in range(3):
        rows = _rows(rest >= 8 * (position + 1))
        if rows is None:
            break
        word = _round(np.uint64(0), words[cursor[rows] + 8 * position])
        hashes[rows] = _rotate(hashes[rows] ^ word, 27) * _PRIME_1 + _PRIME_4
    cursor, rest = cursor + (rest & 24), rest & 7
    rows = _rows(rest >= 4)
    if rows is not None:
        half = halves[cursor[rows]].astype(np.uint64)
        hashes[rows] = _rotate(hashes[rows] ^ (half * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
    cursor, rest = cursor + (rest & 4), rest & 3
    for position in range(3):
        rows = _rows(rest > position)
        if rows is None:
            break
        byte = data[cursor[rows] + position].astype(np.uint64)
        hashes[rows] = _rotate(hashes[rows] ^ (byte * _PRIME_5), 11) * _PRIME_1


def _hash_stripes(words: np.ndarray, starts: np.ndarray, stripes: np.ndarray) -> np.ndarray:
    """Return the accumulator of each row after its 32-byte stripes; rows come longest first."""
    hashes = np.full(len(starts), _PRIME_5, np.uint64)
    num_long = int(np.count_nonzero(stripes > 0))
    if not num_long:
        return hashes
    with np.errstate(over="ignore"):
        initial = (_PRIME_1 + _PRIME_2, _PRIME_2, np.uint64(0), np.uint64(0) - _PRIME_1)
    lanes = np.repeat(np.array(initial, np.uint64)[:, None], num_long, axis=1)  # (4, num_long)
    lane_offsets = np.arange(0, _STRIPE_BYTES, 8)[:, None]  # (4, 1) bytes
    active, ascending = num_long, stripes[:num_long][::-1]
    for stripe in range(int(stripes[0])):
        active = num_long - int(np.searchsorted(ascending, stripe, side="right"))
        position = starts[None, :active] + (lane_offsets + stripe * _STRIPE_BYTES)  # (4, active)
        lanes[:, :active] = _round(lanes[:, :active], words[position])
    total = np.zeros(num_long, np.uint64)  # (num_long,)
    for lane, rotation in zip(lanes, _LANE_ROTATIONS, strict=True):
        total += _rotate(lane, rotation)
    for lane in lanes:
        total = (total ^ _round(np.uint64(0), lane)) * _PRIME_1 + _PRIME_4
    hashes[:num_long] = total
    return hashes


def _round(accumulator: np.ndarray | np.uint64, word: np.ndarray) -> np.ndarray:
    """Apply XXH64's round to uint64 accumulators and words; return the next accumulators."""
    return _rotate(accumulator + word * _PRIME_2, 31) * _PRIME_1


def _rotate(value: np.ndarray, bits: int) -> np.ndarray:
    """Rotate uint64 left by `bits`."""
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


def _rows(active: np.ndarray) -> slice | np.ndarray | None:
    """Return an index of the active rows: a slice for all (no copy), None for none."""
    count = int(np.count_nonzero(active))
    if count == len(active) and count:
        return slice(None)
    return np.flatnonzero(active) if count else None


def _unaligned(data: np.ndarray, dtype: str) -> np.ndarray:
    """View bytes as overlapping little-endian words, one starting at every byte, without a copy."""
    width = np.dtype(dtype).itemsize
    count = max(len(data) - width + 1, 0)
    return np.ndarray((count,), dtype, buffer=data if count else bytes(width), strides=(1,))

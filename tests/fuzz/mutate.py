# SPDX-License-Identifier: MIT
"""Damage to bytes and to plain data, drawn from a seed."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

# Code that must never run: the fuzzer's audit hook reports an import of it.
BOMB = "fuzzbomb"
TEXTS = (
    *("", " ", "\n", "\x00", "\u2028", "é", "\ud800", "$x$", "$$", "_mine", "a" * 5_000, "-", "~"),
    *("../../../fuzz-escape", "/fuzz-escape", "=cmd()", "<script>fuzz", "{{ 7 * 7 }}", "%s %n"),
    *(f"{BOMB}:boom", f"{BOMB}.boom", f"!!python/object/apply:{BOMB}.boom []", "&a [*a]"),
    *("nan", "inf", "no", "null", "1e6", "9" * 30, "2026-02-30", "step-1", "type"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf")),
    *([], {}, [[]], [None], [1, "a"], {"type": BOMB}, {"": 1}, [[[[[[]]]]]]),
)
TOKENS = tuple(
    text.encode("utf-8", "surrogatepass")
    for text in (
        *TEXTS,
        *("[", "]", "{", "}", ",", ":", '"', "'", '""', "|", ";", "\t", "\r", "\r\n", "#", "- "),
        *("&a ", "*a", "<<: *a", "!!set", "!!binary", "---\n", "...\n", "? ", "0x1F", "1_000"),
        *("[" * 2_000, "{a: " * 500, '"' * 9, "\xff\xfe", "\ufeff", "2026-01-01"),
    )
)
SCALES = (1, 1, 1, 2, 3, 8)  # damages to one input


def damage_bytes(data: bytes, random: Random) -> bytes:
    """Return `data` with a few places overwritten, cut, repeated or filled with tokens."""
    found = bytearray(data)
    for _ in range(random.choice(SCALES)):
        place = random.randrange(len(found) + 1)
        length = min(random.choice((1, 1, 2, 4, 16, 256)), len(found) - place)
        kind = random.randrange(7)
        if kind == 0:
            found[place : place + length] = random.randbytes(length)
        elif kind == 1:
            del found[place : place + length]
        elif kind == 2:
            found[place:place] = random.choice(TOKENS)
        elif kind == 3:
            found[place : place + length] = random.choice(TOKENS)
        elif kind == 4:
            found[place:place] = found[place : place + length] * random.choice((1, 2, 50))
        elif kind == 5 and place < len(found):
            found[place] ^= 1 << random.randrange(8)
        elif kind == 6 and random.random() < 0.2:
            del found[place:]
    return bytes(found[: 1 << 18])


def damage_tree(value: Any, random: Random) -> Any:
    """Return a copy of plain data with a few of its values, keys or branches changed."""
    found = copy.deepcopy(value)
    for _ in range(random.choice(SCALES)):
        places = list(_places(found))
        if not places:
            return random.choice(VALUES)
        parent, key = random.choice(places)
        kind = random.randrange(8)
        if kind == 0:
            parent[key] = copy.deepcopy(random.choice(VALUES))
        elif kind == 1:
            parent[key] = random.choice(TEXTS)
        elif kind == 2:
            del parent[key]
        elif kind == 3:
            other, name = random.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                parent[key] = copy.deepcopy(other[name])
        elif kind == 4 and isinstance(parent, dict):
            parent[random.choice(TEXTS)] = parent.pop(key)
        elif kind == 5 and isinstance(parent, list):
            parent.extend(copy.deepcopy(parent) * random.choice((1, 3)))
        elif kind == 6 and isinstance(parent[key], int | float):
            parent[key] = _nudged(parent[key], random)
        elif kind == 7:
            parent[key] = _deep(random.choice((50, 300)), random)
            break  # copies of deeper trees would be too deep for Python
    return found


def dump_json(value: Any) -> bytes:
    """Return plain data as JSON, NaN and lone surrogates included."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 100_000


def _nudged(value: float, random: Random) -> Any:
    return random.choice((-value, value + 1, value - 1, value * 1000, str(value), [value]))


def _deep(depth: int, random: Random) -> Any:
    found: Any = random.choice((1, "x", None))
    for _ in range(depth):
        found = [found] if random.random() < 0.5 else {"a": found}
    return found


def _places(value: Any) -> Any:
    """Yield every (container, key) of plain data, down to a depth that walks stay cheap at."""
    stack, count = [(value, 0)], 0
    while stack and count < 20_000:
        parent, depth = stack.pop()
        if not isinstance(parent, dict | list) or depth > 40:
            continue
        for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
            count += 1
            yield parent, key
            stack.append((parent[key], depth + 1))

# SPDX-License-Identifier: MIT
"""Plain data to dataclasses: strict, and bounded whatever a file holds."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from embeddings.schema.plain import from_plain, suggest


@dataclass(frozen=True, kw_only=True)
class Round:
    """A member of a union."""

    radius: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Square:
    """Another one."""

    side: int = 1


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One field of every kind that a configuration has."""

    name: str
    size: int = 1
    scale: float = 1.0
    filled: bool = False
    mode: Literal["fast", "fine"] = "fast"
    shape: Round | Square = field(default_factory=Round)
    frame: Square | None = None
    note: str | None = None
    points: tuple[int, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)


def _aliases(levels: int) -> list[Any]:
    """Return a list of 10^levels strings that takes no room, as YAML aliases make it."""
    value: list[Any] = ["x"] * 10
    for _ in range(levels):
        value = [value] * 10
    return value


def test_every_kind_of_field_is_converted():
    plain = {
        "name": "a",
        "size": 2,
        "scale": 3,
        "filled": True,
        "mode": "fine",
        "shape": {"type": "Square", "side": 4},
        "frame": {"side": 5},
        "note": "n",
        "points": [1, 2],
        "tags": {"k": "v"},
    }
    assert from_plain(Drawing, plain, "d") == Drawing(
        name="a",
        size=2,
        scale=3.0,
        filled=True,
        mode="fine",
        shape=Square(side=4),
        frame=Square(side=5),
        note="n",
        points=(1, 2),
        tags={"k": "v"},
    )


@pytest.mark.parametrize("name", list(Drawing.__dataclass_fields__))
def test_a_value_that_unfolds_without_end_is_refused_in_a_short_message(name: str) -> None:
    for bomb in (_aliases(30), {"k": _aliases(30)}, {"type": _aliases(30)}):
        with pytest.raises(ValueError) as refused:
            from_plain(Drawing, {"name": "a", name: bomb}, "d")
        assert str(refused.value).startswith(f"d.{name}")
        assert len(str(refused.value)) < 400


def test_a_key_or_a_name_of_any_length_makes_a_short_message():
    for values in ({"name": "a", "k" * 10**6: 1}, {"name": 1, "mode": "m" * 10**6}):
        with pytest.raises(ValueError) as refused:
            from_plain(Drawing, values, "d")
        assert len(str(refused.value)) < 400
    assert suggest("m" * 10**6, ["fast"]) == ""


@pytest.mark.parametrize("value", [False, None, 1.1, 7, datetime.date(2026, 1, 1)])
def test_what_yaml_reads_as_another_type_than_text_is_to_be_quoted(value: Any) -> None:
    with pytest.raises(ValueError, match=r"d\.name: expected str, got .*; write it in quotes"):
        from_plain(Drawing, {"name": value}, "d")
    with pytest.raises(ValueError, match=r"d\.tags: expected str, got .*; write it in quotes"):
        from_plain(Drawing, {"name": "a", "tags": {value: "v"}}, "d")


@pytest.mark.parametrize("name", ["size", "scale", "points"])
@pytest.mark.parametrize("number", [10**30, -(10**30), 10**5000], ids=["30", "-30", "5000"])
def test_a_number_of_more_than_64_bits_is_refused(name: str, number: int) -> None:
    value = [number] if name == "points" else number
    with pytest.raises(ValueError, match=rf"d\.{name}.*: expected a number of at most 64 bits"):
        from_plain(Drawing, {"name": "a", name: value}, "d")


@pytest.mark.parametrize("value", [{}, {"type": "Circle"}, {"type": ["Square"]}, [], None, 3])
def test_a_member_of_a_union_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"d\.shape\.type: expected one of \['Round', 'Square'\]"):
        from_plain(Drawing, {"name": "a", "shape": value}, "d")


@pytest.mark.parametrize("value", ["1", "", True, 1.0, None, [1], {"a": 1}, 7])
def test_another_value_than_a_choice_of_numbers_and_texts_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"x: expected one of \[1, 8, 'auto'\], got "):
        from_plain(Literal[1, 8, "auto"], value, "x")
    assert from_plain(Literal[1, 8, "auto"], 8, "x") == 8

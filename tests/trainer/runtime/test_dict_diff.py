# SPDX-License-Identifier: MIT
"""Differences of nested settings."""

from trainer.runtime.dict_diff import differences

OLD = {"a": 1, "b": {"c": [1, 2], "d": {"e": None}}, "gone": {"x": 1}}
NEW = {"a": 1, "b": {"c": [1, 3], "d": {"e": 5}}, "come": 7}


def test_each_difference_has_its_path_and_both_values():
    found = differences(OLD, NEW)
    assert [tuple(one) for one in found] == [
        ("b.c", [1, 2], [1, 3]),
        ("b.d.e", None, 5),
        ("come", None, 7),
        ("gone", {"x": 1}, None),
    ]
    assert str(found[1]) == "b.d.e: None, now 5"
    assert differences(OLD, OLD) == []


def test_ignored_paths_are_left_out_with_what_is_below_them():
    assert [one.path for one in differences(OLD, NEW, {"b", "come"})] == ["gone"]
    assert [one.path for one in differences(OLD, NEW, {"b.d"})] == ["b.c", "come", "gone"]


def test_a_value_of_any_length_is_shown_in_one_short_line():
    (found,) = differences({"a": "x\n" * 500}, {"a": {3: 4}})
    assert len(str(found)) < 150 and "\n" not in str(found)


def test_keys_that_are_no_text_and_values_that_are_no_mapping_compare():
    assert [one.path for one in differences({1: 2, "b": 3}, {1: 3, "b": 3})] == ["1"]
    assert [tuple(one) for one in differences(4, 5)] == [("", 4, 5)]

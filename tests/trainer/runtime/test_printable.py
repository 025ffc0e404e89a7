# SPDX-License-Identifier: MIT
"""Text from outside cannot begin a line of a log, nor steer a terminal."""

import pytest

from trainer.runtime.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("day.csv", "day.csv"),
        ("größe τ 日本", "größe τ 日本"),
        ("a\nalert: forged", "a\\nalert: forged"),
        ("a\r\x1b[2Kgone", "a\\r\\x1b[2Kgone"),
        ("a\x85b\u2028c", "a\\x85b\\u2028c"),
        ("\u202ecod.exe", "\\u202ecod.exe"),
        ("a\udcffb", "a\\udcffb"),  # a file's name that is no UTF-8
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
    ],
)
def test_what_cannot_be_printed_becomes_its_escape(text, shown):
    assert printable(text) == shown
    assert len(shown.splitlines()) == 1
    printable(text).encode()


def test_further_lines_of_a_message_are_indented():
    assert printable_lines("usage:\n\tone\nalert: two\x1b[0m") == (
        "usage:\n        one\n    alert: two\\x1b[0m"
    )

# SPDX-License-Identifier: MIT
"""Files of lines survive whatever a crash of the process or the machine has left in them."""

import json

import pytest

from trainer.runtime.json_lines import append, last_step, truncate

DAMAGE = [
    b'{"step": 4, "lo',
    b"\x00\x00\x00\x00",
    b"\xff\xfe",
    b"4",
    b"[4]",
    b'{"loss": 0.1}',
    b'{"step": "4"}',
    b'{"step": 4, "note": "\xe2\x80',
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_line_that_a_crash_has_left_is_dropped_and_the_others_stay(tmp_path, damage):
    path = tmp_path / "curves.jsonl"
    for step in (1, 2, 3):
        append(path, {"step": step, "note": "\u2028"})
    whole = path.read_bytes()
    path.write_bytes(whole + damage)
    assert last_step(path) == 3
    assert truncate(path, 3)["step"] == 3 and path.read_bytes() == whole
    append(path, {"step": 4})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    path.write_bytes(damage + b"\n" + whole)
    assert truncate(path, 2)["step"] == 2 and last_step(path) == 2


def test_a_file_that_is_not_there_has_no_steps(tmp_path):
    assert last_step(tmp_path / "none") == 0 and truncate(tmp_path / "none", 5) == {}

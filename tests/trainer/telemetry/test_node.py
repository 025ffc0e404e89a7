# SPDX-License-Identifier: MIT
"""The ranks of a node are merged; one that is killed is gone, and what it counted is not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.telemetry.node import Listener, Node, Sender
from trainer.telemetry.series import Values

# What a rank sends, from a process that starts in no time.
SENDER = """
import socket, sys, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(sys.argv[2].encode() + b"\\n")
time.sleep(60)
"""


def values(step: float = 1, waited: float = 0.0) -> Values:
    made = Values()
    made.set("rank_step", step)
    made.set("input_wait_seconds_total", waited)
    return made


def series(node: Node) -> dict[str, float]:
    """The node's series as name{label,label}."""
    return {
        metric.name + "".join(f"{{{v}}}" for v in labels.values()): value
        for metric, labels, value in node.samples()
    }


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def node():
    return Node(0, values(3, 1.0), 2)


@pytest.fixture
def listener(node):
    listener = Listener(node)
    yield listener
    listener.close()


def test_counters_of_ranks_are_added_and_gauges_stand_side_by_side(node):
    node.take(1, values(2, 10.0))
    found = series(node)
    assert found["input_wait_seconds_total"] == 11.0
    assert (found["rank_step{0}"], found["rank_step{1}"]) == (3, 2)
    assert (found["ranks"], found["ranks_expected"]) == (2, 2)


def test_sums_never_fall_whoever_dies_or_begins_again(node):
    node.take(1, values(2, 10.0))
    node.take(1, values(3, 12.0))
    assert series(node)["input_wait_seconds_total"] == 13.0
    node.gone(1)
    assert series(node)["input_wait_seconds_total"] == 13.0
    node.take(1, values(1, 0.5))
    assert series(node)["input_wait_seconds_total"] == 13.5
    node.take(1, values(1, 0.25))
    assert series(node)["input_wait_seconds_total"] == 13.75


def test_what_describes_the_run_is_told_by_one_rank_alone(node):
    node.own.set("loss", 0.5)
    node.own.set("rows_total", 100)
    other = values()
    other.set("loss", 9.0)
    other.set("rows_total", 50)
    node.take(1, other)
    found = series(node)
    assert (found["loss"], found["rows_total"]) == (0.5, 100)


def test_the_skew_is_between_the_ranks_that_are_alive(node):
    node.own.set("rank_own_seconds", 0.1)
    slow = values()
    slow.set("rank_own_seconds", 0.5)
    node.take(1, slow)
    assert series(node)["rank_skew_seconds"] == pytest.approx(0.4)
    node.gone(1)
    assert series(node)["rank_skew_seconds"] == 0


def test_a_killed_rank_disappears_and_what_it_counted_stays(node, listener):
    content = json.dumps({"rank": 1, "values": values(7, 4.0).plain()})
    process = subprocess.Popen([sys.executable, "-c", SENDER, listener.path, content])
    until(lambda: "rank_step{1}" in series(node))
    assert series(node)["input_wait_seconds_total"] == 5.0
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: "rank_step{1}" not in series(node))
    assert series(node)["ranks"] == 1
    assert series(node)["input_wait_seconds_total"] == 5.0


def test_the_socket_belongs_to_this_user_and_its_name_goes_when_all_have_come(node, listener):
    folder = Path(listener.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    sender = Sender(listener.path, 1, values())
    until(lambda: not folder.exists())
    sender.send()
    until(lambda: "rank_step{1}" in series(node))
    sender.close()


def test_what_is_no_series_of_ours_is_ignored(node, listener):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener.path)
        junk = [["nonsense", [], 1], ["loss", ["extra"], 1], ["rank_step", [], "x"], 5, None]
        content = [b"not json", b"[1]", json.dumps({"rank": 1, "values": [*junk]}).encode()]
        stranger.sendall(b"\n".join(content) + b"\n")
        until(lambda: series(node)["ranks"] == 2)
        assert "rank_step{1}" not in series(node)
    until(lambda: series(node)["ranks"] == 1)


def test_a_rank_never_waits_for_a_node_that_does_not_listen(tmp_path):
    path = str(tmp_path / "deaf")
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(path)
        deaf.listen()
        many = values()
        for table in range(200):
            many.set("table_rows", table, f"table {table}")
        sender = Sender(path, 1, many)
        started = time.monotonic()
        for _ in range(100):
            sender.send()
        assert time.monotonic() - started < 2
        heard, _ = deaf.accept()
        with heard:
            heard.settimeout(5)
            text = heard.recv(1 << 20)
            sender.send()
            while not text.endswith(b"\n"):
                text += heard.recv(1 << 20)
                sender.send()
        assert all(json.loads(line)["rank"] == 1 for line in text.splitlines())
        sender.send()
        sender.send()  # nobody is there any more
        sender.close()


def test_a_temporary_folder_with_a_long_name_does_not_keep_ranks_apart(node, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    listener = Listener(node)
    sender = Sender(listener.path, 1, values(4))
    sender.send()
    until(lambda: series(node)["ranks"] == 2)
    sender.close()
    listener.close()
    assert not os.listdir(long)
    assert not Path(listener.path).parent.exists()


def test_a_listener_that_cannot_be_made_leaves_nothing(node, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr("os.access", lambda *_: False)  # as where nobody may write to /tmp
    with pytest.raises(OSError, match="longer than a socket's name may be; shorten TMPDIR"):
        Listener(node)
    assert not os.listdir(long)

# SPDX-License-Identifier: MIT
"""A folder has one owner: through dead owners, containers of one name, and clocks that jump."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from pipelines.orchestration import lock as lock_module
from pipelines.orchestration.lock import Lock, LockedError

ELSEWHERE = {"host": "elsewhere", "kernel": "another", "process_ids": "pid:[1]", "device": 0}


def here(folder) -> dict:
    """Where this process is, as a record says it."""
    file = os.open(folder, os.O_RDONLY)
    try:
        return lock_module._place(file)
    finally:
        os.close(file)


def write(folder, age: float = 0.0, **changes) -> dict:
    """Write the record of another owner, as old as `age` seconds by the file system's clock."""
    record = {"token": "x", "pid": 1, "since": 0.0, "expiry_seconds": 60.0, "beat": 0}
    record |= {"flock": False, "started": "1", **ELSEWHERE, **changes}
    path = folder / ".lock"
    path.write_text(json.dumps(record))
    when = time.time() - age
    os.utime(path, (when, when))
    return record


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without locks of the operating system."""
    monkeypatch.setattr(lock_module, "_flock", lambda file: None)


def is_refused(folder) -> bool:
    try:
        with Lock(folder):
            return False
    except LockedError:
        return True


def test_a_second_run_is_refused_with_the_owners_name_until_the_first_ends(tmp_path):
    with Lock(tmp_path) as first:
        with pytest.raises(LockedError, match=rf"process {os.getpid()} on {socket.gethostname()}"):
            Lock(tmp_path).__enter__()
        assert first.holds()
    with Lock(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_of_many_that_want_a_folder_one_gets_it(tmp_path):
    results, start = [], threading.Barrier(8)

    def take():
        start.wait()
        try:
            Lock(tmp_path).__enter__()
            results.append("got")
        except LockedError:
            results.append("refused")

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["got"] + ["refused"] * 7


def test_a_killed_owner_of_this_kernel_is_known_to_be_gone_at_once(tmp_path):
    code = (
        "import sys, pathlib; from pipelines.orchestration.lock import Lock;"
        "Lock(pathlib.Path(sys.argv[1])).__enter__(); print('mine', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"mine\n"
        with pytest.raises(LockedError, match=f"process {process.pid} on"):
            Lock(tmp_path).__enter__()
        process.kill()
    started = time.monotonic()
    with Lock(tmp_path):
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("flock", [False, True])
def test_a_container_of_the_same_host_name_is_not_judged_by_its_process_ids(
    flock, tmp_path, no_flock
):
    """Its process 4194303 is nobody here, and its process 1 is somebody else here."""
    for pid in (4_194_303, 1):
        write(tmp_path, **{**here(tmp_path), "process_ids": "pid:[7]", "pid": pid, "flock": flock})
        assert is_refused(tmp_path)


def test_a_container_of_this_kernel_that_held_a_lock_of_the_system_is_gone_without_it(tmp_path):
    write(tmp_path, **{**here(tmp_path), "process_ids": "pid:[7]", "flock": True})
    assert not is_refused(tmp_path)


def test_another_mount_of_the_folder_may_have_locks_of_its_own(tmp_path):
    write(tmp_path, **{**here(tmp_path), "device": -1, "flock": True})
    assert is_refused(tmp_path)


@pytest.mark.parametrize(
    ("pid", "started", "refused"),
    [
        (os.getpid(), lock_module._started(os.getpid()), True),
        (os.getpid(), "17", False),  # the number was given to another process since
        (4_194_303, "17", False),
        (2**70, "17", False),
        (-1, "17", False),
    ],
    ids=["alive", "reused", "highest", "absurd", "negative"],
)
def test_an_owner_among_the_same_process_ids_is_known_by_id_and_start(
    pid, started, refused, tmp_path, no_flock
):
    write(tmp_path, **{**here(tmp_path), "pid": pid, "started": started})
    assert is_refused(tmp_path) is refused


@pytest.mark.parametrize("age", [3600.0, 86_400.0, -3600.0])
def test_an_owner_elsewhere_that_renews_keeps_its_folder_whatever_the_clock_says(age, tmp_path):
    record, ended = write(tmp_path, age, expiry_seconds=3.0), threading.Event()

    def renew():
        beat = 0
        while not ended.wait(0.1):
            beat += 1
            path = tmp_path / ".renewed"
            path.write_text(json.dumps({**record, "beat": beat}))
            os.utime(path, (time.time() - age, time.time() - age))
            path.replace(tmp_path / ".lock")

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        assert is_refused(tmp_path)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("age", [3600.0, -3600.0])
def test_an_owner_elsewhere_that_missed_a_renewal_while_it_was_watched_is_gone(
    age, tmp_path, capsys
):
    write(tmp_path, age, expiry_seconds=0.6)
    started = time.monotonic()
    assert not is_refused(tmp_path)
    assert time.monotonic() - started >= 0.3, "half of the expiry is watched"
    assert "process 1 on elsewhere seems to be gone; watching" in capsys.readouterr().err


def test_a_record_that_is_not_old_is_refused_at_once_by_the_seconds_it_has_left(tmp_path):
    write(tmp_path, age=100.0, expiry_seconds=300.0)
    with pytest.raises(LockedError, match=r"run out in (199|200) s"):
        Lock(tmp_path).__enter__()


def test_of_two_that_watch_the_same_dead_owner_one_takes_over(tmp_path, no_flock):
    write(tmp_path, age=3600.0, expiry_seconds=0.6)
    results, start = [], threading.Barrier(2)

    def take():
        start.wait()
        try:
            Lock(tmp_path).__enter__()
            results.append("got")
        except LockedError:
            results.append("refused")

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["got", "refused"]


WHOLE = {"token": "x", "pid": 1, "since": 0, "expiry_seconds": 300, "beat": 0}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", '"text"', "[" * 3000),
        *(json.dumps({**WHOLE, "beat": value}) for value in ("a", [], None)),
        json.dumps({**WHOLE, "token": 3}),
        json.dumps({**WHOLE, "since": float("nan")}),
        json.dumps({**WHOLE, "pid": 10**400}),
    ],
)
def test_a_damaged_record_is_nobodys(text, tmp_path):
    (tmp_path / ".lock").write_text(text)
    assert not is_refused(tmp_path)


def test_a_record_cannot_make_others_wait_for_ever_nor_forge_a_line(tmp_path):
    write(tmp_path, host="a\nalert: forged\x1b[2J", expiry_seconds=1e300, since=1e300)
    with pytest.raises(LockedError) as caught:
        Lock(tmp_path).__enter__()
    (line,) = str(caught.value).splitlines()
    assert r"on a\nalert: forged\x1b[2J" in line and "\x1b" not in line
    assert "run out in 3600 s" in line


@pytest.mark.parametrize("name", [".lock.held", ".lock.guard"])
def test_a_planted_link_is_not_followed(name, tmp_path):
    victim = tmp_path / "victim"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).symlink_to(victim)
    with pytest.raises(OSError):
        Lock(tmp_path / "folder").__enter__()
    assert not victim.exists()


def test_a_pipe_in_the_place_of_the_record_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert not is_refused(tmp_path)


def test_the_owner_renews(tmp_path):
    with Lock(tmp_path, expiry_seconds=0.15) as lock:
        deadline = time.monotonic() + 10
        while (lock.owner() or {}).get("beat", 0) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (lock.owner() or {})["beat"] >= 2


def test_an_owner_that_was_replaced_commits_nothing(tmp_path):
    with Lock(tmp_path) as lock:
        with lock.committing():
            pass
        write(tmp_path)
        with pytest.raises(LockedError, match="taken over"), lock.committing():
            pytest.fail("it must not come here")
        assert not lock.renew()
    assert json.loads((tmp_path / ".lock").read_text())["token"] == "x", "the other's stays"


def test_nobody_becomes_the_owner_while_results_are_put_in_place(tmp_path, no_flock, monkeypatch):
    """The old owner was believed dead, and is in the middle of its commit."""
    monkeypatch.setattr(Lock, "_is_gone", lambda *_: True)
    order, inside = [], threading.Event()
    with Lock(tmp_path) as old:

        def take():
            inside.wait()
            Lock(tmp_path).__enter__()
            order.append("taken over")

        thread = threading.Thread(target=take)
        thread.start()
        with old.committing():
            inside.set()
            time.sleep(0.2)
            order.append("committed")
        thread.join()
    assert order == ["committed", "taken over"]

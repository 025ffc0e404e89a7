# SPDX-License-Identifier: MIT
"""What a watcher sees of a night's stages while it runs, when it fails, when it is killed."""

import os
import re
import signal

import pytest

from pipelines import run
from pipelines.nightly import night_metrics, nightly
from pipelines.orchestration.run_status import STATES
from pipelines.orchestration.stage import Pipeline, Stage, StageError

DATE = "2026-01-03"


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Return a function that runs a night of three stages, the second of which does `act`."""

    def run_night(act=lambda: None, date=DATE, seen=None):
        def days(work):
            return {"new": [], "skipped": {}, "rows": {DATE: 5}, "trained_rows": 10}

        def candidate(work):
            if seen is not None:
                seen.append(states(tmp_path))
            act()
            return {}

        def publication(work):
            return {"promoted": True}

        stages = [
            Stage(make=days),
            Stage(make=candidate, inputs=("days",)),
            Stage(make=publication, inputs=("candidate",)),
        ]
        pipeline = Pipeline(
            stages=stages, folder=tmp_path / "nights" / DATE, conclude=lambda metrics: run.DONE
        )
        monkeypatch.setattr(nightly, "build", lambda options: pipeline)
        words = ["--recipe", "dlrm.demo", "--data", str(tmp_path / "logs")]
        return run.main(["nightly", "--date", date, *words, "--output", str(tmp_path)])

    return run_night


def text(folder):
    return (folder / night_metrics.FILE).read_text()


def states(folder):
    """The state of each stage; every other state of it is 0."""
    found = re.findall(
        r'^fullrank_stage_state\{pipeline="nightly",stage="(\w+)",state="(\w+)"\} ([01])$',
        text(folder),
        re.MULTILINE,
    )
    stages = list(dict.fromkeys(stage for stage, _, _ in found))
    assert [(stage, state) for stage, state, _ in found] == [
        (stage, state) for stage in stages for state in STATES
    ]
    current = [(stage, state) for stage, state, value in found if value == "1"]
    assert [stage for stage, _ in current] == stages
    since = re.findall(
        r'^fullrank_stage_since_timestamp_seconds\{pipeline="nightly",stage="(\w+)"\} \d{10}',
        text(folder),
        re.MULTILINE,
    )
    assert since == stages
    return dict(current)


def test_a_watcher_sees_each_stage_of_a_night_wait_run_and_end(night, tmp_path, capsys):
    def fail():
        raise StageError("the disk\nis full")

    seen = []
    assert night(fail, seen=seen) == run.FAILED
    assert seen == [{"days": "done", "candidate": "running", "publication": "waiting"}]
    assert states(tmp_path) == {"days": "done", "candidate": "failed", "publication": "waiting"}
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("alert:")]
    assert line.startswith(f"alert: night {DATE} failed in")
    assert line.endswith("candidate: the disk is full")
    assert "fullrank_night_exit_code 1\n" in text(tmp_path)
    assert "last_success" not in text(tmp_path)
    assert night(seen=seen) == run.DONE
    assert seen[1] == {"days": "skipped", "candidate": "running", "publication": "waiting"}
    assert states(tmp_path) == {"days": "skipped", "candidate": "done", "publication": "done"}
    assert "fullrank_night_last_success_timestamp_seconds" in text(tmp_path)
    for name in ("night_exit_code", "stage_state", "stage_since_timestamp_seconds"):
        assert text(tmp_path).count(f"# TYPE fullrank_{name} gauge\n") == 1
    success = re.findall(r"last_success_\w+ (.*)", text(tmp_path))
    assert night() == run.DONE
    assert {*states(tmp_path).values()} == {"skipped"}
    assert re.findall(r"last_success_\w+ (.*)", text(tmp_path)) >= success


def test_a_stage_that_was_killed_stays_running(night, tmp_path):
    pid = os.fork()
    if not pid:
        try:
            night(lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert states(tmp_path)["candidate"] == "running"
    assert night() == run.DONE
    assert states(tmp_path)["candidate"] == "done"


@pytest.mark.parametrize(("date", "said"), [("new", "not ready"), ("soon", "wrong")])
def test_dates_that_are_no_night_ring_too(date, said, night, tmp_path, capsys):
    (tmp_path / "logs/dt=2026-01-03").mkdir(parents=True)
    assert night() == run.DONE
    (tmp_path / "nights" / DATE / "publication").mkdir(exist_ok=True)
    before = text(tmp_path)
    capsys.readouterr()
    assert night(date=date) in (run.NOT_READY, run.WRONG)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("alert:")]
    assert line.startswith(f"alert: night {date} {said} in 0 s: --date")
    if date == "new":  # no day is ready: the file says so, and keeps no number of another night
        assert re.findall(r"^fullrank_night_exit_code (.*)", text(tmp_path), re.MULTILINE) == [
            f"{run.NOT_READY}"
        ]
        assert "fullrank_night_date_timestamp_seconds" not in text(tmp_path)
    else:
        assert text(tmp_path) == before

# SPDX-License-Identifier: MIT
"""Links that were planted in an output folder are replaced; what they lead to stays as it was."""

from __future__ import annotations

import sys

import pytest

from pipelines import run
from pipelines.nightly import night_metrics
from pipelines.orchestration import stage
from pipelines.orchestration.launch import LaunchConfig
from pipelines.orchestration.lock import Lock
from pipelines.orchestration.output_files import fresh_folder, open_log, remove
from pipelines.orchestration.run_status import RunStatus
from pipelines.orchestration.stage import Stage, StageError


@pytest.fixture
def victim(tmp_path):
    """A file that nothing may change, in a folder that nothing may change."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("as it was")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "as it was"


def numbers(work):
    (work.folder / "numbers.txt").write_text("1")
    return {}


@pytest.mark.parametrize("name", [".numbers.unfinished", ".numbers.replaced", "numbers"])
def test_a_stage_is_made_beside_a_planted_folder(name, victim, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / name).symlink_to(victim, target_is_directory=True)
    with Lock(folder) as lock:
        stage.recover(folder, ["numbers"])
        assert stage.make(Stage(make=numbers), folder, lock, print)[0]
    assert (folder / "numbers/numbers.txt").read_text() == "1"


@pytest.mark.parametrize("name", ["request.json", "manifest.json"])
def test_a_stages_own_files_replace_planted_ones(name, victim, tmp_path):
    def plant(work):
        (work.folder / name).unlink(missing_ok=True)
        (work.folder / name).symlink_to(victim / "file")
        return {}

    with Lock(tmp_path / "out") as lock:
        made, _ = stage.make(Stage(make=plant), tmp_path / "out", lock, print)
    assert made and not (tmp_path / "out/plant/manifest.json").is_symlink()


def test_a_log_is_written_beside_a_planted_one(victim, tmp_path):
    (tmp_path / "log.txt").symlink_to(victim / "file")
    LaunchConfig().start([sys.executable, "-c", "print('hello')"], tmp_path / "log.txt", print)
    with open_log(tmp_path / "log.txt") as log:
        log.write("more\n")
    assert (tmp_path / "log.txt").read_text() == "hello\nmore\n"


@pytest.mark.parametrize("leads_to", ["folder", "file", "nothing"])
def test_removing_removes_the_link(leads_to, victim, tmp_path):
    link = tmp_path / "link"
    link.symlink_to({"folder": victim, "file": victim / "file"}.get(leads_to, tmp_path / "gone"))
    if leads_to == "file":
        remove(link)
        assert not link.is_symlink()
        return
    assert fresh_folder(link).is_dir() and not link.is_symlink()


def test_the_numbers_of_a_night_replace_a_planted_file(victim, tmp_path):
    path = tmp_path / night_metrics.FILE
    path.symlink_to(victim / "file")
    night_metrics.write_states(path, RunStatus(states={"days": ("running", 1.0)}))
    assert 'stage="days",state="running"} 1' in path.read_text() and not path.is_symlink()


FORGED = "day\nalert: night 2026-01-09 promoted\x1b[2K"


@pytest.mark.parametrize("error", [ValueError, StageError, OSError, RuntimeError])
def test_a_name_in_an_error_cannot_begin_a_line_of_the_log(error, tmp_path, capsys):
    def broken(work):
        work.say(f"reading {FORGED}")
        raise error(f"{FORGED}: cannot be read")

    pipeline = stage.Pipeline(stages=[Stage(make=broken)], folder=tmp_path, conclude=lambda _: 0)
    with Lock(tmp_path) as lock:
        assert run.run(pipeline, lock, RunStatus()) != 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\\x1b[2K" in out and "\\x1b[2K" in err
    assert not any(line.startswith("alert") for line in (out + err).splitlines())


def test_the_line_of_a_night_is_one_line_whatever_the_reason():
    status = RunStatus(code=1, reason=FORGED, seconds=1.0)
    line = night_metrics.collect("2026-01-03", status).line()
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert line.startswith("alert: night 2026-01-03 failed")

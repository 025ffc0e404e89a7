# SPDX-License-Identifier: MIT
"""Failures end a command with its exit code, and reach the launcher."""

import json

import pytest

from trainer.runtime.exit_codes import exit_code
from trainer.runtime.runtime import RunError


def fail(error: Exception):
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (ValueError("data.path: there is nothing"), 2, 1),
        (RunError("the GPU is gone"), 1, 1),
        (RuntimeError("shapes do not match"), 1, None),
    ],
)
def test_a_failure_is_said_once_and_recorded_for_the_launcher(
    error, code, lines, capfd, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert exit_code(fail(error)) == code
    said = capfd.readouterr().err
    if lines:
        assert said == f"error: {error}\n"
    else:
        assert said.startswith("Traceback") and "in work" in said
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == f"{type(error).__name__}: {error}"
    # torchrun prints this, and the message comes last.
    trace = message["extraInfo"]["py_callstack"]
    assert trace.splitlines()[-1].endswith(str(error))
    assert ("in work" in trace) == (lines is None)


def test_a_launcher_that_gives_no_file_or_a_bad_one_hides_nothing(capfd, monkeypatch, tmp_path):
    for variable in (None, str(tmp_path / "no" / "folder")):
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        if variable:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", variable)
        assert exit_code(fail(ValueError("no such column"))) == 2
        assert capfd.readouterr().err == "error: no such column\n"
    assert exit_code(lambda: None) == 0


def test_an_interruption_is_one_line_and_its_own_exit_code(capsys):
    def work():
        raise KeyboardInterrupt

    assert exit_code(work) == 130
    assert capsys.readouterr().err == "interrupted: run it again\n"
    assert exit_code(work, resumes=True) == 130
    said = capsys.readouterr().err
    assert said == "interrupted: the same command goes on from its newest checkpoint\n"


@pytest.mark.parametrize("kind", [ValueError, RunError, KeyError])
def test_a_failure_shows_no_password_of_a_url(capsys, monkeypatch, tmp_path, kind):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    url = "http://me:{}@gateway:9091".format("s3cret")

    def fail() -> None:
        raise kind(f"{url}: not there")

    assert exit_code(fail) in (1, 2)
    told = capsys.readouterr().err
    assert "http://gateway:9091: not there" in told and "s3cret" not in told
    assert "s3cret" not in (tmp_path / "error.json").read_text()

# SPDX-License-Identifier: MIT
"""The command that runs pipelines: plan, progress, summary, and exit codes."""

import argparse
import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from pipelines import run
from pipelines.orchestration.lock import Lock
from pipelines.orchestration.stage import NotReadyError, Pipeline, Stage, StageError

COMMANDS = sorted(
    path.stem
    for path in Path(run.__file__).parent.glob("*.py")
    if '__name__ == "__main__"' in path.read_text("utf-8") and path.stem != "cli"
)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that runs a pipeline of two stages, the second of which may fail."""

    def run_pipeline(*words, error=None, refuses=False, ready=True):
        def first(work):
            work.say("counting")
            (work.folder / "count.txt").write_text("1")
            return {"summary": "counted to 1"}

        def second(work):
            if error is not None:
                raise error
            return {}

        def build(options: argparse.Namespace) -> Pipeline:
            if not ready:
                raise NotReadyError("tomorrow has not come")
            stages = [Stage(make=first), Stage(make=second, inputs=("first",))]
            code = run.REFUSED if refuses else run.DONE
            return Pipeline(stages=stages, folder=tmp_path, conclude=lambda _: code)

        module = types.SimpleNamespace(add_options=lambda parser: None, build=build)
        monkeypatch.setattr(run, "PIPELINES", {"toy": module})
        return run.main(["toy", *words])

    return run_pipeline


def test_a_run_prints_its_plan_its_progress_and_its_summary(command, capsys):
    assert command() == run.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["first   make  is not there", "second  make  after first"]
    assert lines[5:7] == ["[1/2] first", "  counting"]
    assert lines[-2].split()[:2] == ["first", "made"] and lines[-2].endswith("counted to 1")
    assert command() == run.DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith(("first", "second"))] == [
        *("done", "done", "skipped", "skipped")
    ]
    assert command("--from", "second") == run.DONE
    assert "second  make  asked for by --from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StageError("the job ended with code 1"), run.FAILED, "error: second: the job ended"),
        (OSError("disk full"), run.FAILED, "error: second: disk full"),
        (ValueError("no such column"), run.WRONG, "error: second: no such column"),
        (NotReadyError("not yet"), run.NOT_READY, "error: second: not yet"),
        (KeyError("a fault of ours"), run.FAILED, "Traceback"),
    ],
)
def test_a_stage_that_fails_ends_the_run_with_its_code_and_the_next_attempt_goes_on(
    error, code, said, command, capsys
):
    assert command(error=error) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert "second  failed" in captured.out
    assert command() == run.DONE
    assert "second  resume  was begun and not finished" in capsys.readouterr().out


def test_codes_tell_refused_not_ready_running_and_wrong_apart(command, tmp_path, capsys):
    assert command(refuses=True) == run.REFUSED
    assert command(ready=False) == run.NOT_READY
    with Lock(tmp_path):
        assert command() == run.LOCKED
        assert command("--dry-run") == run.DONE
    assert command("--from", "third") == run.WRONG
    assert "no stage 'third'" in capsys.readouterr().err
    codes = (run.DONE, run.FAILED, run.WRONG, run.REFUSED, run.NOT_READY, run.LOCKED)
    assert codes == (0, 1, 2, 3, 4, 5)


def said_by(module, *words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"pipelines.{module}").main()
    assert stop.value.code == 0
    return capsys.readouterr().out


def options_in(text):
    return {*re.findall(r"--[a-z][a-z-]*(?![\w-])", text)}


@pytest.mark.parametrize(
    "words", [[name] for name in COMMANDS] + [["run", name] for name in run.PIPELINES], ids=" ".join
)
def test_the_help_of_every_command_fits_a_screen_and_names_every_option(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = said_by(*words, "--help", capsys=capsys, monkeypatch=monkeypatch)
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: python -m pipelines.{' '.join(words)} ".rstrip())
    assert 4 <= len(lines) <= 45 and max(map(len, lines)) <= 120
    if "--help-all" in text:
        whole = said_by(*words, "--help-all", capsys=capsys, monkeypatch=monkeypatch)
        assert options_in(whole) <= options_in(text)
        assert len(whole) > len(text)


@pytest.mark.parametrize("name", run.PIPELINES)
def test_every_pipeline_explains_its_options(name, capsys, monkeypatch):
    text = said_by("run", name, "--help", capsys=capsys, monkeypatch=monkeypatch)
    assert {"--dry-run", "--recipe", "--data.schema"} <= {*re.findall(r"--[a-z][a-z.-]+", text)}

# SPDX-License-Identifier: MIT
"""The installed command runs every program of the modules, under its own name."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from pipelines import cli
from trainer.runtime.program import program

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_that_is_a_program_is_a_command():
    programs = {
        f"{folder}.{path.stem}"
        for folder in ("trainer", "pipelines")
        for path in (ROOT / folder).glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert programs - {"pipelines.cli"} == {one.module for one in cli.COMMANDS.values()}


def test_a_command_that_is_several_pipelines_names_each():
    from pipelines.run import PIPELINES

    words = {one.words[0] for one in cli.COMMANDS.values() if one.module == "pipelines.run"}
    assert words == set(PIPELINES)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_has_the_name_that_was_typed(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/fullrank", name, "--help"])
    try:
        code = cli.main()
    except SystemExit as stop:
        code = stop.code
    assert not code
    assert re.match(rf"usage: fullrank {name}\b", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["epochs", "nightly"])
def test_an_error_of_a_pipeline_has_the_name_that_was_typed(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/fullrank", name])
    with pytest.raises(SystemExit):
        cli.main()
    assert f"`fullrank {name} --help` lists the options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("started", "module", "words", "name"),
    [
        ("/x/bin/fullrank", "trainer.train", (), "fullrank train"),
        ("C:/x/fullrank.exe", "trainer.train", (), "fullrank train"),
        ("fullrank", "pipelines.run", ("nightly",), "fullrank nightly"),
        ("/x/trainer/train.py", "trainer.train", (), "python -m trainer.train"),
        ("", "pipelines.run", ("nightly",), "python -m pipelines.run nightly"),
    ],
)
def test_a_program_is_called_what_the_user_typed(started, module, words, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    assert program(module, *words) == name


def test_words_and_exit_code_pass_through(monkeypatch):
    seen = []

    def run(words):
        seen.append(words)
        return 3

    monkeypatch.setattr(importlib.import_module("pipelines.run"), "main", run)
    assert cli.main(["nightly", "--date", "new", "--", "--epochs", "2"]) == 3
    assert seen == [["nightly", "--date", "new", "--", "--epochs", "2"]]


def test_the_help_lists_every_command_and_fits_a_screen(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in cli.COMMANDS)
    assert len(cli.usage().splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100


def test_a_misspelt_command_is_answered_with_the_closest(capsys):
    assert cli.main(["nigthly"]) == 2
    error = capsys.readouterr().err
    assert "got 'nigthly', did you mean 'nightly'?" in error and len(error.splitlines()) == 1

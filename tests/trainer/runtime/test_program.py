# SPDX-License-Identifier: MIT
"""Options that are refused: a line that begins with `error:`, the closest option, exit code 2."""

from __future__ import annotations

import importlib

import pytest

from pipelines.cli import COMMANDS, main
from trainer.runtime.program import Parser


def _parser() -> Parser:
    parser = Parser(prog="python -m x")
    parser.add_argument("--rows", type=int)
    inner = parser.add_subparsers().add_parser("nightly")
    inner.add_argument("--gate-max-auc-loss", choices=("small", "large"))
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nightly", "--rwos", "3"], "unrecognized arguments: --rwos 3, did you mean '--rows'?"),
        (["--rwos=3"], "did you mean '--rows'?"),
        (["--rows", "many"], "argument --rows: invalid int value: 'many'"),
        (["nigthly"], "did you mean 'nightly'?"),
        (["nightly", "--gate-max-auc-los-s", "small"], "did you mean '--gate-max-auc-loss'?"),
        (["nightly", "--gate-max-auc-loss", "smal"], "did you mean 'small'?"),
        (["--rows", "a\nb\x1b[31m"], r"invalid int value: 'a\nb\x1b[31m'"),
        (["nightly", "\x1b[31m\nALERT"], r"\x1b[31m\nALERT"),
    ],
)
def test_a_refusal_names_what_was_meant_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        _parser().parse_args(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said
    assert "--help` lists the options" in said


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_every_command_refuses_an_option_that_it_does_not_have(name, capsys):
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    try:
        code = module.main([*command.words, "--no-such-option-at-all"])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_the_command_tells_its_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fullrank")

# SPDX-License-Identifier: MIT
"""What the commands say when something is wrong: one line, on stderr, and the exit code."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from trainer import train

TRAINER = Path(train.__file__).parent
# The probes are a child process of the doctor.
COMMANDS = sorted(
    path.stem
    for path in TRAINER.glob("*.py")
    if '__name__ == "__main__"' in path.read_text("utf-8") and path.stem != "probes"
)
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Run `trainer.train` as a lone process; return its exit code and the line on stderr."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)

    def call(*words):
        code = train.main(["dlrm.demo", "--output", str(tmp_path / "run"), *words])
        (line,) = capfd.readouterr().err.splitlines()
        return code, line

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_fits_a_screen(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code = importlib.import_module(f"trainer.{name}").main(["--help"])
    except SystemExit as stop:
        code = stop.code
    text = capsys.readouterr().out
    assert not code
    assert re.match(rf"usage: python -m trainer\.{name}\b", text)
    assert 4 <= len(text.splitlines()) <= 45


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_failure_that_its_message_explains_is_one_line_without_a_trace(command):
    code, line = command("--runtime.device", "cuda")
    assert code == 1
    assert line.startswith("error: runtime.device: expected a CUDA GPU that torch can use, found")
    assert line.endswith("or pass --runtime.device cpu")

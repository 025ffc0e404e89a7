# SPDX-License-Identifier: MIT
"""A command whose reader has gone ends without a trace; any other broken pipe stays an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer.runtime.program import quiet_pipe

LONG = "import sys; from trainer.runtime.program import quiet_pipe\n"
CASES = {
    "printed": "def main():\n  for _ in range(100_000): print('a line')\n  return 0\n",
    "of argparse": (
        "import argparse\ndef main():\n"
        "  argparse.ArgumentParser(description='words').parse_args(['--help'])\n"
    ),
}


def unread(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with an output that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("case", CASES)
def test_a_command_that_nobody_reads_ends_as_others_do_and_says_nothing(case):
    done = unread(f"{LONG}{CASES[case]}sys.exit(quiet_pipe(main))")
    # argparse itself passes over an error of a write that is not buffered.
    assert done.returncode in ((141,) if case == "printed" else (0, 141))
    assert done.stderr == ""


def test_a_broken_pipe_to_something_else_is_an_error():
    code = f"{LONG}def main(): raise BrokenPipeError('a socket')\nsys.exit(quiet_pipe(main))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "BrokenPipeError: a socket" in done.stderr


@pytest.mark.parametrize("code", [0, 2])
def test_an_exit_code_is_passed_on(code):
    assert quiet_pipe(lambda: code) == code

# SPDX-License-Identifier: MIT
"""What a command is called, how it refuses its words, and how it ends when nobody reads it.

The same programs run as modules (`python -m trainer.train`) and as words of the installed command
(`fullrank train`). A message names the form that the user typed.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from embeddings.schema.plain import suggest
from trainer.runtime.printable import printable

COMMAND = "fullrank"
_UNKNOWN = "unrecognized arguments: "
_NO_CHOICE = re.compile(r"invalid choice: (.+?) \(choose from (.*)\)$", re.DOTALL)
# What a shell reports of a program that SIGPIPE (13) has ended.
_PIPE_CLOSED = 128 + 13


def program(module: str, *words: str) -> str:
    """Return how the user starts a program.

    Args:
        module: the module that `python -m` runs, such as `pipelines.run`.
        words: what follows the module, such as `nightly`.

    Returns:
        `fullrank nightly` if the installed command was started, else `python -m` with the module.
    """
    if Path(sys.argv[0]).stem == COMMAND:
        return " ".join((COMMAND, *(words or (module.rpartition(".")[2],))))
    return " ".join(("python -m", module, *words))


class Parser(argparse.ArgumentParser):
    """A parser of options whose refusals begin with `error:` and name the closest option."""

    def error(self, message: str) -> NoReturn:
        """Print why the words are refused, and end the process with code 2."""
        meant = ""
        wrong = _NO_CHOICE.search(message)
        if message.startswith(_UNKNOWN):
            word = message.removeprefix(_UNKNOWN).split(" ")[0].partition("=")[0]
            meant = suggest(word, self._options()) if word.startswith("-") else ""
        elif wrong:
            choices = (choice.strip().strip("'") for choice in wrong[2].split(","))
            meant = suggest(wrong[1].strip("'"), choices)
        said = f"{message}{meant}; `{self.prog} --help` lists the options"
        self.exit(2, f"error: {printable(said)}\n")

    def _options(self) -> Iterator[str]:
        """Yield the names of the options, those of subcommands included."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._options()


def quiet_pipe(main: Callable[[], int]) -> int:
    """Return the exit code of `main`, and end without a trace where its reader has gone.

    So `... --help | head` prints its lines and nothing else. The exit code is then 141, as of any
    program that the system ends for this reason.

    Args:
        main: prints to standard output; may raise SystemExit, as argparse does.
    """
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _is_unread() -> bool:
    """Return whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))

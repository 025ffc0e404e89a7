# SPDX-License-Identifier: MIT
"""What a command is called in its help and messages, and how it refuses its words.

The same programs run as modules (`python -m trainer.train`) and as words of the installed command
(`fullrank train`). A message names the form that the user typed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from embeddings.schema.plain import suggest
from trainer.runtime.printable import printable

COMMAND = "fullrank"
_UNKNOWN = "unrecognized arguments: "
_NO_CHOICE = re.compile(r"invalid choice: (.+?) \(choose from (.*)\)$", re.DOTALL)


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

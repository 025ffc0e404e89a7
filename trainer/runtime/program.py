# SPDX-License-Identifier: MIT
"""What a command is called in its help and messages.

The same programs run as modules (`python -m trainer.train`) and as words of the installed command
(`fullrank train`). A message names the form that the user typed.
"""

from __future__ import annotations

import sys
from pathlib import Path

COMMAND = "fullrank"


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

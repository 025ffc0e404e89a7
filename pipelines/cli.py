# SPDX-License-Identifier: MIT
"""The installed command: fullrank COMMAND ..., the same programs as the modules.

`fullrank train` is `python -m trainer.train`, and so on: same options, same exit codes. Only the
module of the command that is asked for is imported, so `--help` answers at once.

Exit codes: those of the command; 2 if there is no such command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from embeddings.schema.plain import suggest
from trainer.runtime.program import quiet_pipe


class Command(NamedTuple):
    """A program.

    Attributes:
        module: which `python -m` would run.
        summary: one line of help.
        words: what `python -m` would be given first.
    """

    module: str
    summary: str
    words: tuple[str, ...] = ()


COMMANDS = {
    "doctor": Command("trainer.doctor", "check whether this machine can train"),
    "demo": Command("pipelines.demo", "generate logs, train recipes, compare the runs"),
    "synthesize": Command("pipelines.synthesize", "generate click logs"),
    "schema": Command("pipelines.schema", "propose a schema for a log"),
    "fuxictr": Command("pipelines.fuxictr", "import FuxiCTR's dataset configuration as a schema"),
    "ingest": Command("pipelines.ingest", "turn logs into typed Parquet"),
    "deliveries": Command("pipelines.deliveries", "ingest raw days as they become ready"),
    "plan": Command("trainer.plan", "plan tables onto ranks, without the machines"),
    "train": Command("trainer.train", "train a recipe"),
    "evaluate": Command("trainer.evaluate", "evaluate a checkpoint"),
    "compare": Command("trainer.compare", "compare models on the same rows"),
    "score": Command("trainer.score", "predict a log: Parquet in, Parquet out"),
    "export": Command("trainer.export", "write a model as one folder to serve"),
    "serve": Command("trainer.serve", "answer requests for scores over HTTP"),
    "report": Command("pipelines.report", "compare runs in one HTML page"),
    "nightly": Command("pipelines.run", "train, compare and promote, night by night", ("nightly",)),
    "epochs": Command("pipelines.run", "find the number of epochs", ("epochs",)),
    "replay": Command("pipelines.replay", "run nights one after the other, and print a table"),
    "study": Command("pipelines.study", "compare what several epochs gain"),
    "sweep": Command("pipelines.sweep", "tune a recipe's settings in trials"),
    "abtest": Command("pipelines.abtest", "plan A/B tests, assign users, measure the effect"),
    "publish": Command("pipelines.publish", "list models, serve one, go back to an older one"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words == ["--version"]:
        try:
            print(f"fullrank {version('fullrank')}")
        except PackageNotFoundError:
            print("fullrank, from a checkout that is not installed")
        return 0
    if words == ["--completion"]:
        from trainer.config.completion import completion_script

        print(completion_script(COMMANDS))
        return 0
    if words[0] not in COMMANDS:
        print(
            f"error: expected a command, one of {', '.join(COMMANDS)}; got {words[0]!r}"
            f"{suggest(words[0], COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    command = COMMANDS[words[0]]
    try:
        module = importlib.import_module(command.module)
    except KeyboardInterrupt:
        print("interrupted: nothing was begun", file=sys.stderr)
        return 130
    return module.main([*command.words, *words[1:]])


def command() -> int:
    """Run the installed program and return its exit code; 141 where nobody reads its output."""
    return quiet_pipe(main)


def usage() -> str:
    """Return how the command is called."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {one.summary}" for name, one in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fullrank COMMAND ...",
            "",
            *lines,
            "",
            "`fullrank COMMAND --help` lists a command's options.",
            "`source <(fullrank --completion)` completes commands, recipes and settings in bash.",
        ]
    )


if __name__ == "__main__":
    sys.exit(command())

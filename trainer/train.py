# SPDX-License-Identifier: MIT
"""Train a recipe: python -m trainer.train RECIPE --output DIR [--section.field value ...].

Started alone, a run has one process; torchrun and torchx start many. The run writes config.json,
curves.jsonl, ranks.json, metrics.json and checkpoints/step-N/ into DIR. A folder that holds an
unfinished run of the same configuration is resumed from its newest complete checkpoint. Any other
folder that holds a run is refused.

Exit codes: 0 done; 1 the run failed; 2 the configuration or the data is wrong (one message, no
trace).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

# Nothing here imports torch before a recipe is needed, so that --help and --list answer at once.
from trainer.config.names import check_command, describe_recipes
from trainer.runtime.printable import printable, printable_lines
from trainer.runtime.program import program, quiet_pipe

USAGE = """\
usage: {program} RECIPE --output DIR [--section.field VALUE ...]
       for example: --data.path PATH --data.train-days A:B --data.test-days C:D

  RECIPE          specformer.globo, or package.module:function (see --list)
  --output DIR    the run's folder
  --list          recipes, one line each
  --completion    a script that completes commands, recipes and settings in a shell
  --help          this text; after a RECIPE, what is set most often, and the sections
  --help SECTION  after a RECIPE, the settings of a section, what they mean, and their values
  --help-all      after a RECIPE, every setting with its description"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "--list" in arguments:
            print(describe_recipes())
            return 0
        if arguments == ["--completion"]:
            from trainer.config.completion import completion_script

            print(completion_script())
            return 0
        if not arguments or arguments[0] in ("-h", "--help"):
            print(usage())
            return 0
        if {"-h", "--help", "--help-all"} & set(arguments):
            return show_settings(arguments)
        recipe, output, overrides = parse(arguments)
        check_command(recipe, overrides)
        from trainer.config.command_line import apply_overrides
        from trainer.recipes.load import load_recipe

        base = load_recipe(recipe)
        config = apply_overrides(base, overrides)
    except ValueError as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return 2
    try:
        from trainer.config.fit_to_log import check_schema, choose_split, choose_validation, unsaid
        from trainer.run_dir import note_changes
        from trainer.runtime.exit_codes import exit_code
        from trainer.runtime.runtime import start
        from trainer.trainer import Trainer
    except KeyboardInterrupt:
        print("interrupted: nothing was begun", file=sys.stderr)
        return 130

    def work() -> None:
        runtime = start(config.runtime)
        chosen, note = choose_split(config, unsaid(base.data, overrides), output)
        chosen, validation = choose_validation(chosen, output)
        check_schema(chosen)
        for line in filter(None, (note, validation)):
            if runtime.is_first:
                print(f"note: {printable(line)}", file=sys.stderr, flush=True)
        trainer = Trainer(chosen, output, runtime)
        if runtime.is_first:
            note_changes(output, base, chosen)
        trainer.fit()
        runtime.stop()

    return exit_code(work, resumes=True)


def usage() -> str:
    """Return how the command is called."""
    return USAGE.format(program=program("trainer.train"))


def parse(arguments: Sequence[str]) -> tuple[str, Path, list[str]]:
    """Split a command line into recipe, output folder and overrides.

    Raises:
        ValueError: no recipe, or no --output.
    """
    recipe, rest = arguments[0], list(arguments[1:])
    if recipe.startswith("-"):
        raise ValueError(f"expected a recipe first, got {recipe!r}\n{usage()}")
    output = None
    overrides: list[str] = []
    remaining = iter(rest)
    for argument in remaining:
        if argument == "--output":
            output = next(remaining, None)
        elif argument.startswith("--output="):
            output = argument.partition("=")[2]
        else:
            overrides.append(argument)
    if not output:
        raise ValueError("--output DIR is needed: the folder for config, metrics and checkpoints")
    return recipe, Path(output), overrides


def show_settings(arguments: Sequence[str]) -> int:
    """Print what `--help`, `--help SECTION ...` or `--help-all` asks of the recipe before it.

    Raises:
        ValueError: there is no such recipe or section.
    """
    check_command(arguments[0], ())
    from trainer.config.command_line import apply_overrides
    from trainer.config.overrides import describe_section, describe_sections
    from trainer.recipes.load import load_recipe

    config = load_recipe(arguments[0])
    if "--help-all" in arguments:
        apply_overrides(config, ["--help"])  # leaves with exit code 0
    asked = next(place for place, word in enumerate(arguments) if word in ("-h", "--help"))
    names = list(takewhile(lambda word: not word.startswith("-"), arguments[asked + 1 :]))
    if names:
        print("\n\n".join(describe_section(config, name) for name in names))
        return 0
    print(
        f"usage: {program('trainer.train')} {arguments[0]} --output DIR "
        "[--section.field VALUE ...]",
        "Switches, marked (on) and (off): --x.y turns on, --x.no-y turns off. `--help SECTION`",
        "describes the settings of a section, `--help-all` every setting.",
        "",
        describe_sections(config),
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

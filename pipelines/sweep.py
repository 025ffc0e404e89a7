# SPDX-License-Identifier: MIT
"""Tune a recipe: python -m pipelines.sweep RECIPE --data LOGS --trials N --output DIR.

Each trial is a run of the recipe with other values of the settings of --tune, in DIR/trials/. It is
judged on the run's test rows, so name days that are not those of the final test, after two hyphens:
`-- --data.train-days A:B --data.test-days C:D`. These are settings of all trials. Trials
below the median of the others at the same evaluation are ended early; with --data.progressive there
is an evaluation a day. The same command goes on with a sweep that was killed, and may ask for more
trials. DIR/result.json has all trials, DIR/sweep.html shows them.

Exit codes: 0; 2 for wrong options or settings, or trials that fail one after the other.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.orchestration import launch
from trainer.metrics.spec import choosable
from trainer.runtime.printable import printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe

PAGE = "sweep.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:end])
    try:
        return _run(options, words[end + 1 :])
    except ModuleNotFoundError as error:
        if error.name not in ("optuna", "colorlog"):
            raise
        text = f"{error.name} is not installed; pip install -r requirements/sweep.txt"
    except (ValueError, OSError) as error:
        text = str(error)
    print(printable_lines(f"error: {text}"), file=sys.stderr)
    return 2


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    # Imported after the words are read: --help and a misspelt option need none of it.
    from pipelines.orchestration.lock import Lock, LockedError
    from pipelines.reporting.sweep_page import sweep_page
    from pipelines.tuning.space import DEFAULT, parse_space, words_of
    from pipelines.tuning.sweep import Sweep, SweepConfig
    from trainer.config.command_line import apply_overrides
    from trainer.config.overrides import setting_kinds
    from trainer.recipes.load import load_recipe
    from trainer.runtime.atomic_files import write_text

    words = ["--data.path", options.data, *overrides]
    recipe = load_recipe(options.recipe)
    config = apply_overrides(recipe, words)
    sweep = SweepConfig(
        recipe=options.recipe,
        words=tuple(words),
        space=parse_space(options.tune or DEFAULT, setting_kinds(recipe)),
        metric=options.metric,
        trials=options.trials,
        jobs=options.jobs,
        seed=options.seed,
        prune=not options.no_prune,
    )
    for one in sweep.space:  # so that a wrong value is named before the first trial
        for value in one.choices or (str(one.low), str(one.high)):
            word = str(int(float(value))) if one.whole else value
            apply_overrides(recipe, [*words, f"--{one.setting}", word])
    tested = config.data.test_days or f"rows {config.data.test_rows or 'of the recipe'}"
    print(f"trials are judged on {tested}; test the best one on others", flush=True)
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Lock(folder):
            starting = launch.from_options(options, config.outside_tower)
            result = Sweep(sweep, folder, starting, lambda line: print(line, flush=True)).run()
    except LockedError as error:
        raise ValueError(str(error)) from error
    best = result["best"]
    found = words_of(best["settings"]) if best else []
    write_text(folder / PAGE, sweep_page(result, found))
    if best:
        name = sweep.metric
        print(f"\nbest: trial {best['trial']}, {name} {best[name]:.4f}: {shlex.join(found)}")
    for setting, share in sorted(result["importance"].items(), key=lambda pair: -pair[1]):
        print(f"  {setting}: {share:.0%} of what tells good trials from others")
    print(f"page: {folder / PAGE}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.sweep"),
        usage="%(prog)s RECIPE --data LOGS --output DIR [options] [-- --section.field VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="what to tune")
    add("--data", required=True, metavar="LOGS", help="the log")
    add("--output", type=Path, required=True, metavar="DIR", help="the folder of the sweep")
    add("--trials", type=int, default=20, metavar="N", help="in all (default: 20)")
    add("--jobs", type=int, default=1, metavar="N", help="trials at the same time (default: 1)")
    tune = "NAME=LOW:HIGH[:log] or NAME=A,B,...; may be repeated (default: both learning rates "
    tune += "and field dropout)"
    add("--tune", action="append", default=[], metavar="SETTING", help=tune)
    add("--metric", default="auc", choices=choosable(), help="(default: auc)")
    add("--seed", type=int, default=0, help="of the sampler (default: 0)")
    add("--no-prune", action="store_true", help="end no trial early")
    launch.add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

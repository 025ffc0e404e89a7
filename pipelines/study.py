# SPDX-License-Identifier: MIT
"""Epochs under inheritance policies over seeds: python -m pipelines.study --data LOGS --output DIR.

For each recipe and seed it runs the epochs pipeline under all policies, and the same recipe for one
epoch alone, whose learning rate falls to zero within it (with --restart-schedule that is epoch 1);
then it prints the mean of the metric on the validation rows over the seeds, by epoch. A study that
was cut short resumes where it stopped, and with more recipes, seeds or policies it trains only
those.

Exit codes: those of `python -m pipelines.run`, of the first pipeline that did not end with 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines import run
from pipelines.epochs.policy_options import parse_policies
from pipelines.orchestration.stage import read
from pipelines.orchestration.text_tables import table
from trainer.metrics.spec import choosable
from trainer.runtime.printable import printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        names = [one.name for one in parse_policies(options.policies, options.later)]
    except ValueError as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return run.WRONG
    for seed in options.seeds:
        for recipe in options.recipes:
            words = ["epochs", "--recipe", recipe, "--data", str(options.data)]
            words += ["--metric", options.metric, "--patience", "0"]
            settings = ["--", *options.overrides, "--runtime.seed", str(seed)]
            later = [word for pair in options.later for word in ("--later", *pair)]
            several = ["--epochs", str(options.epochs), "--policies", *options.policies, *later]
            several += ["--restart-schedule"] if options.restart_schedule else []
            alone = [] if options.restart_schedule else [("one", ["--epochs", "1"])]
            for kind, more in (*alone, ("several", several)):
                folder = options.output / f"{recipe}-{seed}" / kind
                code = run.main([*words, *more, "--output", str(folder), *settings])
                if code != run.DONE:
                    return code
    print(f"\n{describe(options, names)}")
    return run.DONE


def describe(options: argparse.Namespace, policies: Sequence[str]) -> str:
    """Return a line a recipe and policy: the metric of each epoch, and its gain over one alone."""
    epochs = [f"epoch {number}" for number in range(1, options.epochs + 1)]
    rows = []
    for recipe in options.recipes:
        folders = [options.output / f"{recipe}-{seed}" for seed in options.seeds]
        one = "several" if options.restart_schedule else "one"
        alone = [_read(folder / one, "epoch-1", options.metric) for folder in folders]
        rows.append((recipe, "one epoch alone", _mean(alone), *[""] * options.epochs))
        for policy in policies:
            stages = ["epoch-1"]
            stages += [f"{policy}-epoch-{number}" for number in range(2, options.epochs + 1)]
            found = [
                [_read(folder / "several", stage, options.metric) for folder in folders]
                for stage in stages
            ]
            gains = [last - one for last, one in zip(found[-1], alone, strict=True)]
            gain = f"{statistics.fmean(gains):+.4f}"
            rows.append((recipe, policy, *map(_mean, found), gain))
    count = len(options.seeds)
    note = f"{options.metric} on the validation rows, mean (± deviation) of {count} seeds; the gain"
    head = ("recipe", "policy", *epochs, "gain")
    return f"{table(head, rows)}\n{note} is of the last epoch over one epoch alone"


def _read(folder: Path, stage: str, metric: str) -> float:
    return float(read(folder / stage)["metrics"][metric])


def _mean(values: Sequence[float]) -> str:
    spread = f" ±{statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.study"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="LOGS", help="the log")
    default = Path("runs/study")
    add("--output", type=Path, default=default, metavar="DIR", help=f"(default: {default})")
    add("--recipes", nargs="+", default=["dlrm.globo"], help="(default: dlrm.globo)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    add("--epochs", type=int, default=3, metavar="K", help="(default: 3)")
    policies = ["naive", "progressive", "continue"]
    known = f"see pipelines.run epochs (default: {' '.join(policies)})"
    add("--policies", nargs="+", default=policies, metavar="POLICY", help=known)
    later = "settings of the epochs after the first under a policy, as one word"
    add("--later", nargs=2, action="append", default=[], metavar=("POLICY", "WORDS"), help=later)
    restart = "give every epoch a schedule of learning rates of its own"
    add("--restart-schedule", action="store_true", help=restart)
    add("--metric", default="auc", choices=choosable(), help="(default: auc)")
    add("overrides", nargs="*", metavar="-- --section.field VALUE", help="settings of the recipes")
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

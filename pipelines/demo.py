# SPDX-License-Identifier: MIT
"""The whole chain on generated logs: python -m pipelines.demo [--output DIR].

Generates a few days of click logs, trains four towers on them with two ranks each through torchx,
and ends with one table and one HTML page. It is what `make demo` runs, and nothing in it is
special: every step prints the command that it runs.

The table has each AUC with its standard error (DeLong's estimate), the AUC of the probabilities
that the labels were drawn from, which no model can be expected to pass, and the distance to it. No
recipe is called best whose lead the 95 % interval of the difference leaves open: see `comparison`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelines.report import report
from pipelines.reporting.comparison import comparison_table
from pipelines.synthesize import SynthesisConfig, synthesize
from trainer.runtime.atomic_files import read_json, write_json
from trainer.runtime.printable import printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe

COMPONENTS = "deploy/components.py"
RECIPES = ("specformer.demo", "rankelastor.demo", "tokenformer.demo", "dlrm.demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    rows = SynthesisConfig().rows_per_day
    parser = Parser(
        prog=program("pipelines.demo"),
        description="Generate click logs, train recipes on them and compare the runs.",
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="folder to write (default: runs/demo-<time>)")
    names = ", ".join(RECIPES)
    add("--recipes", nargs="+", default=list(RECIPES), help=f"what to train (default: {names})")
    add("--rows-per-day", type=int, default=rows, help=f"rows of each day (default: {rows})")
    options = parser.parse_args(arguments)
    output = options.output or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    if output.exists() and any(output.iterdir()):
        print(f"error: {output} is not empty; choose another --output", file=sys.stderr)
        return 2
    try:
        demonstrate(output, options.recipes, options.rows_per_day)
    except (ValueError, RuntimeError, OSError) as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


def demonstrate(output: Path, recipes: Sequence[str], rows_per_day: int) -> None:
    """Write logs, runs and the page under `output`; print the table and where the page is.

    Raises:
        ValueError: a number of rows that is not positive.
        RuntimeError: a recipe's job failed.
    """
    started = time.monotonic()
    logs = output / "logs"
    print(f"generating logs in {logs}", flush=True)
    synthesize(logs, SynthesisConfig(rows_per_day=rows_per_day))
    runs = []
    for recipe in recipes:
        run = output / recipe
        train(recipe, run, logs)
        add_ceiling(run, logs)
        runs.append(run)
    page = report(runs, output / "report.html")
    print(f"\n{comparison_table(runs)}\n")
    print(f"report: {page.resolve()}  ({time.monotonic() - started:.0f} s in all)")


def train(recipe: str, run: Path, logs: Path) -> None:
    """Train `recipe` on two ranks, showing the command and its output.

    torchx starts them in a checkout. torchrun does where the package is installed without one,
    since torchx lays the current folder over a job.

    Raises:
        RuntimeError: the job failed.
    """
    if Path(COMPONENTS).is_file():
        words = ["run", "-s", "local_cwd", f"{COMPONENTS}:train"]
        words += ["--recipe", recipe, "--output", str(run), "-j", "2x1", "--"]
        name, command = "torchx", [str(Path(sys.executable).with_name("torchx"))]
    else:
        words = ["--standalone", "--nproc-per-node", "2", "-m", "trainer.train", recipe]
        words += ["--output", str(run)]
        name, command = "torchrun", [sys.executable, "-m", "torch.distributed.run"]
    words += ["--data.path", str(logs)]
    print(f"\n$ {name} {shlex.join(words)}", flush=True)
    code = subprocess.run([*command, *words], check=False).returncode
    if code or not (run / "metrics.json").is_file():
        raise RuntimeError(
            f"{recipe}: the job ended with code {code} and "
            f"{'wrote' if (run / 'metrics.json').is_file() else 'did not write'} metrics.json; its "
            "output is above"
        )


def add_ceiling(run: Path, logs: Path) -> None:
    """Write the AUC that the true probability reaches on the run's test days into its metrics."""
    metrics = read_json(run / "metrics.json")
    config = read_json(run / "config.json")
    first, _, last = config["data"]["test_days"].partition(":")
    ceiling = read_json(logs / "ceiling.json")
    if first == (last or first):
        metrics["ceiling_auc"] = ceiling["days"][first]["click"]["auc"]
        write_json(run / "metrics.json", metrics)


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

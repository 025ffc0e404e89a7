# SPDX-License-Identifier: MIT
"""A/B tests: plan one, put users into arms, measure the effect: python -m pipelines.abtest.

  python -m pipelines.abtest size --rate 0.05 --effect 0.02
  python -m pipelines.abtest size --log LOGS --user user_id --metric ctr=click/rows --effect 0.02
  python -m pipelines.abtest assign USERS.parquet --user user_id --experiment NAME --output FILE
  python -m pipelines.abtest analyze LOGS --user user_id --arm arm --control A \\
      --metric ctr=click/rows --metric cvr=order/click --metric orders=order/users --output DIR

Logs are Parquet. A metric is a ratio of two sums: NAME=COLUMN/COLUMN, COLUMN/rows or COLUMN/users.
`analyze` writes DIR/abtest.json and DIR/abtest.html.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.experiments.arms import Experiment
from pipelines.experiments.user_totals import Columns, Metric, files_of, read_totals
from pipelines.orchestration.text_tables import table
from trainer.runtime.atomic_files import open_atomic, write_json, write_text
from trainer.runtime.exit_codes import exit_code
from trainer.runtime.printable import printable
from trainer.runtime.program import Parser, program, quiet_pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(arguments)
    work = {"size": _size, "assign": _assign, "analyze": _analyze}[options.command]
    return exit_code(lambda: work(options))


def _size(options: argparse.Namespace) -> None:
    """Print how many users an effect takes."""
    from pipelines.experiments.sample_size import users_needed

    shares = _shares(options.arms) or {"A": 1.0, "B": 1.0}
    names, total = list(shares), sum(shares.values())
    pair = (shares[names[1]] / total, shares[names[0]] / total)
    if bool(options.log) == (options.rate is not None):
        raise ValueError("size: expected --log LOGS or --rate RATE, one of them")
    if options.log:
        found = _from_log(options)
    else:
        found = [("rate", options.rate, options.rate * (1 - options.rate))]
    rows = []
    for name, ratio, variance in found:
        users = users_needed(ratio, variance, options.effect, pair, options.level, options.power)
        rows.append((name, f"{ratio:.4g}", f"{options.effect:+.2%}", f"{users:,}"))
    print(
        table(("metric", "value", "effect", f"users of {names[0]} and {names[1]} together"), rows)
    )
    print(
        f"for {options.power:.0%} power at level {options.level:.0%}, with one look at the end; "
        "looks by day (analyze --effect) take more"
    )


def _from_log(options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Return name, value and users' variance of each metric in a log."""
    from pipelines.experiments.lift import Arm
    from pipelines.experiments.user_totals import USERS

    metrics = _metrics(options)
    totals = read_totals(options.log, Columns(user=_needed(options, "user"), arm=""), metrics)
    users, _, sums = totals.until()
    if len(users) < 2:
        raise ValueError(f"log: expected two users or more, got {len(users)}")
    found = []
    for metric in metrics:
        above, below = metric.columns()
        x = sums[:, totals.sums.index(above)]
        y = sums[:, totals.sums.index(below)] if below != USERS else x * 0 + 1
        arm = Arm(x=x, y=y)
        if not arm.ratio > 0:
            raise ValueError(f"metric {metric.name}: is 0 in this log; no effect can be planned")
        found.append((metric.name, arm.ratio, float(arm.influence().var(ddof=1))))
    print(f"{len(users):,} users in {totals.rows:,} rows")
    return found


def _assign(options: argparse.Namespace) -> None:
    """Write the users' arms beside them."""
    shares = _shares(options.arms) or {"A": 1.0, "B": 1.0}
    experiment = Experiment(
        name=options.experiment, arms=shares, traffic=options.traffic, salt=options.salt
    )
    user = _needed(options, "user")
    counts: dict[str, int] = dict.fromkeys([*shares, "no arm"], 0)
    try:
        source = pq.ParquetFile(options.users)
        if user not in source.schema_arrow.names:
            raise ValueError(f"{printable(str(options.users))}: no column {user!r}")
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(options.output) as file:
            writer = None
            for batch in source.iter_batches(columns=[user]):
                arms = experiment.assign(batch[user]).cast(pa.string())
                part = pa.table({user: batch[user], "arm": arms})
                writer = writer or pq.ParquetWriter(file, part.schema)
                writer.write_table(part)
                for one in arms.value_counts().to_pylist():
                    counts[one["values"] or "no arm"] += one["counts"]
            writer = writer or pq.ParquetWriter(
                file, pa.schema([source.schema_arrow.field(user), ("arm", pa.string())])
            )
            writer.close()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{printable(str(options.users))}: {error}") from error
    print(table(("arm", "users"), [(arm, f"{count:,}") for arm, count in counts.items()]))
    print(f"written: {options.output}")


def _analyze(options: argparse.Namespace) -> None:
    """Measure, print and write the page."""
    from pipelines.experiments.analysis import AnalysisConfig, analyse
    from pipelines.reporting.experiment_page import experiment_page

    metrics = _metrics(options)
    config = AnalysisConfig(
        metrics=metrics,
        control=options.control,
        shares=_shares(options.arms),
        level=options.level,
        effect=options.effect,
        replicates=options.replicates,
        seed=options.seed,
    )
    user = _needed(options, "user")
    columns = Columns(user=user, arm=options.arm, by_day=options.effect > 0)
    totals = read_totals(options.logs, columns, metrics)
    before = None
    if options.before:
        _check_before(options)
        before = read_totals(options.before, Columns(user=user, arm=""), metrics)
    result = analyse(totals, config, before)
    rows = []
    for name, metric in result["metrics"].items():
        for arm, effect in metric["effects"].items():
            best = effect.get("cuped", effect)
            ends = [best["lift"], best["lift_low"], best["lift_high"]]
            lift = ["–" if end is None else f"{end:+.2%}" for end in ends]
            p_value = "–" if best["p_value"] is None else f"{best['p_value']:.3g}"
            rows.append((name, arm, f"{metric['values'][arm]:.5g}", *lift, p_value))
    print(table(("metric", "arm", "value", "lift", "from", "to", "p"), rows))
    for line in (*result["verdicts"], *(f"doubt: {one}" for one in result["doubts"])):
        print(printable(line))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        write_json(options.output / "abtest.json", result)
        page = options.output / "abtest.html"
        write_text(page, experiment_page(result, options.title))
        print(f"page: {page}")


def _check_before(options: argparse.Namespace) -> None:
    """Check that no file is read as before and as during the experiment.

    Raises:
        ValueError: one is; CUPED would then take part of the effect away.
    """
    during = {os.path.realpath(file) for file in files_of(options.logs)}
    for file in files_of(options.before):
        if os.path.realpath(file) in during:
            raise ValueError(
                f"--before: {printable(file)} is also in the experiment's log; give days before "
                "its start alone"
            )


def _metrics(options: argparse.Namespace) -> tuple[Metric, ...]:
    metrics = tuple(map(Metric.parse, options.metric or ()))
    if not metrics:
        raise ValueError("--metric: expected one or more, such as ctr=click/rows, got none")
    return metrics


def _needed(options: argparse.Namespace, name: str) -> str:
    value = getattr(options, name)
    if not value:
        raise ValueError(f"--{name}: expected the name of a column, got none")
    return value


def _shares(words: Sequence[str]) -> dict[str, float]:
    """Return the shares that `NAME=SHARE` words give."""
    shares: dict[str, float] = {}
    for word in words:
        name, _, share = word.rpartition("=")
        try:
            value = float(share)
        except ValueError:
            value = 0.0
        if not name or name in shares or not 0 < value < float("inf"):
            raise ValueError(f"--arms: expected NAME=SHARE, each name once, got {word!r}")
        shares[name] = value
    return shares


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program("pipelines.abtest"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    size = commands.add_parser("size", help="how many users an effect takes")
    assign = commands.add_parser("assign", help="put users into arms")
    analyze = commands.add_parser("analyze", help="measure the effect of the arms")
    level = "of the intervals (default: 0.95)"
    for one in (size, assign, analyze):
        one.add_argument("--user", default="", metavar="COLUMN", help="the column of the user")
        shares = "relative shares of the arms (default: equal)"
        one.add_argument("--arms", nargs="+", default=[], metavar="NAME=SHARE", help=shares)
    for one in (size, analyze):
        one.add_argument("--metric", action="append", metavar="NAME=X/Y", help="may be repeated")
        one.add_argument("--level", type=float, default=0.95, help=level)
    size.add_argument("--log", nargs="+", default=[], metavar="LOGS", help="from before")
    size.add_argument("--rate", type=float, help="share of users with the event, without a log")
    size.add_argument("--effect", type=float, required=True, help="lift to find, such as 0.02")
    size.add_argument("--power", type=float, default=0.8, help="(default: 0.8)")
    assign.add_argument("users", type=Path, metavar="USERS", help="a Parquet file")
    assign.add_argument("--experiment", required=True, metavar="NAME", help="its name")
    assign.add_argument("--salt", default="", help="another one assigns anew")
    assign.add_argument(
        "--traffic", type=float, default=1.0, help="share who take part (default: 1)"
    )
    assign.add_argument("--output", type=Path, required=True, metavar="FILE", help="a Parquet file")
    analyze.add_argument("logs", nargs="+", metavar="LOGS", help="files and folders")
    analyze.add_argument("--arm", default="arm", metavar="COLUMN", help="(default: arm)")
    analyze.add_argument("--control", required=True, metavar="ARM", help="the arm to compare with")
    before = "logs from before the experiment, for CUPED"
    analyze.add_argument("--before", nargs="+", default=[], metavar="LOGS", help=before)
    looks = (
        "look at the end of each day; the lift that the looks are most sensitive to (default: no)"
    )
    analyze.add_argument("--effect", type=float, default=0.0, metavar="LIFT", help=looks)
    replicates = "of the bootstrap over users (default: 1000; 0: none)"
    analyze.add_argument("--replicates", type=int, default=1_000, metavar="M", help=replicates)
    analyze.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    analyze.add_argument("--title", default="A/B test", help="of the page")
    analyze.add_argument("--output", type=Path, metavar="DIR", help="for abtest.json and .html")
    return parser


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

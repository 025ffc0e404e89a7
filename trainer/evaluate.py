# SPDX-License-Identifier: MIT
"""Evaluate a checkpoint: python -m trainer.evaluate CHECKPOINT --data PATH [--days A:B].

CHECKPOINT is a folder step-N, or a run's folder (its newest checkpoint). --days and --rows (shares
FROM:TO, of a log without days) choose; without them the run's test days count, or its share of test
rows of the same log, or all rows where it has neither; standard error says which. Metrics go to
standard output as JSON, a summary and everything else to standard error.
Runs alone or under torchrun, at any world size.

Exit codes: as trainer.train.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from models.plugins import TOWER_HELP
from trainer.runtime.atomic_files import json_ready
from trainer.runtime.program import Parser, program, quiet_pipe
from trainer.telemetry.summary_lines import evaluated_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(
        prog=program("trainer.evaluate"),
        description="Evaluate a checkpoint; JSON on stdout, a summary on stderr.",
    )
    parser.add_argument("checkpoint", help="a folder step-N, or a run's folder; a URL, too")
    parser.add_argument("--data", required=True, help="the log's folder or file")
    parser.add_argument(
        "--days",
        default="",
        help="FIRST:LAST or DAY; default: the run's test days; all rows of a log without days",
    )
    parser.add_argument("--rows", default="", help="FROM:TO, shares of the rows: 0.8:1")
    deep = "add intervals, a reliability diagram and GAUC by users' activity"
    parser.add_argument("--deep", action="store_true", help=deep)
    replicates = "of the intervals' bootstrap (default: 100)"
    parser.add_argument("--replicates", type=int, default=100, help=replicates)
    by = "add metrics by a column's values, or by `day`; may be repeated"
    parser.add_argument("--slice-by", metavar="COLUMN", action="append", default=[], help=by)
    parser.add_argument("--tower", metavar="MODULE:CLASS", default="", help=TOWER_HELP)
    options = parser.parse_args(arguments)

    # Imported after the words are read: --help and a misspelt option need no torch.
    from trainer.data.splits import parse_rows
    from trainer.evaluation.evaluate import Detail, evaluate_checkpoint
    from trainer.recipes.load import import_tower
    from trainer.runtime.exit_codes import exit_code
    from trainer.runtime.runtime import start
    from trainer.warm_start.policies import resolve

    def work() -> None:
        parse_rows(options.rows, "--rows")
        detail = Detail(
            deep=options.deep, replicates=options.replicates, slice_by=tuple(options.slice_by)
        )
        if options.tower:
            import_tower(options.tower)
        path = resolve(options.checkpoint)
        runtime = start()
        data, days = options.data, options.days
        metrics = evaluate_checkpoint(path, data, days, runtime, options.rows, detail)
        if runtime.is_first:
            print(json.dumps(json_ready(metrics)), flush=True)
            lines = evaluated_lines(options.checkpoint, metrics)
            print(*lines, sep="\n", file=sys.stderr, flush=True)
        runtime.stop()

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

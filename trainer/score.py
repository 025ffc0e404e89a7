# SPDX-License-Identifier: MIT
"""Score a log: python -m trainer.score RUN --data PATH --output DIR.

RUN is a run's folder (its newest checkpoint) or a checkpoint. The log needs no labels. DIR gets a
folder dt=DATE for each day, with one Parquet file a rank: the columns of --columns as they are, a
column TASK_probability (float32) for each task, and the model's version. A day is there whole or
not at all; the same command goes on with the days that are missing. Runs alone or under torchrun,
at any world size; tables are sharded over the ranks as in training.

--embeddings adds vectors for retrieval and analysis: `representation` (what the tower gives to the
head), `item` and `user` (the table vectors of the features of that side).

Exit codes: as trainer.train.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from models.plugins import TOWER_HELP
from trainer.runtime.program import Parser, program, quiet_pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(
        prog=program("trainer.score"),
        description="Score a log; a summary as JSON on stdout, progress on stderr.",
    )
    add = parser.add_argument
    add("checkpoint", help="a run's folder, or a folder step-N; a URL, too")
    add("--data", required=True, help="the log's folder or file; labels are not needed")
    add("--output", required=True, type=Path, help="the folder of the scores")
    add("--days", default="", help="FIRST:LAST or DAY (default: all)")
    passed = "columns of the log to pass through, by commas (default: those of single ids)"
    add("--columns", metavar="A,B", help=passed)
    vectors = "vectors to write too: representation, item, user"
    add("--embeddings", metavar="A,B", default="", help=vectors)
    add("--batch-size", type=int, default=0, help="rows per rank and step (default: the run's)")
    add("--quiet", action="store_true", help="no progress on stderr")
    add("--tower", metavar="MODULE:CLASS", default="", help=TOWER_HELP)
    options = parser.parse_args(arguments)

    # Imported after the words are read: --help and a misspelt option need no torch.
    from trainer.recipes.load import import_tower
    from trainer.runtime.exit_codes import exit_code
    from trainer.runtime.runtime import start
    from trainer.serving.scoring import ScoreRequest, score
    from trainer.telemetry.console import Console
    from trainer.warm_start.policies import resolve

    def work() -> None:
        if options.batch_size < 0:
            raise ValueError(f"--batch-size: expected at least 0, got {options.batch_size}")
        if options.tower:
            import_tower(options.tower)
        path = resolve(options.checkpoint)
        request = ScoreRequest(
            data=options.data,
            output=options.output,
            days=options.days,
            columns=None if options.columns is None else _names(options.columns),
            vectors=_names(options.embeddings),
            batch_size=options.batch_size,
        )
        runtime = start()
        console = Console("rich" if runtime.is_first and not options.quiet else "quiet")
        try:
            found = score(path, request, runtime, console)
        finally:
            console.close()
        if runtime.is_first:
            print(json.dumps({**found, "output": str(options.output)}), flush=True)
        runtime.stop()

    return exit_code(work, resumes=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in text.split(",") if name))


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

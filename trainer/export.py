# SPDX-License-Identifier: MIT
"""Export a model to serve: python -m trainer.export RUN --output DIR [--tables int8].

RUN is a run's folder (its newest checkpoint) or a checkpoint of any world size. DIR is one folder:
dense weights, learnt moments, tables in FP32, FP16, INT8 or INT4, maps of dynamic tables, the
schema, checksums, and the scores of fixed rows. `Scorer.load(DIR)` compares those scores before it
serves, and refuses a folder whose schema, seed, hashing or files are not what was written.

With --since DIR holds only the rows that differ from an exported model, for scorers of that model
(`Scorer.updated`).

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
        prog=program("trainer.export"),
        description="Export a model to serve; a summary as JSON on stdout.",
    )
    add = parser.add_argument
    add("checkpoint", help="a run's folder, or a folder step-N; a URL, too")
    add("--output", required=True, type=Path, help="the new folder")
    forms = ("fp32", "fp16", "int8", "int4")
    add("--tables", choices=forms, help="numbers of the tables (default: fp32)")
    since = "an exported model: write only the rows that differ from it, in its format"
    add("--since", metavar="DIR", type=Path, help=since)
    after = "a delta that --since has been given; may be repeated, in order"
    add("--after", metavar="DELTA", type=Path, action="append", default=[], help=after)
    add("--tower", metavar="MODULE:CLASS", default="", help=TOWER_HELP)
    options = parser.parse_args(arguments)

    # Imported after the words are read: --help and a misspelt option need no torch.
    from trainer.recipes.load import import_tower
    from trainer.runtime.exit_codes import exit_code
    from trainer.serving.exporting import export, export_delta
    from trainer.warm_start.policies import resolve

    def work() -> None:
        if options.tower:
            import_tower(options.tower)
        if options.since is None and options.after:
            raise ValueError("--after: names deltas of an exported model; name it with --since")
        if options.since is not None and options.tables is not None:
            raise ValueError("--tables: a delta has the format of --since; leave it out")
        path, output = resolve(options.checkpoint), options.output
        if options.since is None:
            found = export(path, output, options.tables or "fp32")
        else:
            found = export_delta(path, output, options.since, options.after)
        print(json.dumps(found), flush=True)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

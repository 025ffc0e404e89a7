# SPDX-License-Identifier: MIT
"""Published models: list them, serve another, copy them to MLflow: python -m pipelines.publish DIR.

  python -m pipelines.publish DIR                              lists the models
  python -m pipelines.publish DIR --rollback [--reason TEXT]   serves the model before this one
  python -m pipelines.publish DIR --serve DATE                 serves the model of that date
  python -m pipelines.publish DIR --mlflow URI                 copies all of it to an MLflow server

DIR is the --output of the nightly pipeline; `pipelines/nightly/model_store.py` lists what lies
in it. A rollback is copied to the MLflow server that --mlflow names
(`pipelines/nightly/mlflow_tracking.py`); a server that only DIR names is not contacted.

Exit codes: 0 done; 1 it failed; 2 there is no such folder or model, or a file of it is damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.nightly import mlflow_tracking
from pipelines.nightly.model_store import Store
from pipelines.orchestration.lock import Lock, LockedError
from pipelines.orchestration.stage import StageError
from trainer.runtime.printable import printable, printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = Parser(
        prog=program("pipelines.publish"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="--output of the nightly pipeline")
    parser.add_argument("--rollback", action="store_true", help="serve the model before this one")
    parser.add_argument("--serve", default="", metavar="DATE", help="serve the model of that date")
    parser.add_argument("--reason", default="by hand", help="noted beside the model")
    mlflow_tracking.add_options(parser)
    options = parser.parse_args(arguments)
    store = Store(options.folder)
    try:
        if not any((options.folder / kind).is_dir() for kind in ("models", "refused")):
            raise ValueError(
                f"{options.folder}: expected the nightly pipeline's --output, which holds models/ "
                "or refused/, got a folder without them or none"
            )
        given = mlflow_tracking.from_options(options)
        if options.rollback or options.serve:
            if options.rollback and options.serve:
                raise ValueError("--serve and --rollback: expected one of them, got both")
            with Lock(options.folder):
                act = store.serve if options.serve else lambda _, why: store.roll_back(why)
                print(f"serving: {act(options.serve, options.reason)}", flush=True)
        print(store.describe(), flush=True)
        moved = options.rollback or options.serve
        command = f"python -m pipelines.publish {options.folder} --mlflow"
        if given is not None:
            again = f"run {command} {given.public}"
            print(f"{given.public}: {mlflow_tracking.synchronize(store, given, again)}")
        elif moved and (known := mlflow_tracking.remembered(store)):
            print(printable(f"MLflow ({known}) has not been told: {command} URI tells it"))
    except (ValueError, LockedError, StageError, OSError) as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))

# SPDX-License-Identifier: MIT
"""Compare models on the same rows: python -m trainer.compare A [B] --data PATH --days FIRST:LAST.

A and B are checkpoints or runs' folders. Both predict every row of the same days; the answer, as
JSON on standard output (a summary goes to standard error), holds

  models       metrics of each, with `intervals` of 95 %
  differences  A - B in AUC, GAUC, logloss, normalised entropy and calibration, each with an
               interval; how far the predictions moved (`drift`, `mean_move`)
  labels       the same of every label that both models have, where there are several
  slices       the same by the values of each column of --slice-by, or by `day`

Above `labels` all numbers are of the first label. How intervals come about: `paired.py`. One
process; rows are kept in memory: each takes 8 bytes, 12 more a label, and 32 while one is compared,
of each model.

Shapes: N rows, K labels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.ranking import Predictions
from trainer.checkpoint.storage import Folder
from trainer.evaluation.evaluate import (
    choose_rows,
    evaluate,
    open_checkpoint,
    read_config,
    real_rows,
)
from trainer.evaluation.slices import SliceCodes
from trainer.metrics.paired import Rows, assess
from trainer.runtime.atomic_files import json_ready
from trainer.runtime.exit_codes import exit_code
from trainer.runtime.program import program
from trainer.runtime.runtime import Runtime, start
from trainer.telemetry.summary_lines import compared_lines
from trainer.warm_start.policies import resolve


class Answers(NamedTuple):
    """What a model says of N rows of a log: its metrics, and each row.

    columns: scores, labels and weights (N, K) each. users: (N,). slices: by column, the slices'
    names and the position (N,) among them.
    """

    metrics: dict[str, Any]
    labels: tuple[str, ...]
    columns: tuple[NDArray[np.float32], ...]
    users: NDArray[np.int64]
    slices: dict[str, tuple[Sequence[str], NDArray[np.int64]]]

    def of(self, label: int) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the rows that have a label, and which of all they are."""
        counted = self.columns[2][:, label] > 0
        scores, labels, weights = (one[counted, label].astype(np.float64) for one in self.columns)
        rows = Rows(scores=scores, labels=labels, weights=weights, users=self.users[counted])
        return rows, counted


def predict(
    path: Folder,
    data: str,
    chosen: tuple[str, str],
    runtime: Runtime,
    slice_by: Sequence[str] = (),
) -> Answers:
    """Return what the model at `path` says of rows of a log.

    chosen: the days and the share of rows, as `choose_rows` returns them. slice_by: columns.

    Raises:
        ValueError: no checkpoint there, data that does not fit its schema, or no row with a label.
    """
    opened = open_checkpoint(path, data, chosen, runtime)
    schema = opened.config.schema
    sliced = [SliceCodes(one, opened.config, opened.loader.files, runtime) for one in slice_by]
    parts: list[tuple[NDArray, ...]] = []

    def keep(found: Predictions) -> None:
        *columns, users = (one.cpu().numpy() for one in real_rows(found))
        codes = (one.of(len(users)) for one in sliced)
        parts.append((*(one.astype(np.float32) for one in columns), users, *codes))

    metrics = evaluate(opened.pipeline, opened.loader, opened.config, keep)
    opened.loader.close()
    scores, labels, weights, users, *codes = (
        np.concatenate(one) for one in zip(*parts, strict=True)
    )
    for one in sliced:
        one.close()
    if not weights[:, 0].any():
        raise ValueError(
            f"{data}: expected rows with a label {schema.labels[0].name!r}, got none; choose other "
            "days"
        )
    return Answers(
        metrics=metrics,
        labels=tuple(label.name for label in schema.labels),
        columns=(scores, labels, weights),
        users=users if schema.user else np.arange(len(users)),
        slices={one.column: (one.names, code) for one, code in zip(sliced, codes, strict=True)},
    )


def report(answers: Sequence[Answers], replicates: int) -> dict[str, Any]:
    """Return what is said of one model or two.

    Raises:
        ValueError: they are not of the same rows.
    """
    first, counted = answers[0].of(0)
    models = [first, *(other.of(0)[0] for other in answers[1:])]
    whole = assess(models, replicates)
    found: dict[str, Any] = {
        "models": [
            one.metrics | {"intervals": own["intervals"]}
            for one, own in zip(answers, whole["models"], strict=True)
        ]
    }
    if "differences" in whole:
        found["differences"] = whole["differences"]
    shared = [name for name in answers[0].labels if all(name in one.labels for one in answers)]
    if len(shared) > 1:
        found["labels"] = {}
        for name in shared:
            places = [one.labels.index(name) for one in answers]
            rows = [one.of(place)[0] for one, place in zip(answers, places, strict=True)]
            found["labels"][name] = assess(rows, replicates) if any(places) else whole
    if answers[0].slices:
        found["slices"] = {
            column: _by_slice(models, names, codes[counted], replicates)
            for column, (names, codes) in answers[0].slices.items()
        }
    return found


def _by_slice(
    models: Sequence[Rows], names: Sequence[str], codes: NDArray[np.int64], replicates: int
) -> list[dict[str, Any]]:
    """Return what is said of the rows of each slice that has some."""
    found = []
    for number, name in enumerate(names):
        chosen = np.flatnonzero(codes == number)
        if len(chosen):
            said = assess([one.take(chosen) for one in models], replicates)
            found.append({"slice": name, "rows": len(chosen), **said})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=program("trainer.compare"),
        description="Compare models; JSON on stdout, a summary on stderr.",
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="two checkpoints or runs; one: its intervals")
    add("--data", required=True, help="the log's folder or file")
    add("--days", default="", help="FIRST:LAST or DAY; default: the first model's test rows")
    add("--replicates", type=int, default=200, help="of the bootstrap (default: 200)")
    by = "the same by a column's values, or by `day`; may be repeated"
    add("--slice-by", metavar="COLUMN", action="append", default=[], help=by)
    options = parser.parse_args(arguments)

    def work() -> None:
        if len(options.models) > 2:
            raise ValueError(f"expected one or two models, got {len(options.models)}")
        if options.replicates < 1:
            raise ValueError(f"--replicates: expected at least 1, got {options.replicates}")
        paths = [resolve(path) for path in options.models]
        runtime = start()
        # The first model's test rows, for both: they are compared on the same ones.
        own = [read_config(path)[0] for path in paths]
        days, share, note = choose_rows(own[0], options.data, options.days)
        notes = [note, *(choose_rows(one, options.data, days)[2] for one in own[1:] if days)]
        for path, one in zip(options.models, notes, strict=False):
            if one:
                print(f"note: {path}: {one}", file=sys.stderr, flush=True)
        by = [options.slice_by, []]  # the rows are the same, and so are their slices
        answers = [
            predict(path, options.data, (days, share), runtime, columns)
            for path, columns in zip(paths, by, strict=False)
        ]
        found = report(answers, options.replicates)
        print(json.dumps(json_ready(found)), flush=True)
        lines = compared_lines(options.models, found)
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        runtime.stop()

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())

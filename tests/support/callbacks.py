# SPDX-License-Identifier: MIT
"""Callbacks of a user: one that notes what it hears, one that fails, one that is none."""

from __future__ import annotations

from typing import Any

from trainer.runtime.json_lines import append
from trainer.telemetry.callbacks import Callback


class Notes(Callback):
    """Appends a line for each event to DIR/notes.jsonl."""

    def on_start(self, run):
        self.path = run.output / "notes.jsonl"
        self.note("start", step=run.step, end=run.end_step, recipe=run.settings["recipe"])

    def on_step(self, report):
        self.note("step", step=report.step)

    def on_evaluation(self, step, metrics, ranks):
        self.note("evaluation", step=step, auc=metrics["auc"], ranks=len(ranks))

    def on_checkpoint(self, step, path):
        self.note("checkpoint", step=step, path=path)

    def on_end(self):
        self.note("end")

    def note(self, event: str, **values: Any) -> None:
        append(self.path, {"event": event, **values})


class Fails(Callback):
    """Raises at the second step, with a line break in the message."""

    def on_step(self, report):
        if report.step == 2:
            raise RuntimeError("tracker\nis away")


class NoCallback:
    """Does not derive from Callback."""

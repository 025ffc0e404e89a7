# SPDX-License-Identifier: MIT
"""The store of published models and the pointer to the one that serves.

A model is published whole, under its date, and never changed; the pointer is moved last, in one
rename, so that a reader sees the old model or the new one. Refused candidates are kept with the
reason beside them.

  DIR/models/DATE/model.json, checkpoint/   what was published        DIR/serving.json   the pointer
  DIR/refused/DATE/model.json, checkpoint/  what was refused, and why
  DIR/models/DATE/withdrawn.json            rolled back: no night starts from it again
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.orchestration.text_tables import table
from trainer.runtime.atomic_files import write_json

MODEL, CHECKPOINT = "model.json", "checkpoint"
_POINTER, _WITHDRAWN = "serving.json", "withdrawn.json"


class Store:
    """The models below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def models(self, kind: str = "models") -> dict[str, dict[str, Any]]:
        """Return what is known of each published (or `refused`) model, by date in order."""
        found = {}
        for path in sorted((self.folder / kind).glob(f"*/{MODEL}")):
            if not path.parent.name.startswith("."):
                withdrawn = (path.parent / _WITHDRAWN).exists()
                found[path.parent.name] = {**_read(path, "trained_through"), "withdrawn": withdrawn}
        return found

    def checkpoint(self, date: str) -> Path:
        """Return the checkpoint of the model published under `date`."""
        return self.folder / "models" / date / CHECKPOINT

    def serving(self) -> str:
        """Return the date of the model that serves, or an empty text."""
        path = self.folder / _POINTER
        return _read(path, "model")["model"] if path.exists() else ""

    def before(self, date: str = "") -> str:
        """Return the newest model (before `date`, if given) that was not withdrawn, or nothing."""
        dates = [name for name, model in self.models().items() if not model["withdrawn"]]
        return max((name for name in dates if not date or name < date), default="")

    def keep(self, kind: str, date: str, checkpoint: Path, model: Mapping[str, Any]) -> Path:
        """Put a copy of a checkpoint under `kind` (`models` or `refused`) and `date`, whole.

        A model that is published takes the place of one that was refused under its date.
        """
        target = self.folder / kind / date
        partial, old = (target.with_name(f".{date}.{word}") for word in ("partial", "replaced"))
        for path in (partial, old):
            shutil.rmtree(path, ignore_errors=True)
        # Files of a checkpoint never change, so a second name for each is a copy.
        shutil.copytree(checkpoint, partial / CHECKPOINT, copy_function=_link)
        write_json(partial / MODEL, {"date": date, **model})
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        if kind == "models":  # the same night, which was refused before
            shutil.rmtree(self.folder / "refused" / date, ignore_errors=True)
        return target

    def point(self, date: str, reason: str) -> None:
        """Let the model of `date` serve. The last thing that a promotion does."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.folder / _POINTER, {"model": date, "since": since, "reason": reason})

    def roll_back(self, reason: str) -> str:
        """Withdraw the serving model and let the one before serve; return its date.

        Raises:
            ValueError: no model serves, or none was published before it.
        """
        current = self.serving()
        if current not in self.models():
            raise ValueError(
                f"{self.folder}: {current or 'no model'} serves, which is none of the published "
                "models, so there is nothing to roll back; choose one with --serve DATE"
            )
        earlier = self.before(current)
        if not earlier:
            raise ValueError(f"{self.folder}: no model was published before {current}")
        # Withdrawn first: a crash in between must not leave a bad model as the next night's base.
        path = self.folder / "models" / current / _WITHDRAWN
        write_json(path, {"reason": reason, "in_favour_of": earlier})
        self.point(earlier, f"rolled back from {current}: {reason}")
        return earlier

    def serve(self, date: str, reason: str) -> str:
        """Let a published model serve, withdrawn before or not; return its date.

        Raises:
            ValueError: there is none of that date.
        """
        known = self.models()
        if date not in known:
            raise ValueError(f"--serve: no model of {date!r}; models: {', '.join(known) or 'none'}")
        (self.folder / "models" / date / _WITHDRAWN).unlink(missing_ok=True)
        self.point(date, reason)
        return date

    def why_withdrawn(self, date: str) -> str:
        """Return the reason for which a published model was withdrawn, empty if it was not."""
        note = self.folder / "models" / date / _WITHDRAWN
        return (_read(note, "reason")["reason"] or "by hand") if note.exists() else ""

    def describe(self) -> str:
        """Return a line a model: date, state, days it was trained through, AUC, reason."""
        serving, rows = self.serving(), []
        for kind in ("models", "refused"):
            for date, model in self.models(kind).items():
                state = "refused" if kind == "refused" else "published"
                state = "withdrawn" if model["withdrawn"] else state
                state = "serving" if kind == "models" and date == serving else state
                auc = model.get("metrics", {}).get("auc")
                withdrawn = self.why_withdrawn(date) if kind == "models" else ""
                reasons = [*model.get("reasons", []), *([withdrawn] if withdrawn else [])]
                shown = f"{auc:.4f}" if auc is not None else "-"
                rows.append(
                    (date, state, model.get("trained_through", ""), shown, "; ".join(reasons))
                )
        return table(("date", "state", "trained through", "auc", "reasons"), sorted(rows))


def _read(path: Path, key: str) -> dict[str, Any]:
    """Return the JSON object of a file of the store, which has a text under `key`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); remove it or restore it") from error
    if not isinstance(found, dict) or not isinstance(found.get(key), str):
        raise ValueError(f"{path}: expected an object with a text {key!r}; remove it or restore it")
    return found


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)

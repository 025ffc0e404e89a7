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

import datetime
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.orchestration.output_files import remove
from pipelines.orchestration.text_tables import table
from trainer.runtime.atomic_files import read_json, write_json

MODEL, CHECKPOINT = "model.json", "checkpoint"
_POINTER, _WITHDRAWN = "serving.json", "withdrawn.json"
# What others read in a model's record, and its types. All but the first may be missing.
_RECORD: dict[str, type | tuple[type, ...]] = {
    "trained_through": str,
    "recipe": str,
    "base": str,
    "days": dict,
    "skipped": dict,
    "metrics": dict,
    "before": (dict, type(None)),
    "differences": (dict, type(None)),
    "reasons": list,
}


class Store:
    """The models below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def models(self, kind: str = "models") -> dict[str, dict[str, Any]]:
        """Return the record of each published (or `refused`) model, by date in order.

        Raises:
            ValueError: a record is damaged.
        """
        found = {}
        for path in sorted((self.folder / kind).glob(f"*/{MODEL}")):
            if _is_day(path.parent.name):
                withdrawn = (path.parent / _WITHDRAWN).exists()
                found[path.parent.name] = {**_read_record(path), "withdrawn": withdrawn}
        return found

    def checkpoint(self, date: str) -> Path:
        """Return the checkpoint of the model published under `date`."""
        return self.folder / "models" / date / CHECKPOINT

    def serving(self) -> str:
        """Return the date of the model that serves, or an empty text."""
        path = self.folder / _POINTER
        return _read(path, {"model": str})["model"] if path.exists() else ""

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
            remove(path)
        # Files of a checkpoint never change, so a second name for each is a copy.
        shutil.copytree(checkpoint, partial / CHECKPOINT, copy_function=_link)
        write_json(partial / MODEL, {"date": date, **model})
        if target.exists():
            target.rename(old)
        partial.rename(target)
        remove(old)
        if kind == "models":  # the same night, which was refused before
            remove(self.folder / "refused" / date)
        return target

    def point(self, date: str, reason: str) -> None:
        """Let the model of `date` serve. The last thing that a promotion does."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.folder / _POINTER, {"model": date, "since": since, "reason": reason})

    def roll_back(self, reason: str) -> str:
        """Withdraw the serving model and let the one before serve; return its date.

        Raises:
            ValueError: no model serves, none was published before it, or the checkpoint of the one
                before is gone. Then nothing has changed.
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
        self._check_whole(earlier)
        # Withdrawn first: a crash in between must not leave a bad model as the next night's base.
        path = self.folder / "models" / current / _WITHDRAWN
        write_json(path, {"reason": reason, "in_favour_of": earlier})
        self.point(earlier, f"rolled back from {current}: {reason}")
        return earlier

    def serve(self, date: str, reason: str) -> str:
        """Let a published model serve, withdrawn before or not; return its date.

        Raises:
            ValueError: there is none of that date, or its checkpoint is gone. Then nothing has
                changed.
        """
        known = self.models()
        if date not in known:
            raise ValueError(f"--serve: no model of {date!r}; models: {', '.join(known) or 'none'}")
        self._check_whole(date)
        (self.folder / "models" / date / _WITHDRAWN).unlink(missing_ok=True)
        self.point(date, reason)
        return date

    def why_withdrawn(self, date: str) -> str:
        """Return the reason for which a published model was withdrawn, empty if it was not."""
        note = self.folder / "models" / date / _WITHDRAWN
        return (_read(note, {"reason": str})["reason"] or "by hand") if note.exists() else ""

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
                shown = f"{auc:.4f}" if isinstance(auc, int | float) else "-"
                text = "; ".join(map(str, reasons))
                rows.append((date, state, model["trained_through"], shown, text))
        return table(("date", "state", "trained through", "auc", "reasons"), sorted(rows))

    def _check_whole(self, date: str) -> None:
        """Check that the files of a model are there, each of the size it was written with.

        Raises:
            ValueError: something is gone.
        """
        # Reading a manifest takes seconds, because the module of checkpoints imports torch.
        from trainer.checkpoint.layout import data_folder, read_manifest

        path = self.checkpoint(date)
        others = f"the pointer was not moved; restore it, or choose another model of {self.folder}"
        try:
            manifest = read_manifest(path, {"files": dict})
            place = data_folder(path, manifest)
            for name, (size, *_) in manifest["files"].items():
                found = (Path(str(place)) / name).stat().st_size
                if found != size:
                    raise ValueError(f"{name}: expected {size:,} bytes, got {found:,}")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"the checkpoint of the model of {date} cannot be served: {error}; {others}"
            ) from error


def _read_record(path: Path) -> dict[str, Any]:
    """Return the record of a model.

    Raises:
        ValueError: it lacks something, or has a value of another type than written.
    """
    found = _read(path, {"trained_through": str})
    for key, kind in _RECORD.items():
        if key in found and not isinstance(found[key], kind):
            raise ValueError(f"{path}: {key}: got {found[key]!r:.40}; remove it or restore it")
    return found


def _read(path: Path, keys: Mapping[str, type]) -> dict[str, Any]:
    """Return the JSON object of a file of the store, which has values of these types."""
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); remove it or restore it") from error
    for key, kind in keys.items():
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise ValueError(
                f"{path}: expected an object with a text {key!r}; remove it or restore it"
            )
    return found


def _is_day(name: str) -> bool:
    """Return whether a folder's name is a date; others are not the store's."""
    try:
        return datetime.date.fromisoformat(name).isoformat() == name
    except ValueError:
        return False


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)

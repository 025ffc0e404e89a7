# SPDX-License-Identifier: MIT
"""Which checkpoints of a run stay: the last, the best, one every so many hours, the protected.

Nothing is removed that any of the rules keeps, and the newest always stays. A checkpoint is
protected by a file called `protected` in its folder (`touch step-1000/protected`); its metrics, if
it was evaluated, are in `metrics.json` there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.layout import complete, read_manifest, remove
from trainer.checkpoint.storage import Folder, read_bounded, write_durably
from trainer.metrics.spec import METRICS
from trainer.runtime.atomic_files import MAX_JSON_BYTES, parse_json, to_json

PROTECTED = "protected"
EVALUATION = "metrics.json"
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One complete checkpoint.

    saved: when it was written, in seconds since 1970. score: higher is better; NaN: not evaluated.
    """

    path: Folder
    saved: float
    score: float
    protected: bool


def surplus(found: Sequence[Kept], last: int, best: int, every_hours: float) -> list[Folder]:
    """Return those of `found`, oldest first, that no rule keeps.

    last: how many of the newest stay. best: how many of the highest score. every_hours: the first
    in each stretch of so many hours stays; 0: no such rule.
    """
    kept = {entry.path for entry in found[-max(last, 1) :]}
    kept |= {entry.path for entry in found if entry.protected}
    scored = [entry for entry in found if not math.isnan(entry.score)]
    ranked = sorted(scored, key=lambda entry: entry.score, reverse=True)
    kept |= {entry.path for entry in ranked[:best]}
    if every_hours:
        stretches: dict[int, Folder] = {}
        for entry in found:
            stretches.setdefault(int(entry.saved // (every_hours * _SECONDS_PER_HOUR)), entry.path)
        kept |= set(stretches.values())
    return [entry.path for entry in found if entry.path not in kept]


def prune(
    directory: Folder, last: int, best: int = 0, every_hours: float = 0.0, metric: str = "auc"
) -> list[Folder]:
    """Remove the surplus below `directory` and return what was removed. On one rank."""
    paths = complete(directory)
    # What no rule asks for is not read: behind a URL each file is a request or two.
    metric = metric if best else ""
    newest = paths[-max(last, 1) :]
    found = [_look(path, metric, every_hours > 0, path in newest) for path in paths]
    removed = surplus(found, last, best, every_hours)
    for path in removed:
        remove(path)
    return removed


def note_metrics(path: Folder, metrics: Mapping[str, Any]) -> None:
    """Write an evaluation beside the checkpoint that it is of. On one rank."""
    write_durably(path / EVALUATION, to_json(metrics))


def _look(path: Folder, metric: str, aged: bool, newest: bool) -> Kept:
    """Return what the rules ask of a checkpoint; one that is damaged has no age and no score.

    Args:
        path: the checkpoint.
        metric: of its score; empty: no rule asks for one.
        aged: whether a rule asks for its age.
        newest: whether it stays for that alone.
    """
    saved, score = 0.0, math.nan
    if aged:
        with contextlib.suppress(ValueError):
            saved = float(read_manifest(path).get("saved", 0.0))
    if metric:
        score = _score(path, metric)
    protected = not newest and (path / PROTECTED).is_file()
    return Kept(path=path, saved=saved, score=score, protected=protected)


def _score(path: Folder, metric: str) -> float:
    """Return the score of a checkpoint's evaluation, higher for better; NaN if it has none."""
    try:
        value = parse_json(read_bounded(path / EVALUATION, MAX_JSON_BYTES))[metric]
        return METRICS[metric].score(float(value))
    except (OSError, ValueError, KeyError, TypeError):
        return math.nan

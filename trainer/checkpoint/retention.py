# SPDX-License-Identifier: MIT
"""Which checkpoints of a run are kept: the last, the best, periodic ones and protected ones.

A checkpoint that any rule keeps is not removed, and the newest is always kept. A file called
`protected` in its folder (`touch step-1000/protected`) protects a checkpoint. The metrics of an
evaluated checkpoint are in `metrics.json` there.
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

    Attributes:
        path: its folder.
        saved: when it was written, in seconds since 1970.
        score: its score, higher is better; NaN if it was not evaluated.
        protected: whether a file protects it.
    """

    path: Folder
    saved: float
    score: float
    protected: bool


def surplus(found: Sequence[Kept], last: int, best: int, every_hours: float) -> list[Folder]:
    """Return the checkpoints of `found` that no rule keeps.

    Args:
        found: complete checkpoints, oldest first.
        last: number of newest checkpoints to keep; at least 1 is kept.
        best: number of checkpoints with the highest score to keep.
        every_hours: keep the first checkpoint of each period of this many hours; 0 disables the
            rule.
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
    """Remove the surplus below `directory` and return the removed checkpoints. On one rank.

    Args:
        directory: the folder of the run's checkpoints.
        last: as in `surplus`.
        best: as in `surplus`.
        every_hours: as in `surplus`.
        metric: the metric that decides which are best.
    """
    paths = complete(directory)
    # Files that no rule needs are not read: behind a URL each costs a request or two.
    metric = metric if best else ""
    newest = paths[-max(last, 1) :]
    found = [_look(path, metric, every_hours > 0, path in newest) for path in paths]
    removed = surplus(found, last, best, every_hours)
    for path in removed:
        remove(path)
    return removed


def note_metrics(path: Folder, metrics: Mapping[str, Any]) -> None:
    """Write an evaluation's metrics beside the checkpoint at `path`. On one rank."""
    write_durably(path / EVALUATION, to_json(metrics))


def _look(path: Folder, metric: str, aged: bool, newest: bool) -> Kept:
    """Return what the rules need to know of a checkpoint; a damaged one has no age and no score.

    Args:
        path: the checkpoint.
        metric: the metric of its score; empty if no rule needs one.
        aged: whether a rule needs its age.
        newest: whether it is kept as the newest anyway.
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

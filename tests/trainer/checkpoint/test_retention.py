# SPDX-License-Identifier: MIT
"""Which checkpoints stay, and that nothing a rule keeps is ever removed."""

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.layout import FORMAT, MANIFEST
from trainer.checkpoint.retention import Kept, note_metrics, prune, surplus

HOUR = 3600.0


def write(folder: Path, step: int, hours: float = 0.0, **metrics: float) -> Path:
    path = folder / f"step-{step}"
    path.mkdir()
    manifest = {"format": FORMAT, "step": step, "world_size": 1, "files": {}, "saved": hours * HOUR}
    (path / MANIFEST).write_text(json.dumps(manifest))
    if metrics:
        note_metrics(path, metrics)
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_last_the_best_the_hourly_and_the_protected_stay(tmp_path):
    for step, auc in ((1, 0.9), (2, 0.5), (3, 0.7), (4, 0.6), (5, 0.6)):
        write(tmp_path, step, hours=step * 0.4, auc=auc)
    (tmp_path / "step-2" / "protected").touch()
    removed = prune(tmp_path, last=1, best=1)
    assert names(tmp_path) == {"step-1", "step-2", "step-5"}
    assert [path.name for path in removed] == ["step-3", "step-4"]


def test_of_each_stretch_of_hours_the_first_stays(tmp_path):
    for step in range(1, 9):
        write(tmp_path, step, hours=step * 0.5)
    prune(tmp_path, last=1, every_hours=2.0)
    assert names(tmp_path) == {"step-1", "step-4", "step-8"}


def test_a_logloss_is_better_when_lower_and_an_evaluation_without_it_counts_for_nothing(tmp_path):
    for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2)):
        write(tmp_path, step, logloss=loss)
    write(tmp_path, 4, auc=0.9)
    (tmp_path / "step-3" / "metrics.json").write_text("{")
    prune(tmp_path, last=1, best=2, metric="logloss")
    assert names(tmp_path) == {"step-1", "step-2", "step-4"}


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.one_of(st.just(math.nan), st.floats(0, 1)), st.booleans()),
        max_size=12,
    ),
    *(st.integers(1, 4), st.integers(0, 4), st.sampled_from([0.0, 1.0, 24.0])),
)
def test_a_clock_that_jumps_or_a_metric_that_is_missing_never_costs_the_newest(
    entries, last, best, every_hours
):
    found = [
        Kept(path=Path(str(i)), saved=saved, score=score, protected=protected)
        for i, (saved, score, protected) in enumerate(entries)
    ]
    gone = surplus(found, last, best, every_hours)
    stay = [entry for entry in found if entry.path not in gone]
    assert stay[-last:] == found[-last:]
    assert all(entry in stay for entry in found if entry.protected)
    assert len(stay) >= min(len(found), last)
    if not (best or every_hours or any(entry.protected for entry in found)):
        assert len(stay) == min(len(found), last)

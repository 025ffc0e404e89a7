# SPDX-License-Identifier: MIT
"""The report of a night: what it trained on, how candidate and serving model compare, the verdict.

Read from what the night's stages have left in its folder (nights/DATE/STAGE/manifest.json); a night
that ended early shows what it made. The candidate's own run fills the rest of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.reporting.run_data import DASH, entry, is_number, read_data, records, written
from trainer.metrics.spec import METRICS

STAGES = ("days", "candidate", "evaluation", "verdict", "publication")
_MANIFEST = "manifest.json"
_RUN = "run"


def is_night(path: Path) -> bool:
    """Return whether a folder is a night's."""
    return any((path / stage / _MANIFEST).is_file() for stage in STAGES)


def candidate_run(path: Path) -> Path | None:
    """Return the folder of the candidate's run, if the night came so far."""
    folder = path / "candidate" / _RUN
    return folder if (folder / "config.json").is_file() else None


def read_night(path: Path) -> dict[str, Any]:
    """Return what the page shows of a night: title, verdict, reasons and tables.

    Raises:
        ValueError: the folder holds no stage of a night, or a manifest that cannot be read.
    """
    found = {stage: _read(path / stage / _MANIFEST) for stage in STAGES}
    if not any(found.values()):
        raise ValueError(
            f"{path}: expected the folder of a night, with a stage's {_MANIFEST} in it, got none; "
            "pass OUTPUT/nights/DATE of `python -m pipelines.run nightly --output OUTPUT`"
        )
    metrics = {stage: _mapping(entry(one, "metrics")) for stage, one in found.items()}
    verdict, reasons = _verdict(metrics)
    return {
        "date": str(metrics["days"].get("date") or path.resolve().name),
        "verdict": verdict,
        "reasons": reasons,
        "stages": _stages(found),
        "days": _days(metrics["days"]),
        "models": _models(metrics["evaluation"]),
        "differences": _differences(metrics["evaluation"]),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return _mapping(read_data(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); run the night again") from error


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _verdict(metrics: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the verdict in a sentence, and the reasons of a refusal."""
    verdict, publication = metrics["verdict"], metrics["publication"]
    if not verdict:
        return "The night ended before its verdict.", []
    reasons = verdict.get("reasons")
    reasons = [str(reason) for reason in reasons] if isinstance(reasons, list) else []
    if verdict.get("promote") is not True:
        return "Refused: the model before goes on serving.", reasons
    if not publication:
        return "Promoted by the gates, and not published yet.", reasons
    return "Promoted and published.", reasons


def _stages(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for stage, manifest in found.items():
        summary = str(entry(manifest, "metrics", "summary") or DASH)
        state = "made" if manifest else "not made"
        started = str(manifest.get("started") or DASH)
        rows.append([stage, state, started, written(manifest.get("seconds"), ",.1f"), summary])
    return _table(["Stage", "State", "Started", "Seconds", "Made"], rows)


def _days(metrics: dict[str, Any]) -> dict[str, Any] | None:
    counts, new = metrics.get("rows"), metrics.get("new")
    if not isinstance(counts, dict) or not isinstance(new, list):
        return None
    rows = [
        [day, "trains" if day in new else "tests", written(count, ",.0f")]
        for day, count in sorted(counts.items())
    ]
    return _table(["Day", "Use", "Rows"], rows)


def _models(metrics: dict[str, Any]) -> dict[str, Any] | None:
    models = records(metrics.get("models"))
    if not models:
        return None
    names = ("candidate", "serving before")
    rows = [
        [
            name,
            *(written(model.get(key), one.form) for key, one in METRICS.items()),
            written(model.get("rows"), ",.0f"),
        ]
        for name, model in zip(names, models, strict=False)
    ]
    return _table(["Model", *(one.title for one in METRICS.values()), "Test rows"], rows)


def _differences(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the paired differences, candidate less serving model, with their intervals."""
    found = metrics.get("differences")
    if not isinstance(found, dict):
        return None
    rows, titles = [], {key: one.title for key, one in METRICS.items()}
    for name, one in found.items():
        title = titles.get(name, name.replace("_", " ").capitalize())
        if isinstance(one, dict) and is_number(one.get("difference")):
            ends = one.get("interval")
            low, high = ends if isinstance(ends, list) and len(ends) == 2 else (None, None)
            interval = f"{written(low, '+.4f')} to {written(high, '+.4f')}"
            rows.append([title, written(one["difference"], "+.4f"), interval])
        elif is_number(one):
            rows.append([title, written(one), DASH])
    header = ["Candidate less serving", "Difference", "95 % interval"]
    return _table(header, rows) if rows else None


def _table(header: list[str], rows: Sequence[list[str]]) -> dict[str, Any]:
    return {"header": header, "rows": list(rows), "hints": {}, "best": {}}

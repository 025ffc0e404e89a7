# SPDX-License-Identifier: MIT
"""The outcome of a night for monitoring: a line of the log, and a file in Prometheus' text format.

DIR/night.prom is written whole, in one rename, for node_exporter's textfile collector (point its
`--collector.textfile.directory` at DIR, or link the file there):

  fullrank_night_last_success_timestamp_seconds   when a night last ended with a promotion
  fullrank_night_last_run_timestamp_seconds       when one last ended at all
  fullrank_night_date_timestamp_seconds           midnight (UTC) of the date it was for
  fullrank_night_exit_code                        of `pipelines.run`: 0, 1, 2, 3 or 4
  fullrank_night_promoted                         1 if its candidate serves
  fullrank_night_duration_seconds                 of the whole run
  fullrank_night_rows{part="train|evaluate"}      rows that it trained and evaluated on
  fullrank_night_skipped_days                     days that the drift check left out
  fullrank_night_refused_in_a_row                 candidates refused since the last promotion
  fullrank_night_serving_date_timestamp_seconds   midnight (UTC) of the serving model's date
  fullrank_night_doubts{model="candidate|serving"}   how many of its numbers mean nothing
                                                  (`trainer/metrics/validity.py`)
  fullrank_night_auc{model="candidate|serving"}   on the date; so with every other metric
                                                  of `trainer/metrics/spec.py`
  fullrank_stage_state{pipeline,stage,state}      1 for the state that a stage of a night is
                                                  in (waiting, running, done, skipped, failed)
  fullrank_stage_since_timestamp_seconds{pipeline,stage}   when it came to be in that

The states of stages are written while the night runs; what is killed stays `running`, so that an
alert on the time since then finds it. A night that cannot begin leaves them as they were.

Numbers that a night did not come to are absent. Alert on time since the last success, not on the
exit code: a night that never starts has none.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.nightly.model_store import Store
from pipelines.orchestration.run_status import STATES, RunStatus
from trainer.metrics.spec import METRICS
from trainer.metrics.validity import all_doubts
from trainer.runtime.atomic_files import read_bytes, write_text
from trainer.runtime.printable import printable

FILE = "night.prom"
_PREFIX, _STAGES = "fullrank_night_", "fullrank_stage_"
# The alert rule of Prometheus on refusals has the same number.
_MANY_REFUSED = 3
_SUCCESS = f"{_PREFIX}last_success_timestamp_seconds"
_MODELS = ("candidate", "serving")
_SAID = 300  # characters of a reason
_WORDS = ("promoted", "failed", "wrong", "refused", "not ready", "already running")


@dataclass(frozen=True, kw_only=True)
class NightMetrics:
    """Numbers of one night.

    Args:
        date: date of the night.
        code: exit code.
        seconds: duration of the run.
        values: numbers by name with labels, in order.
        reasons: reasons of a refusal.
    """

    date: str
    code: int
    seconds: float
    values: dict[str, float]
    reasons: tuple[str, ...] = ()

    def line(self) -> str:
        """Return what happened in one line, for logs and for what greps them."""
        word = _WORDS[self.code] if self.code < len(_WORDS) else f"code {self.code}"
        auc = [self.values.get(f'auc{{model="{model}"}}') for model in _MODELS]
        shown = [f"auc {auc[0]:.4f}" if auc[0] is not None else ""]
        shown += [f"before {auc[1]:.4f}" if auc[1] is not None else ""]
        row = self.values.get("refused_in_a_row", 0)
        shown += [f"{row:.0f} candidates refused in a row"] if row >= _MANY_REFUSED else []
        shown += ["; ".join(_one_line(reason) for reason in self.reasons)]
        parts = ", ".join(part for part in shown if part)
        start = "alert: " if self.code else ""
        tail = f": {parts}" if parts else ""
        return f"{start}night {self.date} {word} in {self.seconds:.0f} s{tail}"

    def write(self, path: Path) -> None:
        """Replace `path`; the last success stays what it was unless this night is one.

        A night that was not ready has no numbers of its own: those of the night before go, so that
        nobody takes them for this one's.
        """
        now = time.time()
        success = now if self.code == 0 else _last_success(path)
        lines = {"last_run_timestamp_seconds": now, **self.values}
        if success:
            lines = {"last_success_timestamp_seconds": success, **lines}
        _replace(path, _text(_PREFIX, lines) + _kept(path, of_stages=True))


def write_states(path: Path, status: RunStatus) -> None:
    """Replace the states of stages in `path` by those of now; the rest of the file stays."""
    states, since = dict[str, float](), dict[str, float]()
    for name, (entered, moment) in status.states.items():
        labels = f'pipeline="nightly",stage="{name}"'
        states |= {f'state{{{labels},state="{one}"}}': float(one == entered) for one in STATES}
        since[f"since_timestamp_seconds{{{labels}}}"] = moment
    _replace(path, _kept(path, of_stages=False) + _text(_STAGES, {**states, **since}))


def _text(prefix: str, values: Mapping[str, float]) -> str:
    """Return metrics, those of one name after each other, in Prometheus' text format."""
    text, seen = "", set()
    for name, value in values.items():
        metric = name.partition("{")[0]
        if metric not in seen:
            text += f"# TYPE {prefix}{metric} gauge\n"
            seen.add(metric)
        text += f"{prefix}{name} {value:.10g}\n" if value % 1 else f"{prefix}{name} {value:.0f}\n"
    return text


def _kept(path: Path, of_stages: bool) -> str:
    """Return the lines of a file that are of stages, or those that are not."""
    try:
        lines = read_bytes(path).decode().splitlines(keepends=True)
    except (OSError, ValueError):
        return ""
    return "".join(line for line in lines if (_STAGES in line) == of_stages)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _one_line(reason: str) -> str:
    return printable(" ".join(reason.split()))[:_SAID]


def collect(date: str, status: RunStatus) -> NightMetrics:
    """Return the numbers of a night that has ended; date: a day, or `new`, or a range."""
    code, metrics = status.code, status.metrics
    days, found = metrics.get("days", {}), metrics.get("evaluation", {}).get("models", [])
    values = {
        "exit_code": float(code),
        "promoted": float(metrics.get("publication", {}).get("promoted", code == 0)),
        "duration_seconds": status.seconds,
    }
    with contextlib.suppress(ValueError):
        midnight = datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC).timestamp()
        values = {"date_timestamp_seconds": midnight, **values}
    if days:
        values['rows{part="train"}'] = float(days["trained_rows"])
        values['rows{part="evaluate"}'] = float(days["rows"][date])
        values["skipped_days"] = float(len(days["skipped"]))
    for name in METRICS:
        for model, known in zip(_MODELS, found, strict=False):
            if known.get(name) is not None:
                values[f'{name}{{model="{model}"}}'] = float(known[name])
    for model, known in zip(_MODELS, found, strict=False):
        doubtful = all_doubts(known, {"intervals": known.get("intervals")})
        values[f'doubts{{model="{model}"}}'] = float(len(doubtful))
    verdict = metrics.get("verdict", {})
    reasons = [*verdict.get("reasons", ()), status.reason, *verdict.get("notes", ())]
    return NightMetrics(
        date=date,
        code=code,
        seconds=status.seconds,
        values=values,
        reasons=tuple(reason for reason in reasons if reason),
    )


def of_store(store: Store) -> dict[str, float]:
    """Return how long the model that serves has not been replaced, by name.

    Args:
        store: Of published and refused models.
    """
    serving = store.serving()
    promoted = [day for day, model in store.models().items() if not model["withdrawn"]]
    last = max([serving, *promoted])
    refused = [day for day in store.models("refused") if day > last]
    values = {"refused_in_a_row": float(len(refused))}
    if serving:
        midnight = datetime.datetime.fromisoformat(serving).replace(tzinfo=datetime.UTC)
        values["serving_date_timestamp_seconds"] = midnight.timestamp()
    return values


def _last_success(path: Path) -> float:
    try:
        found = re.search(rf"^{_SUCCESS} (\S+)$", read_bytes(path).decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0
    except (OSError, ValueError):
        return 0.0

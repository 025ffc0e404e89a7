# SPDX-License-Identifier: MIT
"""Which days a night trains on: ready, before its date, and not yet known to its base.

A model's record names the days that it was trained on, each with a fingerprint, and the model from
which it started; following that back gives all days that it has seen. The next night so finds a day
that came late, or that a night had to leave out; a day that was delivered again after
training is named.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.ingestion.readiness import Readiness
from pipelines.nightly.model_store import Store
from pipelines.orchestration.fingerprints import of_path
from pipelines.orchestration.stage import NotReadyError


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the base of a night was trained on.

    Args:
        base: Its date, empty for none.
        through: Its last day.
        days: Fingerprint of each day that it and the models before it were trained on.
    """

    base: str
    through: str
    days: dict[str, str]

    def changed(self, data: Path) -> list[str]:
        """Return the days that are no longer what the base was trained on."""
        present = {day: of_path(data / f"dt={day}") for day in self.days}
        return [day for day, now in present.items() if now and now != self.days[day]]


def known_to(store: Store, date: str) -> Known:
    """Return what the base of the night of `date` was trained on."""
    models = store.models()
    base = name = store.before(date)
    through = models[base]["trained_through"] if base else ""
    days: dict[str, str] = {}
    while name in models:
        days = {**models[name].get("days", {}), **days}
        before = models[name].get("base", "")
        name = before if before < name else ""
    return Known(base=base, through=through, days=dict(sorted(days.items())))


def days_of_refused(store: Store, known: Known) -> set[str]:
    """Return the days that refused candidates were trained on and the base was not."""
    refused = store.models("refused").values()
    return {day for model in refused for day in model.get("days", {})} - known.days.keys()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How to choose the days.

    Args:
        date: Of the night.
        first_days: Number of days of a night without a base, 0 for all.
        skip: Days not to train on.
        allow_gaps: Whether a day in between may be missing.
    """

    date: str
    first_days: int
    skip: Collection[str]
    allow_gaps: bool

    def new_days(self, ready: Sequence[str], known: Known, mark: Readiness) -> tuple[str, ...]:
        """Return the days to train on, in order.

        Raises:
            ValueError: the date is no day.
            NotReadyError: the date, or a day between the base's last and the date, is not ready; or
              no day is new.
        """
        date = datetime.date.fromisoformat(self.date)
        if self.date not in ready:
            shown = f"ready: {ready[0]} to {ready[-1]}" if ready else "no day is ready"
            raise NotReadyError(f"{self.date} is not ready ({shown}); {mark.describe()}")
        earliest = min(known.days, default=known.through)
        wanted = [day for day in ready if day < self.date and day not in {*known.days, *self.skip}]
        after = [day for day in wanted if day > known.through]
        late = [day for day in wanted if earliest < day <= known.through] if known.days else []
        if not known.base and self.first_days:
            after = after[-self.first_days :]
        if not [*late, *after]:
            last = f"; the model before was trained through {known.through}" if known.base else ""
            raise NotReadyError(f"no day before {self.date} is new{last}")
        if after:
            self._check_gaps(after, known.through, date)
        return tuple(sorted([*late, *after]))

    def _check_gaps(self, after: Sequence[str], through: str, date: datetime.date) -> None:
        first = datetime.date.fromisoformat(through or after[0])
        between = {
            (first + datetime.timedelta(days=number)).isoformat()
            for number in range(1 if through else 0, (date - first).days)
        }
        gaps = sorted(between - {*after, *self.skip})
        if gaps and not self.allow_gaps:
            raise NotReadyError(
                f"{len(gaps)} days before {self.date} are not ready, the first is {gaps[0]}; wait "
                "for them, or pass --allow-gaps"
            )

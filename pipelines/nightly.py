# SPDX-License-Identifier: MIT
"""A night: train yesterday's model on the days since, compare it with the one that serves, decide.

For a date D the stages are

  days         which days are ready and new: after the last that the base was trained on, before D
  candidate    training on them, from the base's checkpoint (policy `nightly`), or from nothing
  evaluation   candidate and base on day D, which neither has seen: metrics, paired differences
  verdict      the gates (`pipelines/gates.py`): promote, or refuse with every reason
  publication  the candidate is kept under its date; the pointer to the serving model moves last

The base is the newest published model before D that was not withdrawn, so that a date can be run
again, or run late (back-fill), and does the same. A late date does not take the place of a newer
model that serves.

  python -m pipelines.run nightly --date 2026-01-08 --recipe dlrm.demo --data LOGS --output DIR
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipelines import launch
from pipelines.epochs import RUN, describe, train_and_read
from pipelines.gates import GateConfig
from pipelines.launch import LaunchConfig
from pipelines.lock import Lock
from pipelines.partition import read_manifests
from pipelines.publish import Store
from pipelines.stage import NotReadyError, Pipeline, Stage, Work
from pipelines.tables import table
from trainer.policies import resolve_local

REFUSED = 3
_NAMES = ("auc", "gauc", "logloss", "ne", "calibration")


@dataclass(frozen=True, kw_only=True)
class NightlyConfig:
    """What a night does.

    store: of published models. date: the day to evaluate on. new: the days to train on. base: the
    date of the model to start from, or empty. has_warmup: whether the tower has a warm-up form.
    """

    store: Store
    date: str
    new: tuple[str, ...]
    base: str
    recipe: str
    data: str
    overrides: tuple[str, ...]
    has_warmup: bool
    replicates: int
    gate: GateConfig
    launch: LaunchConfig

    def stages(self) -> list[Stage]:
        """Return the night's stages."""
        parts = tuple(Path(self.data) / f"dt={day}" for day in (*self.new, self.date))
        shared = {"recipe": self.recipe, "overrides": self.overrides}
        config = {"date": self.date, "new": self.new, "base": self.base}
        gate, comparison = asdict(self.gate), {"replicates": self.replicates}
        return [
            Stage(make=self.days, sources=parts, config=config),
            Stage(make=self.candidate, inputs=("days",), config=shared),
            Stage(make=self.evaluation, inputs=("days", "candidate"), config=comparison),
            Stage(make=self.verdict, inputs=("days", "evaluation"), config=gate),
            Stage(
                make=self.publication,
                inputs=("days", "candidate", "evaluation", "verdict"),
                lost=self.unpublished,
            ),
        ]

    def days(self, work: Work) -> dict[str, Any]:
        """Note the days and check that their files fit the schema, before anything is trained."""
        from trainer.config import apply_overrides, load_recipe
        from trainer.data.parquet import discover

        schema = apply_overrides(load_recipe(self.recipe), self.overrides).schema
        files = discover(self.data, (self.new[0], self.date), schema)
        rows: dict[str, int] = {}
        for file in files:
            rows[file.day] = rows.get(file.day, 0) + file.num_rows
        (work.folder / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
        trained = sum(rows.get(day, 0) for day in self.new)
        start = f"from the model of {self.base}" if self.base else "from nothing"
        summary = f"{trained:,} rows of {len(self.new)} days, {start}"
        return {**dict(work.config), "rows": rows, "summary": summary}

    def candidate(self, work: Work) -> dict[str, Any]:
        """Train on the new days, starting from the base."""
        words = [*self.overrides, "--data.path", self.data, "--data.test-days", self.date]
        words += ["--data.train-days", f"{self.new[0]}:{self.new[-1]}"]
        if self.base:
            path = str(self.store.checkpoint(self.base))
            words += ["--inherit.path", path, "--inherit.policy", "nightly"]
            words += ["--spatial-warmup", "0"] if self.has_warmup else []
        command = self.launch.train(self.recipe, work.folder / RUN, words)
        return train_and_read(self.launch, command, work)

    def evaluation(self, work: Work) -> dict[str, Any]:
        """Let candidate and base predict the same rows of the date."""
        models = [resolve_local(work.inputs["candidate"] / RUN)]
        models += [self.store.checkpoint(self.base)] if self.base else []
        command = self.launch.compare(models, self.data, self.date, self.replicates)
        answer = self.launch.start(command, work.folder / launch.LOG, work.say, answers=True)
        (work.folder / "comparison.json").write_text(answer, encoding="utf-8")
        found = json.loads(answer)
        return {**found, "summary": describe(found["models"][0])}

    def verdict(self, work: Work) -> dict[str, Any]:
        """Ask the gates."""
        found = work.metrics["evaluation"]
        models = [*found["models"], None]
        reasons = GateConfig(**work.config).reasons(models[0], models[1], found.get("differences"))
        text = "; ".join(reasons) or "every gate is open"
        return {"promote": not reasons, "reasons": reasons, "summary": text}

    def publication(self, work: Work) -> dict[str, Any]:
        """Keep the candidate where it belongs; move the pointer last."""
        promote = work.metrics["verdict"]["promote"]
        model = {
            "recipe": self.recipe,
            "base": self.base,
            "trained_through": self.new[-1],
            "metrics": work.metrics["evaluation"]["models"][0],
            "reasons": work.metrics["verdict"]["reasons"],
        }
        checkpoint = resolve_local(work.inputs["candidate"] / RUN)
        with Lock(self.store.folder):  # nights of other dates, and people, move the pointer too
            self.store.keep("models" if promote else "refused", self.date, checkpoint, model)
            # Without a pointer the newest model serves, which another night may have published.
            serving = self.store.serving() or (self.store.before() if promote else "")
            if promote and serving <= self.date:
                serving = self.date
            if promote and serving != self.store.serving():
                self.store.point(serving, "promoted by its night")
        return {"promoted": promote, "summary": "published" if promote else "refused"}

    def unpublished(self, metrics: Mapping[str, Any]) -> str:
        """Say what is gone of what a finished publication has left in the store."""
        kind = "models" if metrics["promoted"] else "refused"
        if self.date not in self.store.models(kind):
            return f"{kind}/{self.date} is gone"
        return "" if self.store.serving() or not metrics["promoted"] else "no model serves"

    def conclude(self, metrics: Mapping[str, Mapping[str, Any]]) -> int:
        """Print both models' metrics and the verdict; return 0, or 3 for a refused candidate."""
        found = metrics["evaluation"]["models"]
        rows = []
        for name, values in zip(("candidate", "before"), found, strict=False):
            shown = [_shown(values.get(key)) for key in _NAMES]
            rows.append((name, *shown, _shown(values["rows"])))
        print(f"\n{table(('model', *_NAMES, 'rows'), rows)}")
        for reason in metrics["verdict"]["reasons"]:
            print(f"refused: {reason}")
        print(f"{self.store.serving() or 'no model'} serves")
        return 0 if metrics["verdict"]["promote"] else REFUSED


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline's options."""
    add = parser.add_argument
    add("--date", required=True, metavar="D", help="day to evaluate on; earlier days train")
    add("--recipe", required=True, help="what to train")
    add("--data", required=True, metavar="PATH", help="the log, in folders dt=YYYY-MM-DD")
    add("--output", type=Path, required=True, metavar="DIR", help="of nights and models")
    first = "days of the first night, which has no model to start from (default: all)"
    add("--first-days", type=int, default=0, metavar="N", help=first)
    ready = "a day is ready with its manifest, or as soon as it has files (default: manifest)"
    add("--ready", default="manifest", choices=("manifest", "files"), help=ready)
    add("--allow-gaps", action="store_true", help="train although a day in between is missing")
    add("--replicates", type=int, default=200, help="of the bootstrap (default: 200)")
    group = parser.add_argument_group("gates")
    for item in fields(GateConfig):
        name = f"--gate-{item.name.replace('_', '-')}"
        if isinstance(item.default, bool):
            group.add_argument(name, action="store_true", help="(default: off)")
        else:
            kind = type(item.default)
            text = f"(default: {item.default})"
            group.add_argument(name, type=kind, default=item.default, metavar="X", help=text)
    add("overrides", nargs="*", metavar="-- --section.field VALUE", help="settings of the recipe")
    launch.add_options(parser, retries=1)


def build(options: argparse.Namespace) -> Pipeline:
    """Return the night's pipeline.

    Raises:
        ValueError: an option, the recipe or a setting is wrong.
        NotReadyError: the date, or a day before it, is not ready; or no day is new.
    """
    from trainer.config import apply_overrides, load_recipe

    config = apply_overrides(load_recipe(options.recipe), options.overrides)
    output = options.output.resolve()
    store = Store(output)
    base = store.before(options.date)
    through = store.models()[base]["trained_through"] if base else ""
    days = ready_days(Path(options.data), options.ready)
    new = new_days(days, through, options)
    gate = {item.name: getattr(options, f"gate_{item.name}") for item in fields(GateConfig)}
    night = NightlyConfig(
        store=store,
        date=options.date,
        new=new,
        base=base,
        recipe=options.recipe,
        data=options.data,
        overrides=tuple(options.overrides),
        has_warmup=config.spatial_warmup > 0,
        replicates=options.replicates,
        gate=GateConfig(**gate),
        launch=launch.from_options(options),
    )
    folder = output / "nights" / options.date
    return Pipeline(stages=night.stages(), folder=folder, conclude=night.conclude)


def ready_days(data: Path, ready: str) -> list[str]:
    """Return the days of a log that are ready."""
    if ready == "manifest":
        return list(read_manifests(data))
    from trainer.data.parquet import days_of

    return [day for day in days_of(data) if day]


def new_days(days: list[str], through: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the days to train on: those after `through`, before the date.

    Raises:
        ValueError: the date is no day.
        NotReadyError: as `build` says.
    """
    date = datetime.date.fromisoformat(options.date)
    if options.date not in days:
        shown = f"ready: {days[0]} to {days[-1]}" if days else "no day is ready"
        raise NotReadyError(
            f"{options.date} is not ready in {options.data} ({shown}); a day is ready with its "
            "_manifest.json (--ready files: with any file)"
        )
    new = [day for day in days if through < day < options.date]
    if not through and options.first_days:
        new = new[-options.first_days :]
    if not new:
        last = f"; the model before was trained through {through}" if through else ""
        raise NotReadyError(f"no day before {options.date} is new{last}")
    first = datetime.date.fromisoformat(through or new[0])
    wanted = {
        (first + datetime.timedelta(days=number)).isoformat()
        for number in range(1 if through else 0, (date - first).days)
    }
    gaps = sorted(wanted - set(new))
    if gaps and not options.allow_gaps:
        raise NotReadyError(
            f"{len(gaps)} days before {options.date} are not ready, the first is {gaps[0]}; wait "
            "for them, or pass --allow-gaps"
        )
    present = set(ready_days(Path(options.data), "files")) if gaps else set()
    half = [day for day in gaps if new[0] < day < new[-1] and day in present]
    if half:
        raise NotReadyError(
            f"{half[0]} is not ready but has files, which would be read with the days around it; "
            "finish it, or remove it and pass --allow-gaps"
        )
    return tuple(new)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4f}" if value % 1 else f"{value:,.0f}"

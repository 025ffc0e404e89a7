# SPDX-License-Identifier: MIT
"""The stages of one night: partitions, days, candidate, evaluation, verdict, publication.

  partitions   raw days, where there are such, become typed days of the store's own data
  days         which of them are good (`pipelines/nightly/drift.py`); their files are checked
  candidate    training on them, from the base's checkpoint (policy `nightly`), or from nothing
  evaluation   candidate and base on day D, which neither has seen: metrics, paired differences
  verdict      the gates (`pipelines/nightly/gates.py`): promote, or refuse with every reason
  publication  the candidate is kept under its date; the pointer to the serving model moves last
  registration where there is --mlflow: the night is copied to its server
  (`pipelines/nightly/mlflow_tracking.py`)

A candidate reads its days through links in a folder of the night's own, so that exactly those count
that were chosen, whatever lies between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embeddings.schema.schema import Schema
from pipelines.ingestion.intake import Intake
from pipelines.nightly import mlflow_tracking
from pipelines.nightly.discovery import Known
from pipelines.nightly.drift import DayStatistics, DriftConfig, refused_days
from pipelines.nightly.gates import GateConfig
from pipelines.nightly.mlflow_tracking import MlflowConfig
from pipelines.nightly.model_store import Store
from pipelines.orchestration import launch
from pipelines.orchestration.fingerprints import of_path
from pipelines.orchestration.launch import RUN, LaunchConfig, train_and_read
from pipelines.orchestration.lock import Lock
from pipelines.orchestration.output_files import fresh_folder
from pipelines.orchestration.run_status import DONE, REFUSED
from pipelines.orchestration.stage import RefusedError, Stage, Work
from pipelines.orchestration.text_tables import table
from trainer.metrics.spec import METRICS, described
from trainer.runtime.atomic_files import parse_json, write_json
from trainer.runtime.printable import printable
from trainer.warm_start.policies import resolve_local

_VIEW = "view"


@dataclass(frozen=True, kw_only=True)
class NightConfig:
    """What a night does.

    Args:
        store: Of published models.
        date: The day to evaluate on.
        new: The days that may train.
        known: What the model to start from was trained on.
        intake: Types raw days; None: the days in `data` are typed already.
        raw_days: The raw days to look at.
        recipe: What to train.
        schema: Of the log.
        data: The folder of typed days.
        overrides: Settings of the recipe, as words.
        has_warmup: Whether the tower has a warm-up form.
        replicates: Of the bootstrap that compares the models.
        accept: Days that the drift check lets pass.
        drift: Thresholds of a day.
        gate: Thresholds of a candidate.
        launch: How processes are started.
        mlflow: The server to copy the night to, if any.
    """

    store: Store
    date: str
    new: tuple[str, ...]
    known: Known
    intake: Intake | None
    raw_days: tuple[str, ...]
    recipe: str
    schema: Schema
    data: str
    overrides: tuple[str, ...]
    has_warmup: bool
    replicates: int
    accept: tuple[str, ...]
    drift: DriftConfig
    gate: GateConfig
    launch: LaunchConfig
    mlflow: MlflowConfig | None = None

    def stages(self) -> list[Stage]:
        """Return the night's stages."""
        parts = tuple(Path(self.data) / f"dt={day}" for day in (*self.new, self.date))
        shared = {"recipe": self.recipe, "overrides": self.overrides}
        config = {"date": self.date, "new": self.new, "base": self.known.base}
        config |= {"drift": asdict(self.drift), "accept": self.accept}
        gate, comparison = asdict(self.gate), {"replicates": self.replicates}
        stages: list[Stage] = []
        if self.intake is not None:
            stamps = {day: self.intake.stamps(day) for day in self.raw_days}
            made = {"raw": self.intake.raw, "stamps": stamps}
            stages.append(Stage(make=self.partitions, config=made, lost=self.unpartitioned))
        before = tuple(stage.name for stage in stages)
        decided = ("days", "candidate", "evaluation", "verdict")
        last: list[Stage] = []
        if self.mlflow is not None:
            server = {"uri": self.mlflow.public, "model": self.mlflow.model}
            inputs = (*decided, "publication")
            last.append(Stage(make=self.registration, inputs=inputs, config=server))
        return [
            *stages,
            Stage(make=self.days, inputs=before, sources=parts, config=config),
            Stage(make=self.candidate, inputs=("days",), config=shared),
            Stage(make=self.evaluation, inputs=("days", "candidate"), config=comparison),
            Stage(make=self.verdict, inputs=("days", "evaluation"), config=gate),
            Stage(make=self.publication, inputs=decided, lost=self.unpublished),
            *last,
        ]

    def partitions(self, work: Work) -> dict[str, Any]:
        """Take in the raw days that are new or have changed."""
        assert self.intake is not None
        found = self.intake.take(self.raw_days, work.say)
        rows = {one.day: one.rows for one in found}
        # What was new is printed and not kept: the artifact is the days as they are.
        return {"rows": rows, "summary": f"{sum(rows.values()):,} rows of {len(rows)} days"}

    def unpartitioned(self, metrics: Mapping[str, Any]) -> str:
        """Say which typed day is gone."""
        gone = [day for day in metrics["rows"] if not (Path(self.data) / f"dt={day}").is_dir()]
        return f"dt={gone[0]} is gone" if gone else ""

    def days(self, work: Work) -> dict[str, Any]:
        """Choose the good days and check that their files fit the schema, before any training."""
        from trainer.data.files import check_families, discover

        chosen = [*self.new, self.date]
        files = [file for day in chosen for file in discover(self.data, (day, day), self.schema)]
        check_families(files)
        refused = self._refused(chosen)
        for day, reasons in refused.items():
            work.say(f"{day} is left out: {'; '.join(reasons)}")
        for day in self.known.changed(Path(self.data)):
            work.say(
                f"note: {day} was delivered again after the model of {self.known.base}, or one "
                "before it, was trained on it; run that night again to train on what it is now"
            )
        kept = [day for day in self.new if day not in refused]
        if self.date in refused or not kept:
            day = self.date if self.date in refused else [*refused][-1]
            raise RefusedError(
                f"{day}: {'; '.join(refused[day])}; nothing was trained; deliver the day again, or "
                f"pass --accept-days {day}"
            )
        rows = dict.fromkeys([*kept, self.date], 0)
        for file in files:
            if file.day in rows:
                rows[file.day] += file.num_rows
        view = fresh_folder(work.folder / _VIEW)
        for day in rows:
            target = (Path(self.data) / f"dt={day}").resolve()
            (view / f"dt={day}").symlink_to(target, target_is_directory=True)
        write_json(work.folder / "rows.json", rows)
        trained, base = sum(rows[day] for day in kept), self.known.base
        start = f"from the model of {base}" if base else "from nothing"
        left = f", {len(refused)} left out" if refused else ""
        return {
            "new": kept,
            "base": base,
            "rows": rows,
            "trained_rows": trained,
            "skipped": refused,
            "prints": {day: of_path(Path(self.data) / f"dt={day}") for day in kept},
            # Another delivery of it is another evaluation, even if it has as many rows.
            "evaluates": of_path(Path(self.data) / f"dt={self.date}"),
            "summary": f"{trained:,} rows of {len(kept)} days{left}, {start}",
        }

    def _refused(self, chosen: list[str]) -> dict[str, list[str]]:
        known = [path.name.removeprefix("dt=") for path in Path(self.data).glob("dt=*")]
        # A day that no model was trained on may be bad itself: only the days of the
        # base are normal.
        trusted = {*self.known.days, *chosen} if self.known.days else {*known}
        cache = self.store.folder / "statistics"
        reader = DayStatistics(log=Path(self.data), schema=self.schema, cache=cache)
        normal = sorted(trusted & set(known))
        found = refused_days(chosen, normal, reader.read, self.drift)
        return {day: reasons for day, reasons in found.items() if day not in self.accept}

    def candidate(self, work: Work) -> dict[str, Any]:
        """Train on the new days, starting from the base."""
        new = work.metrics["days"]["new"]
        words = [*self.overrides, "--data.path", str(work.inputs["days"] / _VIEW)]
        words += ["--data.test-days", self.date, "--data.train-days", f"{new[0]}:{new[-1]}"]
        if self.known.base:
            path = str(self.store.checkpoint(self.known.base))
            words += ["--inherit.path", path, "--inherit.policy", "nightly"]
            words += ["--model.tower.warmup", "0"] if self.has_warmup else []
        command = self.launch.train(self.recipe, work.folder / RUN, words)
        return train_and_read(self.launch, command, work)

    def evaluation(self, work: Work) -> dict[str, Any]:
        """Let candidate and base predict the same rows of the date."""
        models = [resolve_local(work.inputs["candidate"] / RUN)]
        models += [self.store.checkpoint(self.known.base)] if self.known.base else []
        command = self.launch.compare(models, self.data, self.date, self.replicates)
        answer = self.launch.start(command, work.folder / launch.LOG, work.say, answers=True)
        found = parse_json(answer)
        write_json(work.folder / "comparison.json", found)
        return {**found, "summary": described(found["models"][0])}

    def verdict(self, work: Work) -> dict[str, Any]:
        """Ask the gates."""
        found = work.metrics["evaluation"]
        models = [*found["models"], None]
        gate = GateConfig(**work.config)
        reasons = gate.reasons(models[0], models[1], found.get("differences"))
        notes = gate.notes(models[0], models[1])
        text = "; ".join(reasons) or "every gate is open"
        return {"promote": not reasons, "reasons": reasons, "notes": notes, "summary": text}

    def publication(self, work: Work) -> dict[str, Any]:
        """Keep the candidate where it belongs; move the pointer last."""
        promote, days = work.metrics["verdict"]["promote"], work.metrics["days"]
        found = work.metrics["evaluation"]
        model = {
            "recipe": self.recipe,
            "base": self.known.base,
            "trained_through": max(days["new"][-1], self.known.through),
            "days": days["prints"],
            "skipped": days["skipped"],
            "metrics": found["models"][0],
            "before": [*found["models"], None][1],
            "differences": found.get("differences"),
            "reasons": work.metrics["verdict"]["reasons"],
        }
        checkpoint = resolve_local(work.inputs["candidate"] / RUN)
        with Lock(
            self.store.folder
        ) as lock:  # nights of other dates, and people, move the pointer too
            self.store.keep("models" if promote else "refused", self.date, checkpoint, model)
            # Without a pointer the newest model serves, which another night may have published.
            serving = self.store.serving() or (self.store.before() if promote else "")
            if promote and serving <= self.date:
                serving = self.date
            if promote and serving != self.store.serving():
                with lock.committing():
                    self.store.point(serving, "promoted by its night")
        return {"promoted": promote, "summary": "published" if promote else "refused"}

    def registration(self, work: Work) -> dict[str, Any]:
        """Copy to the MLflow server what it lacks; the files have it already."""
        assert self.mlflow is not None
        again = "run the same command again, which copies to the server and does nothing else"
        return {"summary": mlflow_tracking.synchronize(self.store, self.mlflow, again)}

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
            shown = [_shown(values.get(key)) for key in METRICS]
            rows.append((name, *shown, _shown(values["rows"])))
        print(f"\n{table(('model', *METRICS, 'rows'), rows)}")
        for reason in metrics["verdict"]["reasons"]:
            print(f"refused: {printable(str(reason))}")
        for note in metrics["verdict"].get("notes", ()):  # a verdict of an older version has none
            print(f"note: {printable(str(note))}")
        print(f"{self.store.serving() or 'no model'} serves")
        return DONE if metrics["verdict"]["promote"] else REFUSED


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4f}" if value % 1 else f"{value:,.0f}"

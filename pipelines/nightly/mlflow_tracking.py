# SPDX-License-Identifier: MIT
"""Copy nights and models to an MLflow server, for people who look for them there.

The store's files are the truth. What the server lacks is copied to it after the pointer to the
serving model has moved. If the server is away, a night only prints a message. A later night copies
what is missing, and so does `python -m pipelines.publish DIR --mlflow URI`.

  experiment NAME, run `night DATE`   parameters, metrics, decision and reasons; record.json
  registered model NAME               a version for each model that was published
    its source                        fullrank://HOST/DIR/models/DATE/checkpoint: it stays there
    alias `serving`                   the version that serves, moved last
    tags `withdrawn`, `replaced`      rolled back, why; its date was run again on other data

A night and its version are identified by a fingerprint of what the store keeps, so copying twice
changes nothing. DIR/mlflow/settings.json remembers server and name, so a rollback can name a server
that has not heard of it. Only the command line decides which server is contacted. A user and a
password in the URI are neither kept nor shown (MLFLOW_TRACKING_USERNAME and _PASSWORD do as well).
Requests end after 10 s and are tried three times (MLFLOW_HTTP_REQUEST_TIMEOUT, _MAX_RETRIES).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import re
import socket
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.nightly.model_store import CHECKPOINT, Store
from pipelines.orchestration.fingerprints import of_path, of_values
from pipelines.orchestration.lock import Lock, LockedError
from pipelines.orchestration.stage import StageError
from trainer.runtime.atomic_files import read_json, write_json
from trainer.runtime.credentials import without_credentials

ALIAS, NAME = "serving", "fullrank"
_FOLDER, _SETTINGS = "mlflow", "settings.json"
_PRINT, _STORE = "fullrank.fingerprint", "fullrank.store"
_INSTALL = "python -m pip install --no-deps -r requirements/mlflow.txt"
# Read by MLflow when it is imported. Its telemetry goes to its makers.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    # A busy server may request any delay, which would block the night.
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
_TAG_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """Server that nights are copied to.

    Args:
        uri: address of the server.
        model: name of the experiment and of the registered model.
    """

    uri: str
    model: str = NAME

    def __post_init__(self) -> None:
        """Check the fields, and that the client is there, before a night is trained."""
        parts = urllib.parse.urlsplit(self.uri)
        # A slash in a password ends the host's part too early; a quote or a space ends an address
        # in a text, so that the password behind it would be shown.
        is_cut = "@" in f"{parts.path}{parts.query}{parts.fragment}"
        is_cut = is_cut or re.search(r"[\s'\"<>]", self.uri) is not None
        if parts.scheme not in ("http", "https") or not parts.hostname or is_cut:
            shown = self.uri.rpartition("@")[2]  # what comes before may be secret
            raise ValueError(
                "--mlflow: expected a server's URL such as http://mlflow:5000, with / and other "
                f"signs of a password as %2F and so on, got {shown!r}"
            )
        if not re.fullmatch(r"[^/:.%\"']+", self.model):
            raise ValueError(
                f"--mlflow-model: expected a name without / : . % and quotes, got {self.model!r}"
            )
        if importlib.util.find_spec("mlflow") is None:
            raise ValueError(f"--mlflow: needs MLflow's client; install it with: {_INSTALL}")

    @property
    def public(self) -> str:
        """The URI without user and password."""
        return without_credentials(self.uri)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `from_options` reads."""
    add = parser.add_argument_group("mlflow").add_argument
    add("--mlflow", default="", metavar="URI", help="server to copy nights to (default: none)")
    name = f"of experiment and registered model there (default: {NAME})"
    add("--mlflow-model", default="", metavar="NAME", help=name)


def from_options(options: argparse.Namespace) -> MlflowConfig | None:
    """Return the configuration that the options of `add_options` give.

    Raises:
        ValueError: no server's URL, a name that MLflow does not take, or its client is absent.
    """
    if options.mlflow:
        return MlflowConfig(uri=options.mlflow, model=options.mlflow_model or NAME)
    if options.mlflow_model:
        raise ValueError("--mlflow-model: has no effect without --mlflow")
    return None


def remembered(store: Store) -> str:
    """Return the server and the name that nights of a store were last copied to, as a text."""
    found = _settings(store)
    known = {"uri", "model"} <= found.keys()
    return f"{without_credentials(found['uri'])}, model {found['model']!r}" if known else ""


def synchronize(store: Store, config: MlflowConfig, again: str) -> str:
    """Copy to the server what it lacks of the store; return a summary of what it has now.

    Args:
        again: what to do after a failure, in an imperative.

    Raises:
        StageError: the server does not answer, or refuses; or another process is telling it.
    """
    try:
        with Lock(store.folder / _FOLDER):
            settings = _settings(store)
            settings |= {"uri": config.public, "model": config.model}
            settings.setdefault("store", uuid.uuid4().hex)
            write_json(store.folder / _FOLDER / _SETTINGS, settings)
            return _Server(config, settings["store"]).synchronize(store)
    except LockedError as error:
        raise StageError(f"--mlflow: {error}; then {again}") from None
    except StageError:
        raise
    except Exception as error:  # of whatever library below the client
        message = without_credentials(" ".join(str(error).split()))
        raise StageError(
            f"--mlflow {config.public}: {type(error).__name__}: {message:.600}; the models and "
            f"{store.folder / 'serving.json'} are as they should be; {again}"
        ) from None


class _Server:
    """What a server has under one name: as it was when this object was made, and what is added.

    Raises:
        StageError: the name belongs to the models of another store.
    """

    def __init__(self, config: MlflowConfig, store_id: str) -> None:
        from trainer.runtime.runtime import set_defaults

        set_defaults(_ENVIRONMENT)
        from mlflow import MlflowClient

        self.name, self.store_id = config.model, store_id
        self.client = MlflowClient(config.uri, config.uri)
        experiment = self.client.get_experiment_by_name(config.model)
        self.experiment = (
            experiment.experiment_id if experiment else self.client.create_experiment(config.model)
        )
        self.runs = {run.data.tags.get(_PRINT): run for run in self._pages("search_runs")}
        self.registered = self._registered()
        self.versions = {
            version.tags.get(_PRINT): version for version in self._pages("search_model_versions")
        }

    def synchronize(self, store: Store) -> str:
        """Add runs, versions and tags that are missing, then move the alias."""
        current: dict[str, Any] = {}
        for kind in ("refused", "models"):
            for date, model in store.models(kind).items():
                about = [kind, model["metrics"], model.get("reasons")]
                mark = of_values([*about, of_path(_manifest(store, kind, date))])
                run = self._run(date, mark, kind, model)
                if kind == "models":
                    current[date] = self._version(store, date, mark, run)
                    self._tag(current[date], "withdrawn", store.why_withdrawn(date))
        for version in self.versions.values():
            date = version.tags.get("date", "")
            replaced = date in current and version.version != current[date].version
            self._tag(version, "replaced", "its night was run again" if replaced else "")
        serving = store.serving()
        if serving not in current:
            return f"{len(self.runs)} nights, no model serves"
        version = str(current[serving].version)
        if str(self.registered.aliases.get(ALIAS)) != version:
            self.client.set_registered_model_alias(self.name, ALIAS, version)
        return f"{len(self.runs)} nights; {self.name} version {version} ({serving}) is {ALIAS!r}"

    def _run(self, date: str, mark: str, kind: str, model: Mapping[str, Any]) -> str:
        """Return the run of a night; make it, or finish it, where it is not there as a whole."""
        from mlflow.entities import Metric, Param, RunStatus

        run = self.runs.get(mark)
        if run is None:
            reasons = "; ".join(model.get("reasons", ())) or "every gate is open"
            decision = "promoted" if kind == "models" else "refused"
            tags = {_PRINT: mark, "date": date, "decision": decision}
            tags["reasons"] = reasons[:_TAG_CHARACTERS]
            run = self.client.create_run(self.experiment, tags=tags, run_name=f"night {date}")
            self.runs[mark] = run
        elif run.info.status == RunStatus.to_string(RunStatus.FINISHED):
            return run.info.run_id
        at, days = _milliseconds(date), sorted(model.get("days", ()))
        parameters = {"recipe": model.get("recipe", ""), "date": date, "days": len(days)}
        parameters |= {"base": model.get("base") or "nothing"}
        parameters |= {"first_day": days[0], "last_day": days[-1]} if days else {}
        self.client.log_batch(
            run.info.run_id,
            metrics=[Metric(name, value, at, 0) for name, value in _numbers(model)],
            params=[Param(name, str(value)) for name, value in parameters.items()],
        )
        text = json.dumps({name: model[name] for name in sorted(model)}, indent=1, default=str)
        self.client.log_text(run.info.run_id, text + "\n", "record.json")
        self.client.set_terminated(run.info.run_id)
        return run.info.run_id

    def _version(self, store: Store, date: str, mark: str, run: str) -> Any:
        """Return the version of a published model; register it where it is not there."""
        if mark not in self.versions:
            path = urllib.parse.quote(str(store.checkpoint(date).resolve()))
            self.versions[mark] = self.client.create_model_version(
                self.name,
                f"fullrank://{socket.gethostname()}{path}",
                run_id=run,
                tags={_PRINT: mark, "date": date, "checkpoint": str(store.checkpoint(date))},
                description=f"night {date}",
            )
        return self.versions[mark]

    def _tag(self, version: Any, name: str, text: str) -> None:
        """Let a version have the tag, or not have it if the text is empty."""
        text = text[:_TAG_CHARACTERS]  # a server refuses more
        if version.tags.get(name, "") == text:
            return
        if text:
            self.client.set_model_version_tag(self.name, version.version, name, text)
        else:
            self.client.delete_model_version_tag(self.name, version.version, name)

    def _registered(self) -> Any:
        """Return the registered model, made where there is none."""
        for model in self.client.search_registered_models(f"name = '{self.name}'"):
            owner = model.tags.get(_STORE)
            if owner != self.store_id:
                raise StageError(
                    f"--mlflow: the model {self.name!r} there belongs to "
                    f"{'another folder of nights' if owner else 'something else'}; choose another "
                    "name with --mlflow-model"
                )
            # Only a model that is asked for by name comes with its aliases.
            return self.client.get_registered_model(self.name)
        return self.client.create_registered_model(self.name, tags={_STORE: self.store_id})

    def _pages(self, search: str) -> Iterator[Any]:
        """Yield all that the server has of this name, page by page."""
        token: str | None = None
        while True:
            if search == "search_runs":
                page = self.client.search_runs([self.experiment], page_token=token)
            else:
                page = self.client.search_model_versions(f"name = '{self.name}'", page_token=token)
            yield from page
            token = page.token
            if not token:
                return


def _numbers(model: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of every metric of a night that is a finite number."""
    found = {"candidate": model["metrics"], "serving": model.get("before") or {}}
    moved = {
        name: value.get("difference") if isinstance(value, Mapping) else value
        for name, value in (model.get("differences") or {}).items()
    }
    for part, values in {**found, "difference": moved}.items():
        for name, value in values.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            if number and re.fullmatch(r"[\w\-. /]+", name):
                yield f"{part}.{name}", float(value)


def _manifest(store: Store, kind: str, date: str) -> Path:
    return store.folder / kind / date / CHECKPOINT / "manifest.json"


def _milliseconds(date: str) -> int:
    return int(datetime.datetime.fromisoformat(f"{date}T00:00:00+00:00").timestamp() * 1000)


def _settings(store: Store) -> dict[str, str]:
    try:
        found = read_json(store.folder / _FOLDER / _SETTINGS)
    except (OSError, ValueError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, str)}

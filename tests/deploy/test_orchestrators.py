# SPDX-License-Identifier: MIT
"""Airflow's DAG and Dagster's job: the same two commands in the same order, and what is retried.

Both packages are large, and none of the development packages. Stand-ins show what the files ask of
them; where AIRFLOW_PYTHON or DAGSTER_PYTHON names an interpreter that has the package, the file
runs there for real.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jinja2
import pytest

from pipelines.deliveries import _parser as deliveries_parser
from pipelines.run import _parser as run_parser
from trainer.config.command_line import apply_overrides
from trainer.recipes.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
FILES = {"airflow": "airflow_dags/nightly_dag.py", "dagster": "dagster_jobs/nightly_job.py"}
CALLS = [
    "-m pipelines.deliveries raw --days 2026-01-08 --schema schema.yaml --output data",
    "-m pipelines.run nightly --date 2026-01-08 --recipe dlrm.demo --data data "
    "--output runs/nights -j 1x1 -- --data.schema schema.yaml",
]
RUN = {
    "airflow": """
import datetime, sys
sys.path.insert(0, sys.argv[1])
from airflow.utils.db import initdb
initdb()
from nightly_dag import dag
done = dag.test(logical_date=datetime.datetime(2026, 1, 9, 2, 23, tzinfo=datetime.UTC))
print("ended:", str(done.state) == "success")
""",
    "dagster": """
import sys
sys.path.insert(0, sys.argv[1])
from nightly_job import fullrank_nightly as job
settings = {"resources": {"settings": {"config": {"date": "2026-01-08"}}}}
print("ended:", job.execute_in_process(run_config=settings, raise_on_error=False).success)
""",
}


class FinalError(Exception):
    """What the stand-ins raise for a failure that is not tried again."""

    def __init__(self, text: str, **settings: bool) -> None:
        super().__init__(text)
        assert settings in ({}, {"allow_retries": False})


class AgainError(Exception):
    """What they raise for one that is."""

    def __init__(self, *text: str, **settings: int) -> None:
        super().__init__(*text, settings)


class Thing:
    """Whatever the file makes of the package: it keeps what it was made with."""

    def __init__(self, *words: Any, **settings: Any) -> None:
        self.words, self.settings, self.next = words, settings, []

    def __enter__(self) -> "Thing":
        return self

    def __exit__(self, *error: object) -> None: ...

    def set_downstream(self, other: "Thing") -> None:
        self.next.append(other)


class Hook:
    """Airflow's way to run a command and log what it says."""

    def run_command(self, command: list[str], cwd: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(exit_code=subprocess.run(command, cwd=cwd).returncode)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose python writes down its words and ends with the code in `code`."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*" >> calls\nexit "$(cat code)"\n')
    python.chmod(0o755)
    (tmp_path / "code").write_text("0")
    for file in FILES.values():
        (tmp_path / "deploy" / file).parent.mkdir(parents=True)
        shutil.copy(ROOT / "deploy" / file, tmp_path / "deploy" / file)
    return tmp_path


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines() if (checkout / "calls").exists() else []


def load(checkout: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Execute a file with stand-ins for the package it imports."""
    parts: dict[str, dict[str, Any]] = {
        "airflow": {},
        "airflow.exceptions": {"AirflowException": AgainError, "AirflowFailException": FinalError},
        "airflow.providers.standard.hooks.subprocess": {"SubprocessHook": Hook},
        "airflow.providers.standard.operators.python": {"PythonOperator": Thing},
        "airflow.sdk": {"DAG": Thing},
        "airflow.timetables.trigger": {"CronTriggerTimetable": Thing},
        "dagster": {
            "ConfigurableResource": types.SimpleNamespace,
            "OpExecutionContext": Thing,
            "Failure": FinalError,
            "RetryRequested": AgainError,
            "op": lambda function: function,
            "job": lambda **settings: lambda function: function,
            "ScheduleDefinition": Thing,
            "Definitions": Thing,
        },
    }
    for module, names in parts.items():
        made = types.ModuleType(module)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module, made)
    spec = importlib.util.spec_from_file_location(name, checkout / "deploy" / FILES[name])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_night(checkout: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tasks of a file, in order, as its package would."""
    module = load(checkout, name, monkeypatch)
    if name == "dagster":
        context = types.SimpleNamespace(log=types.SimpleNamespace(info=print))
        settings = module.Night(date="2026-01-08")
        module.night(context, settings, module.ingest(context, settings))
        return
    dag, ingest = module.dag.settings, module.ingest
    values = {"params": types.SimpleNamespace(**{**dag["params"], "date": "2026-01-08"})}

    def render(text: str) -> str:
        return jinja2.Template(text).render(values)

    for task in (ingest, *ingest.next):
        given = task.settings
        words = [render(word) for word in given["op_args"]]
        more = {key: render(word) for key, word in given.get("op_kwargs", {}).items()}
        given["python_callable"](*words, **more)


each = pytest.mark.parametrize("name", list(FILES))


@each
def test_a_night_ingests_the_day_and_then_trains(
    checkout: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_night(checkout, name, monkeypatch)
    assert calls(checkout) == CALLS


@each
@pytest.mark.parametrize(
    ("code", "error"), [(1, AgainError), (2, FinalError), (3, FinalError), (4, AgainError)]
)
def test_only_what_may_help_is_tried_again(
    checkout: Path, name: str, code: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "code").write_text(str(code))
    with pytest.raises(error):
        run_night(checkout, name, monkeypatch)
    assert calls(checkout) == CALLS[:1]


def test_the_commands_are_commands_of_ours() -> None:
    ingestion, night = (call.split()[2:] for call in CALLS)
    assert deliveries_parser().parse_args(ingestion).days == "2026-01-08"
    options = run_parser().parse_args(night)
    assert (options.date, options.overrides) == ("2026-01-08", ["--data.schema", "schema.yaml"])
    assert apply_overrides(load_recipe(options.recipe), ["--epochs", "1"])


@each
@pytest.mark.launch
def test_the_real_package_runs_the_night(checkout: Path, name: str) -> None:
    python = os.environ.get(f"{name.upper()}_PYTHON", "")
    if not python:
        pytest.skip(f"{name.upper()}_PYTHON names no interpreter that has {name}")
    there = {"AIRFLOW_HOME": str(checkout), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    folder = str((checkout / "deploy" / FILES[name]).parent)
    there["AIRFLOW__CORE__DAGS_FOLDER"] = folder
    command = [python, "-c", RUN[name], folder]
    done = subprocess.run(
        command, env={**os.environ, **there}, cwd=checkout, capture_output=True, text=True
    )
    assert "ended: True" in done.stdout, done.stdout + done.stderr
    assert calls(checkout) == CALLS

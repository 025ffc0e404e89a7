# SPDX-License-Identifier: MIT
"""What a real MLflow server knows of nights: runs, versions, the alias; and nights without it."""

import argparse
import http.server
import importlib.util
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import publish, run
from pipelines.nightly import mlflow_tracking
from pipelines.nightly.mlflow_tracking import MlflowConfig
from pipelines.nightly.model_store import Store
from pipelines.orchestration.launch import LaunchConfig
from pipelines.synthesize import SynthesisConfig, synthesize
from pipelines.synthetic.click_model import ClickConfig
from tests.support.mlflow_server import serving
from tests.support.processes import free_port

DAYS = [f"2026-01-0{day}" for day in range(1, 7)]
GOOD = {"auc": 0.7, "gauc": 0.6, "logloss": 0.3, "calibration": 1.1, "rows": 5000.0}
SAME = {"difference": 0.001, "interval": [-0.01, 0.01]}
WORSE = {"difference": -0.02, "interval": [-0.03, -0.01]}
# Stands in for the trainer: a checkpoint that is another one every time.
TRAINER = """
import json, pathlib, sys, uuid
words = sys.argv[1:]
output = pathlib.Path(words[words.index("--output") + 1])
checkpoint = output / "checkpoints/step-1"
checkpoint.mkdir(parents=True)
(checkpoint / "manifest.json").write_text(json.dumps({"id": uuid.uuid4().hex, "files": {}}))
(output / "metrics.json").write_text(json.dumps({"auc": 0.7}))
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder, clicks = tmp_path_factory.mktemp("logs"), ClickConfig(num_users=50, num_items=60)
    synthesize(folder, SynthesisConfig(days=6, rows_per_day=100, clicks=clicks))
    return folder


@pytest.fixture
def night(logs, tmp_path, monkeypatch):
    """Return a function that runs a night and returns its exit code."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # a machine with other work

    def run_night(date, *words, auc=SAME):
        def train(self, recipe, output, overrides):
            started.append("train")
            return [sys.executable, "-c", TRAINER, "--output", str(output)]

        def compare(self, models, data, days, replicates):
            found: dict[str, Any] = {"models": [GOOD, {**GOOD, "auc": 0.65}][: len(models)]}
            if len(models) > 1:
                same = {"auc": auc, "logloss": SAME, "gauc": SAME, "calibration_error": SAME}
                found["differences"] = {**same, "drift": 0.1}
            return [sys.executable, "-c", f"print({json.dumps(found)!r})"]

        monkeypatch.setattr(LaunchConfig, "train", train)
        monkeypatch.setattr(LaunchConfig, "compare", compare)
        started.clear()
        options = ["--recipe", "dlrm.demo", "--data", str(logs), "--output", str(tmp_path / "out")]
        return run.main(["nightly", "--date", date, *options, "--retries", "0", *words])

    started: list[str] = []
    run_night.started = started
    return run_night


def runs(client, name):
    experiment = client.get_experiment_by_name(name)
    found = client.search_runs([experiment.experiment_id])
    return {(one.data.tags["date"], one.data.tags["decision"]): one for one in found}


def versions(client, name):
    return {one.version: one for one in client.search_model_versions(f"name = '{name}'")}


def test_a_server_learns_of_nights_once_and_follows_the_pointer(server, night, tmp_path, capfd):
    from mlflow import MlflowClient

    client, store = MlflowClient(server, server), Store(tmp_path / "out")

    def alias():
        version = client.get_model_version_by_alias("follow", "serving")
        return version.tags["date"]

    words = ["--mlflow", server.replace("//", "//me:secret@"), "--mlflow-model", "follow"]
    assert night(DAYS[2], *words) == run.DONE
    assert night(DAYS[3], *words, auc=WORSE) == run.REFUSED
    assert alias() == DAYS[2], "what was refused is no version"
    assert night(DAYS[4], *words) == run.DONE
    found = runs(client, "follow")
    assert [*sorted(found)] == [
        *[(DAYS[2], "promoted"), (DAYS[3], "refused"), (DAYS[4], "promoted")]
    ]
    told = found[DAYS[4], "promoted"]
    assert told.info.status == "FINISHED" and told.info.run_name == f"night {DAYS[4]}"
    assert told.data.params["recipe"] == "dlrm.demo" and told.data.params["base"] == DAYS[2]
    assert (told.data.params["first_day"], told.data.params["days"]) == (DAYS[2], "2")
    metrics = told.data.metrics
    assert (metrics["candidate.auc"], metrics["serving.auc"]) == (0.7, 0.65)
    assert metrics["difference.auc"] == 0.001 and metrics["difference.drift"] == 0.1
    assert "loss of auc" in found[DAYS[3], "refused"].data.tags["reasons"]
    record = client.download_artifacts(told.info.run_id, "record.json", str(tmp_path))
    assert json.loads(Path(record).read_text())["differences"]["auc"] == SAME
    assert [*versions(client, "follow")] == ["2", "1"]
    newest = versions(client, "follow")["2"]
    assert newest.source.endswith(str(store.checkpoint(DAYS[4])))
    assert newest.source.startswith("fullrank://") and newest.run_id == told.info.run_id
    assert alias() == DAYS[4] == store.serving()
    # Again: nothing. A rollback by hand: the alias follows, if the server is named.
    assert night(DAYS[4], *words) == run.DONE
    ours = [str(tmp_path / "out"), "--mlflow", server, "--mlflow-model", "follow"]
    assert publish.main(ours) == 0
    assert len(runs(client, "follow")) == 3 and len(versions(client, "follow")) == 2
    why = "clicks fell, " * 2000
    assert publish.main([*ours, "--rollback", "--reason", why]) == 0
    assert alias() == DAYS[2] == store.serving()
    assert versions(client, "follow")["2"].tags["withdrawn"].startswith("clicks fell, clicks")
    assert publish.main([*ours, "--serve", DAYS[4]]) == 0
    assert alias() == DAYS[4] and "withdrawn" not in versions(client, "follow")["2"].tags
    # The night made anew is another model: a version of its own, and the old one says so.
    assert night(DAYS[4], *words, "--from", "candidate") == run.DONE
    assert [*versions(client, "follow")] == ["3", "2", "1"]
    assert versions(client, "follow")["2"].tags["replaced"]
    assert client.get_model_version_by_alias("follow", "serving").version == "3"
    written = "".join(
        path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*.json")
    )
    said = capfd.readouterr()
    assert "secret" not in written + said.out + said.err and server in written


def test_a_night_whose_server_is_away_publishes_says_so_and_is_made_up_for(
    server, night, tmp_path, capsys, monkeypatch
):
    from mlflow import MlflowClient

    client, store = MlflowClient(server, server), Store(tmp_path / "out")
    away = ["--mlflow", f"http://me:secret@127.0.0.1:{free_port()}", "--mlflow-model", "away"]
    there = ["--mlflow", server, "--mlflow-model", "away"]
    assert night(DAYS[2], *away) == run.FAILED
    said = capsys.readouterr().err
    assert store.serving() == DAYS[2], "the files are the truth"
    assert "error: registration: --mlflow http://127.0.0.1:" in said and "secret" not in said
    assert f"alert: night {DAYS[2]} failed in" in said
    assert "run the same command again, which copies to the server" in said
    night.started.clear()
    assert night(DAYS[2], *there) == run.DONE
    assert night.started == [], "only the server was told"
    assert [*runs(client, "away")] == [(DAYS[2], "promoted")]
    # A night that could not be told is told by the next one.
    assert night(DAYS[3], *away) == run.FAILED
    assert night(DAYS[4], *there) == run.DONE
    assert sorted(date for date, _ in runs(client, "away")) == DAYS[2:5]
    assert client.get_model_version_by_alias("away", "serving").tags["date"] == DAYS[4]
    # A server that takes calls and answers none does not hold a night up, nor a rollback, which
    # moves the pointer and says how the server learns of it.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = ["--mlflow", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        started = time.monotonic()
        assert night(DAYS[5], *words, "--mlflow-model", "away") == run.FAILED
        capsys.readouterr()
        rollback = [str(tmp_path / "out"), "--rollback", *words, "--mlflow-model", "away"]
        assert publish.main(rollback) == 1
        assert time.monotonic() - started < 60
    assert store.serving() == DAYS[4]
    assert f"run python -m pipelines.publish {tmp_path / 'out'} --mlflow http" in (
        capsys.readouterr().err
    )
    # Another folder of nights does not take the name.
    other = Store(tmp_path / "other")
    with pytest.raises(
        mlflow_tracking.StageError, match="belongs to another folder of nights; choose"
    ):
        mlflow_tracking.synchronize(other, MlflowConfig(uri=server, model="away"), "x")


def test_a_server_that_only_a_folder_names_is_never_contacted(night, tmp_path, capsys):
    for day in DAYS[2:4]:
        assert night(day) == run.DONE
    store = Store(tmp_path / "out")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0.2)
        address = f"http://me:s3cret@127.0.0.1:{silent.getsockname()[1]}"
        settings = {"uri": address, "model": "x\nserving: 2030-01-01"}
        (store.folder / "mlflow").mkdir()
        (store.folder / "mlflow" / "settings.json").write_text(json.dumps(settings))
        assert publish.main([str(store.folder), "--rollback"]) == 0
        with pytest.raises(TimeoutError):
            silent.accept()
    assert store.serving() == DAYS[2]
    said = capsys.readouterr().out
    assert "has not been told: python -m pipelines.publish" in said
    assert "s3cret" not in said and "\nserving: 2030" not in said


class Busy(http.server.BaseHTTPRequestHandler):
    """Asks everyone to come again in an hour."""

    def do_GET(self):
        self.send_response(503)
        self.send_header("Retry-After", "3600")
        self.end_headers()

    def log_message(self, format, *_):
        """Say nothing."""


def test_a_busy_server_does_not_choose_how_long_a_night_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as busy:
        threading.Thread(target=busy.serve_forever, daemon=True).start()
        config = MlflowConfig(uri=f"http://127.0.0.1:{busy.server_port}")
        monkeypatch.setattr("time.sleep", lambda seconds: waits.append(seconds))
        waits: list[float] = []
        with pytest.raises(mlflow_tracking.StageError, match="too many 503 error responses"):
            mlflow_tracking.synchronize(Store(tmp_path), config, "x")
        busy.shutdown()
    assert max(waits, default=0) < 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mlflow", "me:secret@mlflow:5000"], "--mlflow: expected a server's URL such as http"),
        (["--mlflow", "ftp://me:secret@x"], "--mlflow: expected a server's URL such as http"),
        (["--mlflow", "http://me:a/secret@x"], "as %2F and so on, got 'x'"),
        (["--mlflow", "http://me:a'secret@x"], "as %2F and so on, got 'x'"),
        (["--mlflow", "http://me:a secret@x"], "as %2F and so on, got 'x'"),
        (["--mlflow", "http:/me:secret@x"], "as %2F and so on, got 'x'"),
        (["--mlflow-model", "x"], "--mlflow-model: has no effect without --mlflow"),
        (["--mlflow", "http://x", "--mlflow-model", "a/b"], "--mlflow-model: expected a name with"),
    ],
)
def test_options_that_name_no_server_are_refused_before_anything_is_done(
    words, message, night, capsys
):
    assert night(DAYS[2], *words) == run.WRONG
    said = capsys.readouterr().err
    assert message in said and night.started == []
    assert "secret" not in said


def test_a_rollback_with_options_that_are_wrong_moves_nothing(night, tmp_path, capsys):
    for day in DAYS[2:4]:
        assert night(day) == run.DONE
    store, words = Store(tmp_path / "out"), [str(tmp_path / "out"), "--rollback"]
    for more in (["--mlflow-model", "x"], ["--mlflow", "mlflow:5000"]):
        assert publish.main([*words, *more]) == 2
        assert "error: --mlflow" in capsys.readouterr().err
        assert store.serving() == DAYS[3]


def test_without_the_client_a_night_says_how_to_install_it(monkeypatch):
    parser = argparse.ArgumentParser()
    mlflow_tracking.add_options(parser)
    options = parser.parse_args(["--mlflow", "http://mlflow:5000"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install it with: .*--no-deps -r requirements/mlflow"):
        mlflow_tracking.from_options(options)

# SPDX-License-Identifier: MIT
"""A node's exporter answers quickly, ends with its run, and never ends its run."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer.telemetry import exporter as exporter_module
from trainer.telemetry.exporter import ExportConfig, Exporter
from trainer.telemetry.node import Node
from trainer.telemetry.prometheus_metrics import BY_NAME, METRICS, PHASES
from trainer.telemetry.series import Values


def full(rank: int, num_tables: int = 20) -> Values:
    """Values of every metric, and of many tables."""
    made = Values()
    for metric in METRICS:
        if metric.labels == ("phase",):
            for name in PHASES:
                made.set(metric.name, 1.5, name)
        elif metric.labels and metric.labels[0] == "table":
            for table in range(num_tables):
                made.set(metric.name, table, f"table {table}", *("x" for _ in metric.labels[1:]))
        elif metric.name not in ("ranks", "ranks_expected", "rank_skew_seconds"):
            made.set(metric.name, 0.5 + rank, *("x" for _ in metric.labels))
    return made


def a_node(num_ranks: int = 2) -> Node:
    node = Node(0, full(0), num_ranks)
    for rank in range(1, num_ranks):
        node.take(rank, full(rank))
    return node


@contextmanager
def exporting(folder: Path, config: ExportConfig | None = None, node: Node | None = None):
    said: list[str] = []
    node = node or a_node()
    exporter = Exporter(config or ExportConfig(), node, "mine", 0, folder, said.append)
    try:
        yield exporter, said
    finally:
        exporter.close()


def scrape(port: int, address: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[tuple[str, frozenset], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_of_the_list_is_rendered_with_the_run_it_belongs_to(tmp_path):
    with exporting(tmp_path) as (exporter, said):
        found = samples(scrape(exporter.port))
    assert {name for name, _ in found} == {metric.full_name for metric in METRICS}
    for name, labels in found:
        expected = BY_NAME[name.removeprefix("fullrank_")].all_labels
        assert {key for key, _ in labels} == set(expected) and ("run", "mine") in labels
    assert said == [f"metrics: http://127.0.0.1:{exporter.port}/metrics"]


def test_a_scrape_of_eight_ranks_takes_less_than_a_tenth_of_a_second(tmp_path):
    with exporting(tmp_path, node=a_node(8)) as (exporter, _):
        scrape(exporter.port)
        times = []
        for _ in range(5):
            started = time.process_time()  # server and client: both are in this process
            text = scrape(exporter.port)
            times.append(time.process_time() - started)
    mine = [metric for metric in METRICS if metric.scope == "rank"]
    assert text.count('rank="7"') == sum(20 if "table" in metric.labels else 1 for metric in mine)
    assert min(times) < 0.1


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (package prometheus) is absent")
def test_promtool_finds_nothing_to_say_of_the_metrics(tmp_path):
    with exporting(tmp_path) as (exporter, _):
        text = scrape(exporter.port)
    words = ["promtool", "check", "metrics"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_listens_on_loopback_unless_told_otherwise(tmp_path):
    with exporting(tmp_path) as (exporter, _):
        assert exporter._server is not None
        assert exporter._server.server_address[0] == "127.0.0.1"
    with exporting(tmp_path, ExportConfig(address="::1")) as (exporter, said):
        assert scrape(exporter.port, "[::1]") and "[::1]" in said[0]


def test_the_note_for_discovery_goes_with_the_run(tmp_path):
    with exporting(tmp_path) as (exporter, _):
        (note,) = json.loads((tmp_path / "exporter-0.json").read_text("utf-8"))
        assert note == {"targets": [f"127.0.0.1:{exporter.port}"], "labels": {"node": "0"}}
    assert not list(tmp_path.iterdir())
    with exporting(tmp_path, ExportConfig(targets=str(tmp_path / "all" / "targets"))):
        assert [p.name for p in (tmp_path / "all/targets").iterdir()] == ["mine-exporter-0.json"]
    assert not list((tmp_path / "all/targets").iterdir())


def test_a_taken_port_is_said_and_training_goes_on(tmp_path):
    with exporting(tmp_path) as (first, _):
        with exporting(tmp_path / "other", ExportConfig(port=first.port)) as (second, said):
            assert second.port == 0
        assert "training goes on" in said[0] and str(first.port) in said[0]
        assert "--export.port" in said[0]
        assert scrape(first.port)


def test_a_closed_exporter_leaves_its_port(tmp_path):
    with exporting(tmp_path) as (exporter, _):
        port = exporter.port
    with exporting(tmp_path, ExportConfig(port=port)) as (again, _):
        assert again.port == port
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_nothing_listens_that_was_not_asked_for(tmp_path):
    with exporting(tmp_path, ExportConfig(serve=False)) as (exporter, said):
        assert exporter.port == 0 and said == [] and not list(tmp_path.iterdir())


# What the calls to gateways had in their headers.
authorizations: list[str | None] = []


@contextmanager
def gateway():
    """A push gateway that notes what it is told."""
    calls: list[tuple[str, str, bytes]] = []
    authorizations.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            calls.append((self.command, self.path, body))
            authorizations.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        do_DELETE = do_PUT

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", calls
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("keep", [True, False])
def test_the_end_of_a_run_is_pushed_and_kept_or_deleted(tmp_path, keep):
    with gateway() as (url, calls):
        config = ExportConfig(serve=False, push_url=url, push_seconds=600, push_keep=keep)
        with exporting(tmp_path, config) as (_, said):
            pass
    assert [call[0] for call in calls] == ["PUT"] if keep else ["PUT", "DELETE"]
    assert {path for _, path, _ in calls} == {"/metrics/job/fullrank/node/0/run/mine"}
    assert samples(calls[0][2].decode())[("fullrank_ranks", frozenset([("run", "mine")]))] == 2
    assert said == []


def test_user_and_password_of_a_gateway_go_into_a_header(tmp_path):
    with gateway() as (url, calls):
        url = url.replace("http://", "http://me:s%2Fecret@")
        config = ExportConfig(serve=False, push_url=url, push_seconds=600, push_keep=False)
        with exporting(tmp_path, config) as (_, said):
            pass
    assert [call[0] for call in calls] == ["PUT", "DELETE"] and said == []
    assert authorizations == ["Basic " + base64.b64encode(b"me:s/ecret").decode()] * 2


def test_no_message_shows_the_password_of_a_gateway_that_is_away(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}"
        with exporting(tmp_path, ExportConfig(serve=False, push_url=url)) as (_, said):
            pass
    (line,) = said
    assert "training goes on" in line and "secret" not in line and "me:" not in line


def test_it_pushes_while_the_run_goes_on(tmp_path):
    with gateway() as (url, calls):
        config = ExportConfig(serve=False, push_url=url, push_seconds=0.01)
        with exporting(tmp_path, config):
            deadline = time.monotonic() + 10
            while len(calls) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.005)


def test_a_gateway_that_is_away_is_said_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = ExportConfig(serve=False, push_url=url, push_seconds=0.01, push_keep=False)
        with exporting(tmp_path, config) as (_, said):
            time.sleep(0.1)
    assert len(said) == 1 and "training goes on" in said[0] and url in said[0]


def test_a_gateway_that_answers_byte_by_byte_does_not_keep_a_run_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter_module, "_LAST_PUSH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        url = f"http://127.0.0.1:{slow.getsockname()[1]}"
        with exporting(tmp_path, ExportConfig(serve=False, push_url=url, push_seconds=600)):
            began = time.monotonic()
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("settings", [{}, {"serve": False, "push_url": "http://127.0.0.1:9"}])
def test_without_threads_training_goes_on(tmp_path, settings, monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with exporting(tmp_path, ExportConfig(**settings)) as (exporter, said):
            assert exporter.port == 0
    assert said == ["metrics: can't start new thread; training goes on without"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, r"export\.port: expected 0 to 65535, got 70000"),
        ({"address": "localhost"}, r"export\.address: expected an IP address"),
        ({"push_url": "gateway:9091"}, r"export\.push_url: expected a URL"),
        ({"push_url": "http://g:9091", "push_seconds": 0}, r"export\.push_seconds"),
        ({"tables_by_rank": -1}, r"export\.tables_by_rank: expected a number >= 0"),
        ({"serve": False, "tables_by_rank": 9}, r"export\.tables_by_rank: has no effect"),
        ({"serve": False, "port": 9464}, r"export\.port: has no effect without"),
        ({"push_keep": False}, r"export\.push_keep: has no effect without export\.push_url"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ExportConfig(**settings)

# SPDX-License-Identifier: MIT
"""The service answers as its scorer does, within its limits, while models change."""

import http.client
import io
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import uvicorn

from tests.support import runs
from tests.support.processes import free_port
from tests.support.serving import rows_of, trained
from trainer import export
from trainer.serving import Scorer
from trainer.serving.bodies import ARROW, JSON
from trainer.serving.service import Service, ServiceConfig


class Running:
    """A service in a thread of this process, on a free port of the loopback interface."""

    def __init__(self, place, **limits):
        self.service = Service(place, ServiceConfig(**limits))
        self.port = free_port()
        settings = uvicorn.Config(
            self.service.app, host="127.0.0.1", port=self.port, log_level="warning"
        )
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, method, path, body=b"", kind=JSON, connection=None):
        """Return status and content of one request."""
        own = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        own.request(method, path, body, {"Content-Type": kind})
        found = own.getresponse()
        answer = found.status, found.read()
        if connection is None:
            own.close()
        return answer

    def metric(self, line):
        _, text = self.ask("GET", "/metrics")
        values = [one.split()[-1] for one in text.decode().splitlines() if one.startswith(line)]
        return sum(map(float, values))


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=320)


@pytest.fixture(scope="module")
def models(logs, tmp_path_factory):
    """Two exported models."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("first", "0"), ("second", "5")):
        run = trained(folder / name, "dlrm.demo", logs, "--runtime.seed", seed)
        assert export.main([str(run), "--output", str(folder / f"{name}-export")]) == 0
    return folder


@pytest.fixture(scope="module")
def columns(logs, models):
    rows = rows_of(logs)
    return rows.select(Scorer.load(models / "first-export").columns)


@pytest.fixture(scope="module")
def running(models):
    with Running(models / "first-export", body_bytes=200_000, request_rows=300) as found:
        yield found


def as_json(rows):
    return json.dumps({"columns": rows.to_pydict()}).encode()


def as_arrow(rows, compression=None):
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
        stream.write_table(rows)
    return sink.getvalue()


def test_json_and_arrow_get_the_scorers_probabilities(running, models, columns):
    rows = columns.slice(0, 50)
    scorer = Scorer.load(models / "first-export")
    expected = scorer(rows)
    status, content = running.ask("POST", "/score", as_json(rows))
    found = json.loads(content)
    assert (status, found["model"]) == (200, scorer.version)
    status, content = running.ask("POST", "/score", as_arrow(rows), ARROW)
    table = pa.ipc.open_stream(content).read_all()
    assert status == 200 and table.schema.metadata[b"model"].decode() == scorer.version
    for task, values in expected.items():
        np.testing.assert_allclose(found["probabilities"][task], values, atol=1e-6)
        np.testing.assert_allclose(table[task].to_numpy(), values, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b"{", JSON, 400, "body: expected JSON"),
        (b"[" * 100_000, JSON, 400, "nested too deeply"),
        (b'{"columns": {"user_id": 1}}', JSON, 400, 'expected {"columns"'),
        (b'{"columns": {"user_id": [1]}}', JSON, 400, "expected integers"),
        (b"x" * 200_001, JSON, 413, "body: expected at most 200,000 bytes"),
        (b"a", "text/plain", 400, "content-type: expected application/json"),
        (b"garbage", ARROW, 400, "expected an Arrow IPC stream"),
        (lambda rows: as_json(rows.slice(0, 301)), JSON, 413, "rows: expected at most 300"),
        (lambda rows: as_arrow(rows.slice(0, 9), "zstd"), ARROW, 400, "it is compressed"),
        (lambda rows: as_arrow(rows.slice(0, 9), "lz4"), ARROW, 400, "it is compressed"),
        (lambda rows: as_arrow(rows.slice(0, 9))[:-600], ARROW, 400, "Arrow IPC stream"),
    ],
    ids=[
        *("cut", "deep", "scalar", "missing", "large", "type", "garbage"),
        *("rows", "zstd", "lz4", "truncated"),
    ],
)
def test_what_does_not_fit_gets_a_clear_answer(running, columns, body, kind, status, said):
    body = body(columns) if callable(body) else body
    found, content = running.ask("POST", "/score", body, kind)
    assert found == status and said in content.decode(), content
    assert running.ask("GET", "/ready")[0] == 200


def test_one_bad_request_does_not_spoil_those_it_waits_with(running, columns):
    good, bad = columns.slice(0, 5), columns.slice(5, 5)
    price = bad.column_names.index("price")
    bad = bad.set_column(price, "price", pa.array([float("inf")] * 5))
    bodies = [as_arrow(bad if number % 4 == 0 else good) for number in range(24)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: running.ask("POST", "/score", body, ARROW), bodies))
    assert [status for status, _ in found] == [400 if i % 4 == 0 else 200 for i in range(24)]


def test_too_much_that_waits_is_refused_with_429(models, columns):
    body = as_arrow(columns.slice(0, 60))
    with Running(models / "first-export", queue_rows=60) as running:
        scorer, go = running.service.batcher.scorer, threading.Event()

        class Slow:
            version, config = scorer.version, scorer.config

            def __call__(self, rows):
                go.wait(30)
                return scorer(rows)

        running.service.batcher.scorer = Slow()
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(running.ask, "POST", "/score", body, ARROW) for _ in range(6)]
            while sum(one.done() for one in asked) < 4:
                time.sleep(0.01)
            go.set()
            found = sorted(one.result()[0] for one in asked)
        assert found == [200, 200, 429, 429, 429, 429]


def test_models_change_under_load_without_an_error_or_a_mixed_answer(models, columns, tmp_path):
    store = tmp_path / "store"
    days = ["2026-01-01", "2026-01-02"]
    for day, name in zip(days, ("first", "second"), strict=True):
        shutil.copytree(models / f"{name}-export", store / "models" / day / "checkpoint")

    def point(day):
        (store / ".next").write_text(json.dumps({"model": day}))
        (store / ".next").rename(store / "serving.json")

    point(days[0])
    rows = columns.slice(0, 40)
    scorers = [Scorer.load(store / "models" / day / "checkpoint") for day in days]
    expected = {one.version: one(rows)["click"] for one in scorers}
    assert abs(np.subtract(*expected.values())).max() > 1e-4
    body, stop, asked, wrong = as_arrow(rows), threading.Event(), [], []

    def load(running):
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        while not stop.is_set():
            status, content = running.ask("POST", "/score", body, ARROW, connection)
            table = pa.ipc.open_stream(content).read_all() if status == 200 else None
            asked.append(status)
            version = table.schema.metadata[b"model"].decode() if table else ""
            gap = abs(table["click"].to_numpy() - expected[version]).max() if table else 1.0
            if gap > 1e-6:
                wrong.append((status, version, gap))
        connection.close()

    with Running(store, follow_seconds=0.02) as running:
        clients = [threading.Thread(target=load, args=(running,)) for _ in range(3)]
        for client in clients:
            client.start()
        for swap in range(1, 6):
            point(days[swap % 2])
            while running.metric('fullrank_serve_swaps_total{result="done"}') < swap:
                time.sleep(0.02)
        point("2026-09-09")  # a model that is not there
        while not running.metric('fullrank_serve_swaps_total{result="refused"}'):
            time.sleep(0.02)
        stop.set()
        for client in clients:
            client.join()
        assert not wrong and set(asked) == {200}
        assert running.metric('fullrank_serve_requests_total{code="200"}') == len(asked)
        assert running.metric("fullrank_serve_rows_total") == 40 * len(asked)


def test_a_stop_answers_what_was_taken(models, columns):
    body = as_arrow(columns.slice(0, 200))
    with Running(models / "first-export") as running, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(running.ask, "POST", "/score", body, ARROW) for _ in range(8)]
        while running.metric("fullrank_serve_requests_total") < 1:
            time.sleep(0.005)
        running.server.should_exit = True
        answers = [one.exception() or one.result()[0] for one in asked]
    assert all(one == 200 or isinstance(one, ConnectionError) for one in answers), answers

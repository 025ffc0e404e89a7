# SPDX-License-Identifier: MIT
"""No client of the metrics server can take from training what it needs."""

import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from trainer.telemetry import metrics_server
from trainer.telemetry.metrics_server import MAX_CONNECTIONS, MetricsServer

ROOT = Path(__file__).resolve().parents[3]
FILES = 96
# A process with few file descriptors, whose "training" opens a file whenever it is asked to.
CHILD = f"""
import json, resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from prometheus_client import CollectorRegistry, Gauge
from trainer.telemetry.metrics_server import MetricsServer
registry = CollectorRegistry()
Gauge("steps", "Steps.", registry=registry).set(7)
server = MetricsServer("127.0.0.1", 0, registry)
server.start()
print(server.server_address[1], flush=True)
hoard = []
for line in sys.stdin:
    if line == "hoard\\n":
        try:
            while True:
                hoard.append(open("/dev/null"))
        except OSError:
            found = len(hoard)
    elif line == "free\\n":
        while hoard:
            hoard.pop().close()
        found = 0
    else:
        try:
            files = [open("/dev/null") for _ in range(8)]
            [file.close() for file in files]
            opened = len(files)
        except OSError as error:
            opened = str(error)
        found = [opened, threading.active_count(), time.process_time()]
    print(json.dumps(found), flush=True)
server.stop()
print("ended", flush=True)
"""


class Child:
    """The process, and questions to it."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", CHILD]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, word: str):
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return json.loads(self.line())


@pytest.fixture
def child():
    found = Child()
    yield found
    rest, _ = found.process.communicate("", timeout=60)
    assert rest == "ended\n" and found.process.returncode == 0


@contextlib.contextmanager
def serving():
    registry = CollectorRegistry()
    Gauge("steps", "Steps.", registry=registry).set(7)
    server = MetricsServer("127.0.0.1", 0, registry)
    server.start()
    try:
        yield server.server_address[1]
    finally:
        server.stop()


def scrape(port: int) -> bool:
    address = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(address, timeout=20) as answer:
        return "steps 7.0" in answer.read().decode()


def scrape_soon(port: int) -> bool:
    """Scrape; again where a flood of connections has just come before."""
    for _ in range(200):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return scrape(port)
        time.sleep(0.05)
    return False


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: "])
def test_idle_connections_leave_training_its_files_and_a_scrape_its_answer(child, sent):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * FILES)), hard))
    with contextlib.ExitStack() as clients:
        for _ in range(2 * FILES):
            client = clients.enter_context(connect(child.port))
            with contextlib.suppress(OSError):  # closed already
                client.sendall(sent)
        opened, threads, _ = child.ask("open")
        assert opened == 8
        assert threads <= 2 * MAX_CONNECTIONS + 2
        assert scrape_soon(child.port)
        assert scrape(child.port), "what is idle keeps nobody out"
        assert child.ask("open")[0] == 8


def test_without_a_file_descriptor_left_the_server_waits_and_answers_later(child):
    assert child.ask("hoard") > FILES // 2
    with connect(child.port), connect(child.port):
        before = child.ask("open")[2]
        time.sleep(0.6)
        opened, _, after = child.ask("open")
        assert "Too many open files" in opened
        assert after - before < 0.3, "it waits without using the processor"
        assert child.ask("free") == 0
        assert scrape_soon(child.port)


def test_a_slow_client_is_hung_up_on_after_a_while(monkeypatch):
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.3)
    with serving() as port, connect(port) as client:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 20:  # a byte now and then keeps no connection open
                client.sendall(b"G")
                client.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if not client.recv(1):
                        break
        assert 0.2 < time.monotonic() - began < 15


def test_without_threads_a_connection_is_closed_and_the_server_lives(monkeypatch):
    with serving() as port:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if "process_request" in thread.name:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with connect(port) as client:
                assert client.recv(1) == b""
        assert scrape(port)


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\xfc" * 9,
        b"A" * 70_000,
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /metrics?name[]=%00%ff&name[]= HTTP/9.9\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    ],
)
def test_what_is_no_request_leaves_the_server_as_it_was(sent, capfd):
    with serving() as port:
        with connect(port) as client, contextlib.suppress(OSError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
        assert scrape(port)
    assert "Traceback" not in capfd.readouterr().err


def test_stopping_does_not_wait_for_clients():
    with contextlib.ExitStack() as clients:
        with serving() as port:
            for _ in range(4):
                clients.enter_context(connect(port))
            assert scrape(port)
            began = time.monotonic()
        assert time.monotonic() - began < 5

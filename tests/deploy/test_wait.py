# SPDX-License-Identifier: MIT
"""Waiting for node 0: a name that resolves late, a port that opens late, and neither ever."""

import socket
from collections.abc import Iterator

import pytest

from deploy import wait
from deploy.components import free_port


class Cluster:
    """A clock, and a name server that knows `node-0` from some second on."""

    def __init__(self, knows_after: float) -> None:
        self.now, self.pauses, self.knows_after = 1000.0, list[float](), 1000.0 + knows_after
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.resolve = socket.getaddrinfo

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def getaddrinfo(self, host: str, *others: object, **more: object) -> object:
        if host == "node-0" and self.now < self.knows_after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.resolve("127.0.0.1" if host == "node-0" else host, *others, **more)  # type: ignore[arg-type]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(request.param)
    monkeypatch.setattr(wait.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(wait.time, "sleep", made.sleep)
    monkeypatch.setattr(wait.socket, "getaddrinfo", made.getaddrinfo)
    yield made
    made.listener.close()


@pytest.mark.parametrize("cluster", [100.0], indirect=True)
def test_a_name_that_resolves_late_is_waited_for_more_and_more_rarely(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait.main(["node-0", str(cluster.port), "--seconds", "600"]) == 0
    assert cluster.pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(cluster.pauses)
    assert lines[2] == (
        f"node 0 does not answer yet at node-0:{cluster.port}: the name node-0 does not resolve "
        "(Name or service not known); waited 3 of 600 s, looking again in 4 s"
    )


@pytest.mark.parametrize("cluster", [float("inf")], indirect=True)
def test_a_name_that_never_resolves_ends_with_host_seconds_and_the_way_out(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait.main(["node-0", str(cluster.port), "--seconds", "45"]) == 1
    assert sum(cluster.pauses) == 45
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        f"error: node 0 did not answer at node-0:{cluster.port} within 45 s: the name node-0 does "
        "not resolve"
    )
    assert "DNS" in last and "--patience N waits longer" in last


@pytest.mark.parametrize("cluster", [0.0], indirect=True)
def test_a_port_that_does_not_answer_is_told_from_a_name_that_does_not_resolve(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait.main(["node-0", str(free_port()), "--seconds", "3"]) == 1
    assert "the name resolves, the port does not answer (Connection refused)" in (
        capsys.readouterr().err
    )


def test_a_scheduler_that_says_no_host_is_an_error_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert wait.main(["", "29500"]) == 2
    assert "did not say which host node 0 is on" in capsys.readouterr().err


def test_the_store_of_torchrun_outlives_being_looked_at() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(3):
        assert not wait.why_not("127.0.0.1", store.port)
    TCPStore("127.0.0.1", store.port, wait_for_workers=False).set("key", "value")
    assert store.get("key") == b"value"

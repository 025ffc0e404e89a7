# SPDX-License-Identifier: MIT
"""The metrics of one node's ranks: each rank sends its values to the first, which merges them.

Ranks connect to the first rank of their node through a Unix socket. Only this user can reach the
socket, and its name is removed once all ranks have connected. So no file can become stale. A rank
that dies closes its connection, and its own series end at once. What it had counted stays in the
node's sums, which never fall while the process lives.

A snapshot is a line of JSON with all values, never a pickle. Unknown series are ignored. A rank
never waits: it skips a snapshot that the socket cannot take, and the next one replaces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.runtime.runtime import Runtime
from trainer.telemetry.prometheus_metrics import BY_NAME, Metric
from trainer.telemetry.series import Key, Values

# Bytes of the name of a socket (the system takes 108), and of a snapshot.
_NAME_BYTES = 108
_LINE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_PAUSE_SECONDS = 0.2


class Node:
    """The latest values of a node's ranks, and the sums of what they have counted."""

    def __init__(self, rank: int, own: Values, num_ranks: int) -> None:
        """Begin with this process's own values.

        Args:
            rank: of this process, the first of the node.
            own: its values, read at every scrape.
            num_ranks: of the node, when it started.
        """
        self.rank, self.own, self.num_ranks = rank, own, num_ranks
        self._ranks: dict[int, Values] = {rank: own}
        self._counted: dict[int, dict[Key, float]] = {}
        self._sums: dict[Key, float] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, values: Values) -> None:
        """Replace a rank's values by its latest ones."""
        with self._lock:
            self._ranks[rank] = values
            self._add(rank, values)

    def gone(self, rank: int) -> None:
        """Remove a rank that has died; its counts stay in the sums."""
        with self._lock:
            self._ranks.pop(rank, None)
            self._counted.pop(rank, None)

    def samples(self) -> Iterator[tuple[Metric, dict[str, str], float]]:
        """Yield the series of this node: metric, labels and value."""
        with self._lock:
            self._add(self.rank, self.own)
            ranks, sums = dict(self._ranks), dict(self._sums)
        for (name, labels), value in sums.items():
            metric = BY_NAME[name]
            yield metric, dict(zip(metric.labels, labels, strict=True)), value
        skew: list[float] = []
        for rank, values in sorted(ranks.items()):
            for (name, labels), value in values.items():
                metric = BY_NAME[name]
                named = dict(zip(metric.labels, labels, strict=True))
                if metric.scope == "rank":
                    yield metric, {"rank": str(rank), **named}, value
                elif rank == self.rank and (metric.scope == "run" or metric.kind == "gauge"):
                    yield metric, named, value
            skew += [v for v in (values.get("rank_own_seconds"),) if v is not None]
        yield BY_NAME["ranks"], {}, float(len(ranks))
        yield BY_NAME["ranks_expected"], {}, float(self.num_ranks)
        if skew:
            yield BY_NAME["rank_skew_seconds"], {}, max(skew) - min(skew)

    def _add(self, rank: int, values: Values) -> None:
        """Add what a rank has counted since its last snapshot."""
        before = self._counted.setdefault(rank, {})
        for key, value in values.items():
            metric = BY_NAME[key[0]]
            if metric.kind == "counter" and metric.scope == "node":
                grown = value - before.get(key, 0.0)
                self._sums[key] = self._sums.get(key, 0.0) + (grown if grown >= 0 else value)
                before[key] = value


class Listener:
    """Receives the snapshots of a node's other ranks; runs on the first rank.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._folder = _short_folder()
        self.path = str(self._folder / "ranks")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(self.path)) >= _NAME_BYTES:
                raise OSError(f"{self.path}: longer than a socket's name may be; shorten TMPDIR")
            self._server.bind(self.path)
            self._server.listen(node.num_ranks)
        except OSError:
            self._free()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop receiving. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _listen(self) -> None:
        """Read snapshots until the listener is closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            connections: dict[int, _Connection] = {}
            missing = self._node.num_ranks - 1
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    break
                for connection in ready:
                    assert isinstance(connection, socket.socket)
                    if connection is self._server:
                        try:
                            accepted, _ = self._server.accept()
                        except OSError:  # no file descriptor is left; the rank waits in the queue
                            time.sleep(_PAUSE_SECONDS)
                            continue
                        accepted.setblocking(False)
                        selector.register(accepted, selectors.EVENT_READ)
                        connections[accepted.fileno()] = _Connection(accepted, self._node)
                        missing -= 1
                        if not missing:
                            selector.unregister(self._server)
                            self._free()
                    elif not connections[connection.fileno()].read():
                        selector.unregister(connection)
                        connections.pop(connection.fileno()).connection.close()
            for one in connections.values():
                one.connection.close()
        self._free()
        self._wake.close()
        self._woken.close()

    def _free(self) -> None:
        """Accept no more ranks and remove the socket's name."""
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _short_folder() -> Path:
    """Return a new folder of this user alone, in /tmp if TMPDIR is too long for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="fullrank-"))
    if len(os.fsencode(folder / "ranks")) >= _NAME_BYTES and os.access("/tmp", os.W_OK):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="fullrank-", dir="/tmp"))
    return folder


class _Connection:
    """The connection of one rank."""

    def __init__(self, connection: socket.socket, node: Node) -> None:
        self.connection, self._node = connection, node
        self._rank: int | None = None
        self._text = b""

    def read(self) -> bool:
        """Read what has arrived; return whether the connection stays open."""
        try:
            part = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            part = b""
        self._text += part
        *lines, self._text = self._text.split(b"\n")
        if lines:
            self._note(lines[-1])  # the latest replaces those before
        if part and len(self._text) < _LINE_BYTES:
            return True
        if self._rank is not None:
            self._node.gone(self._rank)
        return False

    def _note(self, line: bytes) -> None:
        """Take a snapshot; ignore a line that is none."""
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict) and isinstance(content.get("rank"), int):
                values = Values()
                values.replace(content.get("values"))
                self._rank = content["rank"]
                self._node.take(content["rank"], values)


class Sender:
    """Sends a rank's values to the first rank of its node, without ever waiting.

    Raises:
        OSError: nobody listens at `path`.
    """

    def __init__(self, path: str, rank: int, values: Values) -> None:
        self._rank, self._values = rank, values
        self._pending = b""
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def send(self) -> None:
        """Send the values as they are now, unless the last ones are still on their way."""
        if self._socket is None:
            return
        try:
            if not self._pending:
                content = {"rank": self._rank, "values": self._values.plain()}
                self._pending = json.dumps(content).encode() + b"\n"
            self._pending = self._pending[self._socket.send(self._pending) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()  # the first rank has died, and with it the exporter

    def close(self) -> None:
        """Leave the node: this rank's series end. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def meet(runtime: Runtime, path: str) -> str:
    """Return the name of the socket of this node's first rank, '' if it has none. Collective.

    Args:
        runtime: This process among the others.
        path: This rank's own socket, '' for none.
    """
    own = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    name = torch.frombuffer(bytearray(os.fsencode(path)), dtype=torch.uint8) if path else own[:0]
    own[: len(name)] = name
    names = [torch.zeros_like(own) for _ in range(runtime.world_size)]
    dist.all_gather(names, own, group=runtime.group)
    # A launcher numbers the ranks of a node one after the other.
    return os.fsdecode(bytes(names[runtime.rank - runtime.local_rank].tolist()).rstrip(b"\0"))

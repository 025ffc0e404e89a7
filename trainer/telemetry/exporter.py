# SPDX-License-Identifier: MIT
"""Prometheus metrics of a node: one HTTP exporter on its first rank, and a push at the end of jobs.

Nothing that happens here ends a run. A port that is taken or a gateway that does not answer is
reported once, and training goes on. The server (`metrics_server.py`) bounds what clients can use.
The exporter listens on loopback by default. It writes its address into a file for Prometheus' file
discovery (`file_sd_configs`) and removes the file when the run ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from prometheus_client import CollectorRegistry, delete_from_gateway, push_to_gateway
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import basic_auth_handler, default_handler
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from trainer.runtime.atomic_files import write_json
from trainer.runtime.credentials import without_credentials
from trainer.telemetry.metrics_server import MetricsServer
from trainer.telemetry.node import Node
from trainer.telemetry.prometheus_metrics import Metric

_PUSH_TIMEOUT_SECONDS = 5.0
# A gateway that answers byte by byte defeats the time-out; the end of a run does not wait for it.
_LAST_PUSH_SECONDS = 20.0
_JOB = "fullrank"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What a run exports to Prometheus, TensorBoard and callbacks.

    Attributes:
        serve: Whether each node has an HTTP exporter.
        address: The IP address where it listens; 0.0.0.0 for all networks.
        port: Where it listens; 0 takes a free port. Several runs on one machine need 0 or a port
            each.
        targets: A folder for files with the exporters' addresses, as Prometheus' file discovery
            reads them; empty: the run's folder.
        push_url: A push gateway, for jobs that end before they are scraped; empty: none.
        push_seconds: Seconds between two pushes. The end of the run is pushed, too.
        push_keep: Whether the gateway keeps the last push after the run.
        tables_by_rank: The most tables of a run whose metrics are exported by rank, too. A run of
            more tables would have too many series. 0: never by rank.
        tensorboard: Whether to write event files into DIR/tensorboard (needs the package
            tensorboard).
        callbacks: Classes of your own that receive what the run reports, as package.module:Class
            (`trainer/telemetry/callbacks.py`). They are imported on every rank and live on rank 0.
    """

    serve: bool = True
    address: str = "127.0.0.1"
    port: int = 0
    targets: str = ""
    push_url: str = ""
    push_seconds: float = 15.0
    push_keep: bool = True
    tables_by_rank: int = 64
    tensorboard: bool = False
    callbacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"export.port: expected 0 to 65535, got {self.port}")
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise ValueError(
                "export.address: expected an IP address (127.0.0.1, 0.0.0.0, ::1), got "
                f"{self.address!r}"
            ) from None
        if self.push_url and urlsplit(self.push_url).scheme not in ("http", "https"):
            raise ValueError(
                "export.push_url: expected a URL such as http://gateway:9091, got "
                f"{self.push_url!r}"
            )
        if not (math.isfinite(self.push_seconds) and self.push_seconds > 0):
            raise ValueError(f"export.push_seconds: expected a number > 0, got {self.push_seconds}")
        if self.tables_by_rank < 0:
            raise ValueError(
                f"export.tables_by_rank: expected a number >= 0, got {self.tables_by_rank}"
            )
        needs = {
            "address": ("serve", self.serve),
            "port": ("serve", self.serve),
            "targets": ("serve", self.serve),
            "push_seconds": ("push_url", bool(self.push_url)),
            "push_keep": ("push_url", bool(self.push_url)),
            "tables_by_rank": ("serve", self.exports),
        }
        for name, (other, present) in needs.items():
            if not present and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"export.{name}: has no effect without export.{other}, got "
                    f"{getattr(self, name)!r}; remove it, or set export.{other}"
                )

    @property
    def exports(self) -> bool:
        """Whether anything goes to Prometheus."""
        return self.serve or bool(self.push_url)


class Exporter:
    """Shows a node's metrics over HTTP, pushes them to a gateway, or both.

    Attributes:
        port: where it listens; 0 if it does not.
    """

    def __init__(
        self,
        config: ExportConfig,
        node: Node,
        run: str,
        number: int,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        """Start to listen and to push, as far as that is possible.

        Args:
            config: what to show, and where.
            node: the values of the node's ranks.
            run: the run's name, a label of every series.
            number: of this node.
            folder: of the run.
            say: takes lines for the log.
        """
        self.config, self.port = config, 0
        self._say, self._key = say, {"run": run, "node": str(number)}
        self.registry = CollectorRegistry()
        self.registry.register(NodeCollector(node, run))
        self._server: MetricsServer | None = None
        self._note = (Path(config.targets) if config.targets else folder) / (
            f"{run}-exporter-{number}.json" if config.targets else f"exporter-{number}.json"
        )
        self._end = threading.Event()
        self._pushes: threading.Thread | None = None
        self._push_failed = False
        self._gateway, self._send = _address(config.push_url)
        try:
            if config.serve:
                self._serve()
            if config.push_url:
                self._pushes = threading.Thread(target=self._push_until_end, daemon=True)
                self._pushes.name = "push"
                self._pushes.start()
        except RuntimeError as error:  # the system gives no more threads
            self._pushes = None
            self._say(f"metrics: {error}; training goes on without")

    def close(self) -> None:
        """Push for the last time, stop listening, remove the note. Safe to call twice."""
        self._end.set()
        if self._pushes is not None:
            self._pushes.join(_LAST_PUSH_SECONDS)
            self._pushes = None
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._note.unlink(missing_ok=True)  # first, so that no scrape misses an answer
            self._server.stop()
            self._server = None

    def _serve(self) -> None:
        """Start to listen and write a note of the address, or report why not."""
        config = self.config
        try:
            server = MetricsServer(config.address, config.port, self.registry)
        except OSError as error:
            self._say(
                f"metrics: cannot listen on {config.address}:{config.port} ({error}), training "
                "goes on without; give each run of a machine a port of its own "
                "(--export.port, 0 takes a free one), or --export.no-serve"
            )
            return
        server.start()
        self._server = server
        self.port = server.server_address[1]
        everywhere = ipaddress.ip_address(config.address).is_unspecified
        host = socket.gethostname() if everywhere else config.address
        host = f"[{host}]" if ":" in host else host
        self._say(f"metrics: http://{host}:{self.port}/metrics")
        labels = {"node": self._key["node"]}
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._note, [{"targets": [f"{host}:{self.port}"], "labels": labels}])
        except OSError as error:
            self._say(f"metrics: {self._note} cannot be written ({error})")

    def _push_until_end(self) -> None:
        """Push every few seconds until the run ends, and then for the last time."""
        while not self._end.wait(self.config.push_seconds):
            self._push()
        self._push()
        if not self.config.push_keep:
            self._attempt(
                lambda: delete_from_gateway(
                    self._gateway, _JOB, self._key, _PUSH_TIMEOUT_SECONDS, self._send
                )
            )

    def _push(self) -> None:
        self._attempt(
            lambda: push_to_gateway(
                self._gateway, _JOB, self.registry, self._key, _PUSH_TIMEOUT_SECONDS, self._send
            )
        )

    def _attempt(self, call: Callable[[], None]) -> None:
        """Send to the gateway; report once that it does not answer."""
        try:
            call()
            self._push_failed = False
        except Exception as error:  # of any network; training goes on
            if not self._push_failed:
                gateway = without_credentials(self._gateway)
                self._say(
                    f"metrics: {gateway} does not take them ({error}), training goes on; check "
                    "--export.push-url"
                )
            self._push_failed = True


class NodeCollector(Collector):
    """A node's series as prometheus_client renders them, made anew at every scrape."""

    def __init__(self, node: Node, run: str) -> None:
        self._node, self._run = node, run

    def collect(self) -> Iterator[Family]:
        """Yield a family per metric that has series."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric, labels, value in self._node.samples():
            if metric.name not in families:
                families[metric.name] = _family(metric)
            families[metric.name].add_metric(
                [{"run": self._run, **labels}[name] for name in metric.all_labels], value
            )
        yield from families.values()


def _address(url: str) -> tuple[str, Callable[..., Any]]:
    """Return a gateway's URL without user and password, and a handler that sends those in a header.

    urllib takes them for a part of the host's name, and shows them in its error.
    """
    parts = urlsplit(url)
    if parts.username is None:
        return url, default_handler
    user, password = unquote(parts.username), unquote(parts.password or "")

    def send(url: str, method: str, timeout: Any, headers: Any, data: bytes) -> Callable[[], None]:
        return basic_auth_handler(url, method, timeout, headers, data, user, password)

    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), send


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.full_name, metric.help, labels=metric.all_labels)

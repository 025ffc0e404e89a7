# SPDX-License-Identifier: MIT
"""The HTTP server of the exporter: few connections, none for long.

The server shares file descriptors and threads with training, so clients must not be able to use
them up. At most 16 connections are open. One more closes the oldest, so that idle connections never
keep a scrape out. A connection lasts ten seconds at most, however slowly its client reads or
writes. If the process has no file descriptor left, the server waits instead of failing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

MAX_CONNECTIONS = 16
CONNECTION_SECONDS = 10.0
_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 0.2


class MetricsServer(ThreadingHTTPServer):
    """Answers scrapes, each in a thread of its own.

    Raises:
        OSError: the address or port cannot be used.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        """Listen.

        Args:
            address: an IP address of this machine.
            port: 0 for a free one.
            registry: what a scrape shows.
        """
        if ipaddress.ip_address(address).version == 6:
            self.address_family = socket.AF_INET6
        # When each open connection was accepted, the oldest first; and those that were hung up on,
        # until their threads have closed them.
        self._open: dict[socket.socket, float] = {}
        self._closing: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        handler = MetricsHandler.factory(registry)
        handler.timeout = CONNECTION_SECONDS  # of one read or write
        super().__init__((address, port), handler)

    def start(self) -> None:
        """Serve in a thread until `stop`.

        Raises:
            RuntimeError: the system gives no more threads; then the server is closed.
        """
        thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.server_close()
            raise
        self._thread = thread

    def stop(self) -> None:
        """Stop listening and close every connection."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()
        with self._lock:
            for connection in list(self._open):
                self._hang_up(connection)

    def _serve(self) -> None:
        self.serve_forever(_POLL_SECONDS)

    def server_bind(self) -> None:
        """Bind, without asking the name service for this machine's name as HTTPServer does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection.

        Raises:
            OSError: there is none, or the process has no file descriptor left. The caller tries
                again, and must not do so without a pause.
        """
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, and make room for it; close the connection if there is none."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                self._hang_up(next(iter(self._open)))
            # The thread of that one takes a moment to end. Connections that come faster are closed.
            room = len(self._closing) < MAX_CONNECTIONS
            if room:
                self._open[request] = time.monotonic()
        try:
            if room:
                super().process_request(request, client_address)
                return
        except RuntimeError:  # the system gives no more threads
            pass
        self.shutdown_request(request)

    def service_actions(self) -> None:
        """Close what has been open for too long. Called several times a second."""
        oldest = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            for connection, since in list(self._open.items()):
                if since < oldest:
                    self._hang_up(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whether its thread has ended or could not begin."""
        with self._lock:
            self._open.pop(request, None)
            self._closing.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the trace of a fault of ours; a client that hung up or was too slow is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _hang_up(self, connection: socket.socket) -> None:
        """End a connection under its thread, which then closes it."""
        del self._open[connection]
        self._closing.add(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

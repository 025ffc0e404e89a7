# SPDX-License-Identifier: MIT
"""An S3 server on this machine, for tests of checkpoints in an object store."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

BUCKET = "s3://bucket"


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Serve an empty bucket; yield the environment in which a client finds it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    S3FileSystem.clear_instance_cache()  # a client of a server before this one knows its port alone
    try:
        host, port = server.get_host_and_port()
        yield {
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
    finally:
        server.stop()

# SPDX-License-Identifier: MIT
"""Wait until node 0 of a job answers: python -m deploy.wait HOST PORT [--seconds S].

On a cluster the nodes of a job do not start at once: node 0 may still pull its image while the
others run, and until it has an address its name does not resolve. torchrun gives up after a minute
of that. So every other node looks first, more and more rarely, and says what it waits for.

Exit codes: 0 node 0 answers; 1 it did not in time; 2 there is no telling where it is.
"""

import argparse
import socket
import sys
import time
from collections.abc import Sequence

LONGEST_PAUSE_SECONDS = 30.0
CONNECT_SECONDS = 5.0


def wait(host: str, port: int, seconds: float) -> None:
    """Return as soon as `host` accepts a connection on `port`.

    Raises:
        ValueError: no host is given.
        TimeoutError: it did not accept one within `seconds`.
    """
    if not host:
        raise ValueError(
            "the scheduler did not say which host node 0 is on; name it with torchrun's "
            "--rdzv-endpoint HOST:PORT on every node"
        )
    began, pause = time.monotonic(), 1.0
    while reason := why_not(host, port):
        waited = time.monotonic() - began
        if waited >= seconds:
            raise TimeoutError(
                f"node 0 did not answer at {host}:{port} within {waited:.0f} s: {reason}. Expected "
                "it to run by now: look at its state and its log, at the cluster's DNS where the "
                "name does not resolve, and at firewalls where it does; --patience N waits longer"
            )
        pause = min(pause, seconds - waited)
        print(
            f"node 0 does not answer yet at {host}:{port}: {reason}; waited {waited:.0f} of "
            f"{seconds:.0f} s, looking again in {pause:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def why_not(host: str, port: int) -> str:
    """Return why `host` accepts no connection on `port`, or nothing if it does."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            return ""
    except socket.gaierror as error:
        return f"the name {host} does not resolve ({error.strerror})"
    except OSError as error:
        return f"the name resolves, the port does not answer ({error.strerror or error})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, wait, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.wait", description=__doc__)
    parser.add_argument("host", help="of node 0")
    parser.add_argument("port", type=int, help="of the rendezvous")
    parser.add_argument("--seconds", type=float, default=600.0, help="to wait (default: 600)")
    options = parser.parse_args(arguments)
    try:
        wait(options.host, options.port, options.seconds)
    except (ValueError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

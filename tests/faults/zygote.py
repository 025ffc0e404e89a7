# SPDX-License-Identifier: MIT
"""Processes that start in milliseconds: python -m tests.faults.zygote, spoken to in lines of JSON.

Importing the trainer costs seconds, and a harness that kills processes needs hundreds of them. So
one process imports it once, starts no thread, and forks. It answers each line with one line:

  {"module": M, "function": F, "arguments": [...], "environment": {...}, "log": PATH} -> {"pid": P}
  {"wait": P, "seconds": S} -> {"code": exit code, negative for a signal, or null: it still runs}
  {"import": M} -> {"code": 0}: the module's seconds are spent once, for all forks to come
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any


def run(request: dict[str, Any]) -> int:
    """Be the forked process; return its exit code."""
    out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(request["environment"])
    os.chdir(request.get("cwd", "."))
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
        return int(function(*request["arguments"]) or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def wait(pid: int, seconds: float) -> int | None:
    """Return the exit code of a child, or None if it runs for longer."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def main() -> None:
    """Serve until the other side hangs up."""
    for name in ("tests.faults.job", "tests.faults.tiny"):
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness' to handle
    print(json.dumps({"ready": True}), flush=True)
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            code = wait(request["wait"], request["seconds"])
            children -= {request["wait"]} if code is not None else set()
            print(json.dumps({"code": code}), flush=True)
            continue
        if "import" in request:
            importlib.import_module(request["import"])
            print(json.dumps({"code": 0}), flush=True)
            continue
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)  # with its loader workers, for whoever must end it
            os._exit(run(request))
        children.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()

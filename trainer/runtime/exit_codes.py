# SPDX-License-Identifier: MIT
"""How a command ends: its exit code, one line for a failure that explains itself, a trace else.

Under torchrun the failure is also recorded the way torch.distributed.elastic asks for, so that the
summary which the launcher prints last holds the message instead of a link to a manual.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer.runtime.credentials import without_credentials
from trainer.runtime.runtime import RunError
from trainer.runtime.signals import Stopped


def exit_code(work: Callable[[], None], resumes: bool = False) -> int:
    """Do `work`; return 0, 2 where configuration or data are wrong, 1 for any other failure.

    The code is 130 after an interruption (Ctrl-C) and 143 after a request to end (SIGTERM).
    Failures go to stderr, with the rank if there are several.

    Args:
        work: what to run.
        resumes: whether the same command continues from what it has saved.
    """
    try:
        work()
    except (ValueError, RunError) as error:
        print(f"{_rank()}error: {without_credentials(str(error))}", file=sys.stderr, flush=True)
        _record(error)
        return 2 if isinstance(error, ValueError) else 1
    except Stopped as stop:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"stopped: {stop}", file=sys.stderr, flush=True)
        return 128 + stop.number
    except KeyboardInterrupt:
        rest = "the same command goes on from its newest checkpoint" if resumes else "run it again"
        print(f"{_rank()}interrupted: {rest}", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        # The process group is left as it is: leaving it properly would wait for the other ranks.
        trace = without_credentials(traceback.format_exc())
        print(f"{_rank()}{trace}", file=sys.stderr, flush=True)
        _record(error)
        return 1
    finally:
        # A lone process waits for nobody, and whoever called this may train again.
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()
    return 0


def _record(error: Exception) -> None:
    """Hand `error` to the launcher; of one that explains itself without the trace to it."""
    error.args = tuple(
        without_credentials(one) if isinstance(one, str) else one for one in error.args
    )
    with contextlib.suppress(OSError):
        if not isinstance(error, ValueError | RunError):
            get_error_handler().record_exception(error)
            return
        try:
            raise error.with_traceback(None) from None
        except (ValueError, RunError):
            get_error_handler().record_exception(error)


def _rank() -> str:
    """Return '[rank N] ' where there are several ranks."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return f"[rank {dist.get_rank()}] " if several else ""

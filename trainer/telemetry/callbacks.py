# SPDX-License-Identifier: MIT
"""Hooks of a user's own code: what a run tells at its steps, evaluations and checkpoints.

A callback is a class that derives from `Callback` and overrides what it needs. A run gets it by
`--export.callbacks package.module:Class`; the class takes no arguments. It lives on rank 0 alone.
It watches: nothing that it returns is used. One that raises is reported as an alert and switched
off for the rest of the run, because a tracker that is away must not end a training.

Only the command line of a training names callbacks. Reading a run's folder never imports one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.runtime.printable import printable
from trainer.telemetry.telemetry import StepReport


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run before its first step.

    Attributes:
        output: The run's folder.
        settings: The resolved settings as plain data, without passwords.
        dense_parallelism: Who holds the dense weights, in words.
        step: Finished steps; above 0 where the run goes on from a checkpoint.
        end_step: Steps at which it ends.
    """

    output: Path
    settings: Mapping[str, Any]
    dense_parallelism: str
    step: int
    end_step: int


class Callback:
    """Receives what a run reports. Every method does nothing until it is overridden."""

    def on_start(self, run: Run) -> None:
        """Take note that the run begins, or goes on."""

    def on_step(self, report: StepReport) -> None:
        """Take note of a finished step.

        Args:
            report: Its tensors are on the device; reading one waits for it, in every step.
        """

    def on_interval(self, record: Mapping[str, Any]) -> None:
        """Take note of a point of the curve (curves.jsonl), every `telemetry.interval_steps`."""

    def on_evaluation(
        self, step: int, metrics: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take note of an evaluation (evaluations.jsonl), and of effective ranks by layer."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """Take note of a checkpoint that is complete.

        Args:
            step: Its step.
            path: Where it lies, a folder or a URL without password.
        """

    def on_end(self) -> None:
        """Finish, also after an error. Called once."""


class Callbacks:
    """Passes a run's reports on to callbacks; a `Listener` of telemetry.

    Args:
        callbacks: By the name that messages give them.
        say: Takes lines for the log, and whether quiet mode prints them too.
    """

    def __init__(self, callbacks: Mapping[str, Callback], say: Callable[[str, bool], None]) -> None:
        self._callbacks = dict(callbacks)
        self._say = say
        self._checkpoint = -1

    def start(self, run: Run) -> None:
        """Begin; a checkpoint of before is not reported."""
        self._checkpoint = run.step or -1
        self._tell("on_start", run)

    def step(self, report: StepReport) -> None:
        """Pass on a finished step."""
        self._tell("on_step", report)

    def interval(self, record: Mapping[str, Any]) -> None:
        """Pass on a point of the curve."""
        self._tell("on_interval", record)

    def evaluation(
        self, step: int, metrics: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
    ) -> None:
        """Pass on an evaluation."""
        self._tell("on_evaluation", step, metrics, ranks)

    def checkpoint(self, step: int, path: str) -> None:
        """Pass on a checkpoint, once."""
        if step != self._checkpoint:
            self._checkpoint = step
            self._tell("on_checkpoint", step, printable(path))

    def close(self) -> None:
        """End all callbacks. Safe to call twice."""
        self._tell("on_end")
        self._callbacks.clear()

    def _tell(self, method: str, *arguments: Any) -> None:
        for name, callback in [*self._callbacks.items()]:
            if getattr(type(callback), method) is getattr(Callback, method):
                continue
            try:
                getattr(callback, method)(*arguments)
            except Exception as error:  # of anybody's code
                del self._callbacks[name]
                kind = type(error).__name__
                self._say(
                    f"ALERT callback {name}: {method} failed ({kind}: {printable(str(error))}); it "
                    "is switched off for the rest of the run, which goes on without it",
                    True,
                )


def find_callback(name: str) -> type[Callback]:
    """Return the class that `package.module:Class` names; imports the module.

    Raises:
        ValueError: Another form, no such module or class, or no `Callback`.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute.isidentifier()):
        raise ValueError(f"export.callbacks: expected package.module:Class, got {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(
            f"export.callbacks: {name!r} cannot be imported ({error}); install its package on "
            "every machine, or add its folder to PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise ValueError(f"export.callbacks: {module!r} has no {attribute!r}") from error
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ValueError(
            f"export.callbacks: expected a class that derives from {Callback.__module__}."
            f"{Callback.__name__}, got {name!r}"
        )
    return found

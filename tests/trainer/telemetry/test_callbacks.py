# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import io
import json

import pytest

from tests.support.runs import generate, small, train
from trainer.telemetry.callbacks import Callback, Callbacks, find_callback

NOTES, FAILS = "tests.support.callbacks:Notes", "tests.support.callbacks:Fails"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return generate(tmp_path_factory.mktemp("logs"))


def _train_and_listen(runtime, config, output):
    """Return what `train` does, and what this rank printed as an error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return train(runtime, config, output), said.getvalue()


@pytest.mark.dist
def test_callbacks_hear_of_steps_evaluations_and_checkpoints_once_on_two_ranks(
    processes, logs, tmp_path
):
    words = ["--export.callbacks", NOTES, FAILS, "--max-steps", "3"]
    config = small("dlrm.demo", logs, *words, "--checkpoint.interval-steps", "2")
    metrics, said = processes.run(_train_and_listen, config, tmp_path / "mine")[0]
    lines = (tmp_path / "mine" / "notes.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in lines]
    events = [(note["event"], note.get("step")) for note in notes]
    assert events[0] == ("start", 0) and events[-1] == ("end", None)
    assert [step for event, step in events if event == "step"] == [1, 2, 3]
    assert [step for event, step in events if event == "checkpoint"] == [2, 3]
    (evaluation,) = [note for note in notes if note["event"] == "evaluation"]
    assert evaluation["auc"] == pytest.approx(metrics["auc"], rel=1e-6)
    assert notes[0]["recipe"] == "dlrm.demo" and notes[0]["end"] == 3
    (alert,) = [line for line in said.splitlines() if "ALERT callback" in line]
    assert r"tracker\nis away" in alert and "goes on without it" in alert


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.support.callbacks", "expected package.module:Class"),
        ("tests.support.callbacks:Missing", "has no 'Missing'"),
        ("tests.support.nothing:Notes", "cannot be imported"),
        ("tests.support.callbacks:NoCallback", "derives from trainer.telemetry.callbacks.Callback"),
        ("os:path", "derives from"),
    ],
)
def test_names_that_are_no_callback_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_callback(name)


def test_one_that_fails_is_switched_off_and_the_others_go_on():
    class Broken(Callback):
        calls = 0

        def on_interval(self, record):
            self.calls += 1
            raise KeyError("loss")

        def on_end(self):
            raise AssertionError("a callback that is off is not told of the end")

    class Counts(Broken):
        def on_interval(self, record):
            self.calls += 1

        def on_end(self):
            self.calls += 10

    said: list[str] = []
    broken, counts = Broken(), Counts()
    callbacks = Callbacks({"a": broken, "b": counts}, lambda text, loud: said.append(text))
    callbacks.interval({})
    callbacks.interval({})
    callbacks.close()
    callbacks.close()
    assert (broken.calls, counts.calls) == (1, 12)
    assert len(said) == 1 and "callback a: on_interval failed (KeyError" in said[0]

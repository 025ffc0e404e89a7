# SPDX-License-Identifier: MIT
"""A signal in training is taken note of, agreed on by all ranks, and saves before it ends."""

import os
import signal

import pytest

from tests.support import runs
from trainer.checkpoint.layout import complete
from trainer.runtime import signals
from trainer.runtime.exit_codes import exit_code
from trainer.runtime.signals import Stopped, StopSignals
from trainer.trainer import Trainer


def test_the_first_signal_is_noted_and_a_second_ctrl_c_ends_at_once(monkeypatch, capfd):
    monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop = StopSignals(speaks=True)
    with pytest.raises(KeyboardInterrupt), stop.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capfd.readouterr().err.startswith("SIGTERM: saving after this step")


def test_the_same_ctrl_c_from_terminal_and_launcher_counts_once():
    stop = StopSignals(speaks=False)
    with stop.noted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.received == signal.SIGINT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_code_says_which_signal_it_was(number, code, capfd):
    def work() -> None:
        raise Stopped(number, "at step 3")

    assert exit_code(work) == code
    assert capfd.readouterr().err == "stopped: at step 3\n"


@pytest.mark.dist
def test_a_signal_on_one_rank_saves_on_all_at_one_step_and_the_run_goes_on_bit_by_bit(
    processes, tmp_path
):
    logs = runs.generate(tmp_path / "logs")
    config = runs.small("dlrm.demo", logs, "--epochs", "2")
    whole = processes.run(runs.train, config, tmp_path / "whole")[0]
    texts = processes.run(_signalled, config, tmp_path / "cut")
    assert texts[0].startswith("SIGTERM at step 5 of 10; saved")
    assert [path.name for path in complete(tmp_path / "cut/checkpoints")] == ["step-5"]
    resumed = processes.run(runs.train, config, tmp_path / "cut")[0]
    assert runs.losses(tmp_path / "cut") == runs.losses(tmp_path / "whole")
    assert resumed["auc"] == whole["auc"]


def _signalled(runtime, config, output) -> str:
    """Train; rank 1 is told to end while it makes step 4, which is known after 5."""
    trainer = Trainer(config, output, runtime)
    step = trainer._train_step

    def train_step(batches) -> None:
        if runtime.rank == 1 and trainer.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        step(batches)

    trainer._train_step = train_step
    try:
        trainer.fit()
    except Stopped as stop:
        return str(stop)
    raise AssertionError("the run did not stop")

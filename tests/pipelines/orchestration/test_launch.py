# SPDX-License-Identifier: MIT
"""How a pipeline starts its trainings."""

import argparse
import sys
from pathlib import Path

import pytest

from pipelines.orchestration.launch import LaunchConfig, add_options, from_options


def test_torchx_is_asked_for_nodes_of_the_given_size() -> None:
    config = LaunchConfig(launcher="torchx", topology="4x8", scheduler="slurm", size="gpu8")
    words = config.train("dlrm.demo", Path("run"), ["--epochs", "2"])
    assert words[words.index("--size") + 1] == "gpu8"
    assert words.index("--size") < words.index("--")
    config = LaunchConfig(launcher="torchx")
    assert "--size" not in config.train("dlrm.demo", Path("run"), [])


def test_a_size_without_torchx_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--size: has no effect without --launcher torchx"):
        LaunchConfig(size="gpu8")


def test_options_become_settings() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    words = ["--launcher", "torchx", "--scheduler", "slurm", "--size", "8:1:65536"]
    words += ["-j", "2x1", "--retries", "2"]
    config = from_options(parser.parse_args(words))
    assert config == LaunchConfig(
        launcher="torchx", scheduler="slurm", size="8:1:65536", topology="2x1", retries=2
    )


def test_a_command_is_shown_without_the_passwords_that_it_is_given(tmp_path) -> None:
    shown: list[str] = []
    urls = ["http://me:s3cret@gateway", "--checkpoint.folder=s3://me:s3cret@bucket"]
    script = "import sys; print(len(sys.argv), ' '.join(sys.argv).count('s3c' + 'ret'))"
    command = [sys.executable, "-c", script, *urls]
    assert LaunchConfig().start(command, tmp_path / "log", shown.append) == "3 2\n"
    assert shown[0].endswith("http://gateway --checkpoint.folder=s3://bucket")
    assert "s3cret" not in "".join(shown)


TORCHRUN = """
*****************************************
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid
*****************************************
12:00:00 training on 10 rows
Traceback (most recent call last):
  File "of_a_rank.py", line 1, in work
[rank 0] error: the log lacks a column
W1201 12:43:26.79 7136 /lib/torch/distributed/elastic/multiprocessing/api.py:1028] Sending signal
E1201 12:43:26.94 7136 /lib/torch/distributed/elastic/api.py:1002] failed (exitcode: 2)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
trainer.train FAILED
  exitcode  : 2 (pid: 7394)
============================================================
12:00:01 what comes after it
"""


def test_what_torchrun_says_of_itself_is_kept_in_the_log_and_not_shown(tmp_path) -> None:
    said: list[str] = []
    code = f"import sys; sys.stderr.write({TORCHRUN!r}); sys.exit(1)"
    # The exit code of the ranks is read from it all the same.
    with pytest.raises(ValueError, match=r"^the log lacks a column$"):
        LaunchConfig().start([sys.executable, "-c", code], tmp_path / "log.txt", said.append)
    assert [line for line in said[1:] if line] == [
        "12:00:00 training on 10 rows",
        "Traceback (most recent call last):",
        '  File "of_a_rank.py", line 1, in work',
        "[rank 0] error: the log lacks a column",
        "12:00:01 what comes after it",
    ]
    assert TORCHRUN in (tmp_path / "log.txt").read_text()

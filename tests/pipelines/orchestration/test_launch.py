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

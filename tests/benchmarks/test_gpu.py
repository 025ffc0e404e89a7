# SPDX-License-Identifier: MIT
"""The checks for a GPU pass on a CPU too, fail where they should, and say when there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import gpu, gpu_steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", [gpu.check_operator, gpu.check_layer, gpu.check_attention])
def test_every_check_holds_on_a_cpu_too(part: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(part)
    report = gpu.Report(torch.device("cpu"), rounds=7, seconds=60.0)
    part(report)
    assert report.failures == []
    assert capsys.readouterr().out.count("ok  ") >= 6


def test_a_check_that_does_not_hold_is_remembered() -> None:
    report = gpu.Report(torch.device("cpu"), rounds=7, seconds=60.0)
    report.check("close", torch.ones(3), torch.ones(3) + 1e-7, 1e-5)
    report.check("far", torch.ones(3), torch.zeros(3), 1e-5)
    report.check("not a number", torch.full((3,), torch.nan), torch.ones(3), 1e-5)
    assert report.failures == ["far", "not a number"]


def test_the_table_of_steps_is_made_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "FORMATS", {"fp32": torch.float32, "bf16": torch.bfloat16})
    lines = list(gpu_steps.table(torch.device("cpu"), 4, 7, compiles=False))
    assert len(lines) == 2 * 2 * 2
    assert sum("fused attention, eager" in line for line in lines) == 4
    assert all("0.0 MB" in line for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    words = [sys.executable, "-m", "tests.benchmarks.gpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr

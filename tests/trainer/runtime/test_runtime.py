# SPDX-License-Identifier: MIT
"""How processes start: alone, by a launcher, or not at all with a reason."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.processes import Processes, free_port
from trainer.runtime.runtime import Runtime, RuntimeConfig, fresh_part, start

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a launcher may have set."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("lone")
def test_without_a_launcher_one_process_has_a_group_of_one() -> None:
    runtime = start(RuntimeConfig(device="cpu"))
    try:
        assert (runtime.rank, runtime.local_rank, runtime.world_size) == (0, 0, 1)
        assert runtime.is_first
        total = torch.ones(2)
        dist.all_reduce(total, group=runtime.group)
        assert total.tolist() == [1, 1]
    finally:
        runtime.stop()
    runtime.stop()
    with pytest.raises(RuntimeError, match="no process group"):
        _ = runtime.group


@pytest.mark.usefixtures("lone")
def test_a_seed_fixes_all_random_numbers_and_ranks_can_part() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    drawn = []
    for seed in (3, 3, 4):
        runtime = start(RuntimeConfig(device="cpu", seed=seed))
        drawn.append(draw())
        runtime.seed_rank()
        drawn.append(draw())
        runtime.stop()
    assert drawn[0] == drawn[2] and drawn[1] == drawn[3]
    assert len({drawn[0], drawn[1], drawn[4]}) == 3


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, r"\['WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'\] are missing"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"\['MASTER_ADDR', 'MASTER_PORT'\] are missing"),
        (
            dict(zip(LAUNCHER, ["one", "0", "2", "2", "a", "1"], strict=True)),
            "RANK: expected a number",
        ),
        (dict(zip(LAUNCHER, ["2", "0", "2", "2", "a", "1"], strict=True)), "RANK must be below"),
    ],
)
@pytest.mark.usefixtures("lone")
def test_an_incomplete_launcher_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        start(RuntimeConfig(device="cpu"))


@pytest.mark.usefixtures("lone")
def test_a_rank_that_waits_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["0", "0", "2", "2", "127.0.0.1", str(free_port())]
    for name, value in zip(LAUNCHER, values, strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="rank 0 of 2 could not meet the others"):
        start(RuntimeConfig(device="cpu", timeout_seconds=0.5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.usefixtures("lone")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"runtime\.device: expected a CUDA GPU"):
        start(RuntimeConfig(device="cuda"))


@pytest.mark.parametrize(
    ("variable", "setting", "expected"), [(None, 0, 1), ("2", 0, None), (None, 3, 3), ("2", 3, 3)]
)
@pytest.mark.usefixtures("lone")
def test_a_process_computes_on_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, setting: int, expected: int | None
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    try:
        start(RuntimeConfig(device="cpu", num_threads=setting)).stop()
        # OMP_NUM_THREADS was torch's own concern, before it was imported: here 4 stays 4.
        assert torch.get_num_threads() == (expected or 4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "settings",
    [
        *({"device": "tpu"}, {"num_threads": -1}, {"num_threads": 10**9}),
        *({"seed": seed} for seed in (-1, 2**32, 10**22)),
        *({"timeout_seconds": s} for s in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e300)),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^runtime.{next(iter(settings))}: expected") as caught:
        RuntimeConfig(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("lone")
def test_the_largest_seed_and_timeout_work() -> None:
    runtime = start(RuntimeConfig(device="cpu", seed=2**32 - 1, timeout_seconds=30 * 86_400.0))
    runtime.seed_rank()
    runtime.stop()


def _describe(runtime: Runtime) -> Any:
    total = torch.tensor([float(runtime.rank + 1)])
    dist.all_reduce(total, group=runtime.group)
    return runtime.rank, runtime.world_size, runtime.is_first, total.item(), torch.get_num_threads()


@pytest.mark.dist
def test_two_ranks_meet(processes: Processes) -> None:
    assert processes.run(_describe) == [(0, 2, True, 3.0, 1), (1, 2, False, 3.0, 1)]


def test_ranks_that_a_launcher_starts_again_find_nothing_of_the_earlier_start() -> None:
    """torchrun's store outlives them, with the addresses at which the dead ones listened."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]

    def join(rank: int) -> Any:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
        return fresh_part(client, rank, 3, 60.0)

    for attempt in ("0", "1", "2"):
        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(join, (2, 1, 0)))
        assert not any(part.check(["address"]) for part in parts)
        parts[2].set("address", attempt)
        assert [part.get("address").decode() for part in parts] == [attempt] * 3
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come"):
        fresh_part(server, 0, 3, 0.1)


def _start_again(runtime: Runtime, port: int) -> int:
    """Return the restarts that this rank knows of; its launcher has counted as many as its rank."""
    runtime.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(runtime.rank))
        again = start(RuntimeConfig(device="cpu"))
    again.stop()
    return again.restarts


@pytest.mark.dist
def test_all_ranks_know_of_a_restart_that_one_launcher_has_counted(processes: Processes) -> None:
    assert processes.run(_start_again, free_port()) == [1, 1]


def _quit_at_once(runtime: Runtime) -> int:
    """Leave the group as soon as it is there, as a rank does that finds its data bad."""
    runtime.stop()
    return runtime.rank


@pytest.mark.dist
def test_a_rank_that_leaves_at_once_does_not_break_the_meeting(processes: Processes) -> None:
    for _ in range(5):
        assert processes.run(_quit_at_once) == [0, 1]


def _fail_on_rank_one(runtime: Runtime) -> None:
    if runtime.rank == 1:
        raise ValueError("rank one is unwell")


@pytest.mark.dist
def test_a_failure_on_one_rank_fails_the_test_with_its_traceback(processes: Processes) -> None:
    with pytest.raises(AssertionError, match="rank one is unwell"):
        processes.run(_fail_on_rank_one)
    assert len(processes.run(_describe)) == 2

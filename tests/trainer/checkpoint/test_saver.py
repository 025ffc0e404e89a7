# SPDX-License-Identifier: MIT
"""Checkpoints are written beside training, and one that cannot be written loses nothing."""

import contextlib
import dataclasses
import errno
import io
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.checkpoint import dcp, dcp_files, saver, storage
from trainer.checkpoint.layout import complete, read_manifest
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.schedule import CheckpointConfig
from trainer.checkpoint.staging import Staging, local_bytes
from trainer.runtime.runtime import RunError, Runtime
from trainer.warm_start.partial_load import Region, RegionPlanner


@pytest.fixture
def runtime():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    device = torch.device("cpu")
    yield Runtime(rank=0, local_rank=0, world_size=1, local_world_size=1, device=device, seed=0)
    dist.destroy_process_group()


def saver_of(tmp_path, runtime, said, **settings) -> Saver:
    config = CheckpointConfig(**settings)
    return Saver(tmp_path, config, runtime, 60.0, lambda text, loud: said.append(text))


def test_training_goes_on_with_other_values_while_those_of_the_step_are_written(
    tmp_path, runtime, monkeypatch
):
    go, save = threading.Event(), dcp.save

    def slow(*arguments):
        go.wait(60)
        return save(*arguments)

    monkeypatch.setattr(dcp, "save", slow)
    writes = saver_of(tmp_path, runtime, [])
    weight = torch.ones(3)
    losses = [0.5]
    writes.save({"w": weight}, 1, {"losses": losses})
    assert writes.busy and writes.stalled_seconds < 5
    weight += 1  # training
    losses.append(0.4)
    go.set()
    writes.wait(last=True)
    found = torch.zeros(3)
    dcp.load({"w": found}, tmp_path / "step-1")
    assert found.tolist() == [1, 1, 1]
    assert read_manifest(tmp_path / "step-1")["losses"] == [0.5]
    writes.save({"w": weight}, 2, {})
    writes.wait()
    dcp.load({"w": found}, tmp_path / "step-2")
    assert found.tolist() == [2, 2, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_said_loudly_loses_nothing_and_the_next_one_is_tried(
    tmp_path, runtime, monkeypatch, asynchronous
):
    said: list[str] = []
    writes = saver_of(tmp_path, runtime, said, asynchronous=asynchronous)
    writes.save({"w": torch.ones(3)}, 1, {})
    writes.wait()

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.Counted, "write", full)
        writes.save({"w": torch.ones(3)}, 2, {})
        writes.wait()
    assert "step-2: the checkpoint cannot be written" in said[0] and "No space left" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"], "its room is free again"
    writes.save({"w": torch.ones(3)}, 3, {})
    writes.wait(last=True)
    assert [path.name for path in complete(tmp_path)] == ["step-1", "step-3"]
    with monkeypatch.context() as patch:
        patch.setattr(storage.Counted, "write", full)
        writes.save({"w": torch.ones(3)}, 4, {})
        with pytest.raises(RunError, match=r"trained but not kept: make room"):
            writes.wait(last=True)


def test_a_fault_of_the_program_is_raised_where_training_would_not_see_it(
    tmp_path, runtime, monkeypatch
):
    def broken(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(dcp, "save", broken)
    writes = saver_of(tmp_path, runtime, [])
    writes.save({"w": torch.ones(3)}, 1, {})
    with pytest.raises(KeyError, match="a bug"):
        writes.wait()


def test_without_memory_for_a_copy_training_waits_and_is_told(tmp_path, runtime, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(saver, "available_bytes", lambda _: 1000)
    writes = saver_of(tmp_path, runtime, said)
    for step in (1, 2):
        writes.save({"w": torch.ones(300)}, step, {})
        assert not writes.busy and len(complete(tmp_path)) == step
    assert len(said) == 1 and "no room for a copy" in said[0] and "1,200 bytes" in said[0]


def test_metrics_are_noted_beside_the_checkpoint_they_are_of_and_the_best_stays(tmp_path, runtime):
    writes = saver_of(tmp_path, runtime, [], keep=1, keep_best=1)
    for step, auc in ((1, 0.8), (2, 0.7), (3, 0.6)):
        writes.save({"w": torch.ones(3)}, step, {})
        writes.evaluated({"auc": auc})
    assert [path.name for path in complete(tmp_path)] == ["step-1", "step-3"]
    assert read_manifest(tmp_path / "step-3")["saved"] > 1e9


def test_metrics_that_cannot_be_noted_and_checkpoints_that_stay_cost_no_run(
    tmp_path, runtime, monkeypatch
):
    said: list[str] = []
    writes = saver_of(tmp_path, runtime, said, keep=1)
    writes.save({"w": torch.ones(3)}, 1, {})
    writes.wait()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def away(*_):
        raise ConnectionError("no answer")

    monkeypatch.setattr(saver, "note_metrics", full)
    monkeypatch.setattr(saver, "prune", away)
    writes.evaluated({"auc": 0.8})
    assert "step-1: its metrics cannot be noted" in said[0] and "No space left" in said[0]
    assert "old checkpoints cannot be removed (no answer)" in said[-1]
    writes.wait(last=True)


def test_a_copy_has_every_kind_of_tensor_and_reuses_its_memory(runtime):
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    state = {"a": {"plain": torch.ones(2, dtype=torch.bfloat16), "sharded": sharded}, "n": None}
    staging = Staging()
    first = staging.copy(state)
    assert torch.equal(first["a"]["sharded"].to_local(), sharded.to_local())
    assert first["a"]["sharded"].placements == sharded.placements and first["n"] is None
    places = [first["a"]["plain"].data_ptr(), first["a"]["sharded"].to_local().data_ptr()]
    state["a"]["plain"] += 1
    assert first["a"]["plain"].tolist() == [1, 1]
    second = staging.copy(state)
    assert second["a"]["plain"].tolist() == [2, 2]
    assert places == [second["a"]["plain"].data_ptr(), second["a"]["sharded"].to_local().data_ptr()]
    assert local_bytes(state) == 4 + 32


def test_the_first_checkpoint_too_is_copied_into_memory_that_is_there_already(tmp_path, runtime):
    def places() -> dict[str, int]:
        return {name: memory.data_ptr() for name, memory in writes._staging._memory.items()}

    writes = saver_of(tmp_path, runtime, [])
    state = {"w": torch.ones(3), "b": {"c": torch.ones(2)}}
    writes.prepare(state)
    before = places()
    writes.save(state, 1, {})
    writes.wait()
    assert set(before) == {"w", "b.c"} and places() == before


def _save_slowly(runtime, folder, slow_rank: int, asynchronous: bool) -> tuple[list[str], str]:
    """Save two checkpoints while a rank writes for longer than collectives may take."""
    said: list[str] = []
    errors = io.StringIO()
    config = CheckpointConfig(asynchronous=asynchronous)
    writes = Saver(folder, config, runtime, 0.3, lambda text, _: said.append(text))
    write = storage.Counted.write

    def slow(self, data):
        time.sleep(0.8 if runtime.rank == slow_rank else 0.0)
        write(self, data)

    storage.Counted.write = slow
    try:
        with contextlib.redirect_stderr(errors):
            for step in (1, 2):
                tensors = {f"w{runtime.rank}": torch.full((3,), float(step))}
                writes.save(tensors, step, {})
            writes.evaluated({"auc": 0.5})
            writes.wait(last=True)
    finally:
        storage.Counted.write = write
    assert writes.num_failed == 0 and writes.written_step == 2
    return said, errors.getvalue()


def _load_slowly(runtime, folder, slow_rank: int, planner) -> tuple[list[float], str]:
    """Load a checkpoint while a rank reads for longer than collectives may take."""
    runtime = dataclasses.replace(runtime, timeout_seconds=0.3)
    dcp.save({"w": torch.ones(3)}, folder, 1, {})
    dist.barrier(group=runtime.patient)
    tensors = {"w": torch.zeros(3)}
    errors, fill = io.StringIO(), dcp_files._fill
    # Neither the group that steps use, nor another with its timeout, may be waited in.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), runtime.group)

    def slow(*arguments):
        time.sleep(1.2 if runtime.rank == slow_rank else 0.0)
        fill(*arguments)

    dcp_files._fill = slow
    try:
        with contextlib.redirect_stderr(errors):
            if planner:
                region = Region(source="w", offsets=(0,), view=tensors["w"])
                dcp.load({}, folder / "step-1", RegionPlanner([region]), runtime)
            else:
                dcp.load(tensors, folder / "step-1", runtime=runtime)
    finally:
        dcp_files._fill = fill
    return tensors["w"].tolist(), errors.getvalue()


@pytest.mark.dist
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("planner", [False, True], ids=["resume", "inherit"])
def test_a_rank_that_reads_longer_than_a_collective_may_take_is_named_and_ends_nothing(
    processes, tmp_path, slow_rank, planner
):
    found = processes.run(_load_slowly, tmp_path, slow_rank, planner)
    for rank, (values, told) in enumerate(found):
        assert values == [1.0, 1.0, 1.0]
        named = f"rank {slow_rank} has been reading a file of the checkpoint for 0.3 s"
        assert (named in told) == (rank == slow_rank), told


@pytest.mark.dist
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_writes_longer_than_a_collective_may_take_is_named_and_ends_nothing(
    processes, tmp_path, slow_rank, asynchronous
):
    said = processes.run(_save_slowly, tmp_path, slow_rank, asynchronous)
    assert [path.name for path in complete(tmp_path)] == ["step-1", "step-2"]
    for rank, (lines, errors) in enumerate(said):
        told = "\n".join(lines) + errors
        named = f"rank {slow_rank} has been writing its part for 0.3 s (runtime.timeout_seconds)"
        assert (named in told) == (rank == slow_rank), told
        assert "ALERT" not in told and "ALARM" not in told

# SPDX-License-Identifier: MIT
"""Checkpoints behind a URL: in memory, and on an S3 server of this machine."""

import json
import uuid

import fsspec
import pytest
import torch
import torch.distributed as dist

from tests.support import runs, s3
from trainer.checkpoint import dcp, layout
from trainer.checkpoint.layout import MANIFEST, complete, read_manifest, recover
from trainer.checkpoint.retention import note_metrics, prune
from trainer.checkpoint.storage import RemotePath, locate, write_durably
from trainer.runtime.runtime import RunError
from trainer.warm_start.policies import resolve


@pytest.fixture(scope="module")
def server():
    with s3.serving() as environment:
        yield environment


@pytest.fixture(params=["memory", "s3"])
def folder(request, monkeypatch):
    """An empty folder behind a URL."""
    name = uuid.uuid4().hex[:8]
    if request.param == "memory":
        return locate(f"memory://{name}/checkpoints")
    for key, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(key, value)
    files = fsspec.filesystem("s3")
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return locate(f"{s3.BUCKET}/{name}/checkpoints")


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors(value: float = 1.0) -> dict:
    return {"model": {"weight": torch.full((2, 3), value)}}


def loaded(path) -> float:
    found = tensors(0.0)
    dcp.load(found, path)
    return float(found["model"]["weight"].unique())


def names(path) -> list[str]:
    return sorted(item.name for item in path.iterdir()) if path.is_dir() else []


def test_a_checkpoint_goes_to_a_url_and_comes_back(folder):
    assert complete(folder) == [] and not folder.exists()
    path = dcp.save(tensors(), folder, 7, {"rows": 70})
    assert isinstance(path, RemotePath) and str(path) == f"{folder}/step-7"
    assert loaded(path) == 1.0 and read_manifest(path)["rows"] == 70
    assert complete(folder) == [path]
    assert dcp.tensor_names(path) == {"model.weight"}
    with pytest.raises(ValueError, match=r"step-8: expected a checkpoint .* there is nothing"):
        read_manifest(folder / "step-8")


def test_writing_a_step_again_replaces_it_in_one_step(folder, monkeypatch):
    dcp.save(tensors(1.0), folder, 7, {})

    def crash(*_):
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_durably", crash)
        with pytest.raises(RunError, match=r"step-7: the checkpoint cannot be written .gone"):
            dcp.save(tensors(2.0), folder, 7, {})
    assert loaded(folder / "step-7") == 1.0
    assert len(names(folder / "step-7")) == 3, "the data of both, and the manifest of the first"
    recover(folder)
    assert len(names(folder / "step-7")) == 2 and loaded(folder / "step-7") == 1.0
    dcp.save(tensors(2.0), folder, 7, {})
    assert len(names(folder / "step-7")) == 2 and loaded(folder / "step-7") == 2.0


def test_what_has_no_manifest_is_no_checkpoint_and_is_removed_by_the_next_run(folder):
    dcp.save(tensors(), folder, 3, {})
    dcp.save(tensors(), folder, 5, {})
    (folder / "step-5" / MANIFEST).unlink()
    assert [path.name for path in complete(folder)] == ["step-3"]
    recover(folder)
    assert names(folder) == ["step-3"]


def test_a_checkpoint_that_was_copied_from_a_disk_is_recovered_and_read(folder, tmp_path):
    local = dcp.save(tensors(6.0), tmp_path, 6, {})
    for file in local.iterdir():
        with (folder / "step-6" / file.name).open("wb") as copied:
            copied.write(file.read_bytes())
    recover(folder)
    assert complete(folder) == [folder / "step-6"] and loaded(folder / "step-6") == 6.0
    dcp.save(tensors(7.0), folder, 6, {})
    recover(folder)
    assert loaded(folder / "step-6") == 7.0


def test_the_best_and_the_protected_stay_behind_a_url_too(folder):
    for step in (1, 2, 3, 4):
        path = dcp.save(tensors(float(step)), folder, step, {"saved": float(step)})
        note_metrics(path, {"auc": 1.0 / step})
    write_durably(folder / "step-2" / "protected", b"")
    prune(folder, last=1, best=1)
    assert names(folder) == ["step-1", "step-2", "step-4"]
    assert loaded(folder / "step-2") == 2.0


def test_pruning_asks_a_store_for_nothing_that_no_rule_needs(folder, monkeypatch):
    for step in (1, 2, 3):
        dcp.save(tensors(), folder, step, {})
    asked = []
    read, is_file = RemotePath.open, RemotePath.is_file
    monkeypatch.setattr(RemotePath, "open", lambda p, mode="rb": asked.append(p) or read(p, mode))
    monkeypatch.setattr(RemotePath, "is_file", lambda p: asked.append(p) or is_file(p))
    assert prune(folder, last=2) == [folder / "step-1"]
    held = [folder / f"step-{step}" / MANIFEST for step in (1, 2, 3)]
    assert asked == [*held, folder / "step-1" / "protected"]


def test_bytes_that_change_in_the_store_are_named(folder):
    path = dcp.save(tensors(), folder, 4, {})
    data = path / json.loads((path / MANIFEST).read_text())["data"]
    with (data / "rank-0.bin").open("wb") as file:
        file.write(b"short")
    with pytest.raises(ValueError, match=r"rank-0\.bin: damaged .expected \d+ bytes.* got 5 "):
        dcp.load(tensors(), path)
    (data / "rank-0.bin").unlink()
    with pytest.raises(ValueError, match=r"rank-0\.bin: cannot be read"):
        dcp.load(tensors(), path)


def test_a_url_that_nothing_can_open_is_named():
    with pytest.raises(ValueError, match=r"nonsense://x: no file system for nonsense://"):
        locate("nonsense://x")


@pytest.mark.dist
def test_a_run_is_killed_and_resumed_from_s3_bit_by_bit(server, processes, tmp_path):
    logs = runs.generate(tmp_path / "logs")
    folder = f"{s3.BUCKET}/{uuid.uuid4().hex[:8]}/run"
    words = ("--checkpoint.interval-steps", "2")
    config = runs.small("dlrm.demo", logs, *words)
    remote = runs.small("dlrm.demo", logs, *words, "--checkpoint.folder", folder)
    processes.run(runs.train, config, tmp_path / "whole")
    processes.run(_in, server, runs.train_until, remote, tmp_path / "cut", 3)
    processes.run(_in, server, runs.train, remote, tmp_path / "cut")
    assert runs.losses(tmp_path / "cut") == runs.losses(tmp_path / "whole")
    assert not (tmp_path / "cut" / "checkpoints").exists()
    (message, _) = processes.run(_in, server, runs.failure, remote, tmp_path / "other")
    assert "holds checkpoints of another run (step-5)" in message
    metrics = json.loads((tmp_path / "cut" / "metrics.json").read_text())
    (found, _) = processes.run(_in, server, _evaluated, folder, logs)
    assert found["auc"] == metrics["auc"]
    with pytest.raises(ValueError, match=f"config.json has its checkpoints at {folder}, and an "):
        resolve(tmp_path / "cut")
    words = ("--inherit.path", folder, "--inherit.policy", "nightly", "--max-steps", "1")
    heir = runs.small("dlrm.demo", logs, *words)
    processes.run(_in, server, runs.train, heir, tmp_path / "heir")
    inherited = json.loads((tmp_path / "heir" / "inherit.json").read_text())
    assert inherited["sources"]["embeddings"] == f"{folder}/step-5"


def _evaluated(runtime, place, logs):
    return runs.evaluated(runtime, resolve(place), logs, runs.DAYS[1])


def _in(runtime, environment, function, *arguments):
    """Call `function` on this rank with variables that a client of S3 reads."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        if runtime.is_first and not files.exists("bucket"):
            files.mkdir("bucket")
        dist.barrier()
        return function(runtime, *arguments)

# SPDX-License-Identifier: MIT
"""Checkpoints are complete or absent, and come back bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.checkpoint import dcp, layout
from trainer.checkpoint.dcp_index import INDEX
from trainer.checkpoint.layout import complete, read_manifest
from trainer.runtime.runtime import RunError


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors() -> dict:
    return {"model": {"weight": torch.arange(6.0).view(2, 3)}, "random": {"rank0": torch.ones(4)}}


def test_a_checkpoint_comes_back_bit_for_bit_with_its_manifest(tmp_path):
    path = dcp.save(tensors(), tmp_path, 7, {"rows": 70})
    assert path == tmp_path / "step-7"
    loaded = {"model": {"weight": torch.zeros(2, 3)}}
    dcp.load(loaded, path)
    assert torch.equal(loaded["model"]["weight"], tensors()["model"]["weight"])
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["rows"], manifest["world_size"]) == (7, 70, 1)
    assert dcp.tensor_names(path) == {"model.weight", "random.rank0"}


def test_saving_again_into_the_same_step_replaces_it(tmp_path):
    dcp.save(tensors(), tmp_path, 7, {"rows": 1})
    dcp.save(tensors(), tmp_path, 7, {"rows": 2})
    assert read_manifest(tmp_path / "step-7")["rows"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_an_unfinished_save_is_invisible_and_the_next_one_cleans_it_up(tmp_path, monkeypatch):
    dcp.save(tensors(), tmp_path, 5, {})

    def crash(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_durably", crash)
        with pytest.raises(RunError, match=r"step-9: the checkpoint cannot be written .disk full"):
            dcp.save(tensors(), tmp_path, 9, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"], "it makes room again"
    assert [path.name for path in complete(tmp_path)] == ["step-5"]
    dcp.save(tensors(), tmp_path, 9, {})
    assert [path.name for path in complete(tmp_path)] == ["step-5", "step-9"]


def test_a_tensor_that_the_checkpoint_lacks_is_named(tmp_path):
    path = dcp.save(tensors(), tmp_path, 1, {})
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors asked for.*model\.other"):
        dcp.load({"model": {"other": torch.zeros(1)}}, path)


def test_a_shard_that_is_missing_cut_or_changed_is_named_before_anything_is_loaded(tmp_path):
    path = dcp.save(tensors(), tmp_path, 4, {})
    (shard,) = path.glob("*.bin")
    whole = shard.read_bytes()
    place = whole.index(torch.arange(6.0).numpy().tobytes())
    flipped = bytearray(whole)
    flipped[place] ^= 1
    for content in (bytes(flipped), whole[:-10], None):
        shard.unlink() if content is None else shard.write_bytes(content)
        loaded = {"model": {"weight": torch.zeros(2, 3)}}
        with pytest.raises(ValueError, match=rf"{shard.name}: .*; remove .*step-4 to go on"):
            dcp.load(loaded, path)
        assert not loaded["model"]["weight"].any()


def test_an_index_that_is_cut_or_changed_is_named_before_it_is_read(tmp_path):
    path = dcp.save(tensors(), tmp_path, 4, {})
    whole = (path / INDEX).read_bytes()
    for content in (whole[:-9], whole.replace(b"weight", b"weighs")):
        (path / INDEX).write_bytes(content)
        with pytest.raises(ValueError, match=r"index\.json: damaged \(expected .*older checkpoint"):
            dcp.load(tensors(), path)


def test_a_tensor_of_another_number_format_is_named_instead_of_converted(tmp_path):
    path = dcp.save(tensors(), tmp_path, 4, {})
    with pytest.raises(ValueError, match=r"'model\.weight': expected torch\.float16, got torch\.f"):
        dcp.load({"model": {"weight": torch.zeros(2, 3, dtype=torch.float16)}}, path)
    assert read_manifest(path)["dtypes"] == {"float32": 2}


def test_every_dtype_and_a_sharded_tensor_come_back(tmp_path):
    mesh = init_device_mesh("cpu", (1,))
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    state = {str(dtype): torch.ones(2, dtype=dtype) for dtype in dtypes}
    state["sharded"] = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    state["scalar"] = torch.tensor(3.0)
    path = dcp.save(state, tmp_path, 1, {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())

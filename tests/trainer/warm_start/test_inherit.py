# SPDX-License-Identifier: MIT
"""Runs begin with what their policy says, also on a model that has changed, or say why not."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from embeddings.schema.schema import SparseFeature, Table
from tests.support import runs
from tests.support.runs import saved as tensors
from trainer.checkpoint.layout import complete, read_manifest
from trainer.config.config import TrainConfig, to_dict
from trainer.data.hashing import to_rows
from trainer.trainer import Trainer
from trainer.warm_start.match import TableRule, layout_problem, match_table, table_rules
from trainer.warm_start.policies import GROUPS, POLICIES, InheritConfig

STEPS = 5


def begin(runtime, config: TrainConfig, output) -> list[str]:
    """Start a run on this rank and save before its first step; return what it would say."""
    trainer = Trainer(config, output, runtime)
    trainer._save()
    trainer.saver.wait(last=True)
    trainer.train_loader.close()
    trainer.test_loader.close()
    assert trainer.inherited is not None
    return trainer.inherited.table()


def group(state, prefix: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if name.startswith(prefix)}


def same(first, second) -> bool:
    assert first.keys() == second.keys() and first
    return all(torch.equal(first[name], second[name]) for name in first)


def changed(config: TrainConfig, **tables: int) -> TrainConfig:
    """Return `config` with other numbers of rows."""
    resized = tuple(
        dataclasses.replace(table, num_embeddings=tables.get(table.name, table.num_embeddings))
        for table in config.schema.tables
    )
    return dataclasses.replace(config, schema=dataclasses.replace(config.schema, tables=resized))


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def earlier(logs, processes, tmp_path_factory):
    """A warm-up of two steps, and the first of two epochs, on two ranks."""
    folder = tmp_path_factory.mktemp("earlier")
    processes.run(runs.train, runs.small("dlrm.demo", logs, "--max-steps", "2"), folder / "warmup")
    config = runs.small("dlrm.demo", logs, "--epochs", "2", "--stop-epoch", "1")
    processes.run(runs.train, config, folder / "epoch")
    return folder


def inheriting(logs, earlier, *overrides: str) -> TrainConfig:
    path = str(earlier / "epoch")
    return runs.small("dlrm.demo", logs, "--epochs", "2", "--inherit.path", path, *overrides)


@pytest.mark.dist
def test_two_naive_epochs_as_two_runs_are_one_run_bit_for_bit(logs, earlier, processes, tmp_path):
    processes.run(runs.train, runs.small("dlrm.demo", logs, "--epochs", "2"), tmp_path / "whole")
    config = inheriting(logs, earlier, "--inherit.policy", "naive")
    processes.run(runs.train, config, tmp_path / "second")
    parts = runs.losses(earlier / "epoch") + runs.losses(tmp_path / "second")
    assert len(parts) == 2 * STEPS
    assert parts == runs.losses(tmp_path / "whole")
    assert same(tensors(tmp_path / "second"), tensors(tmp_path / "whole"))
    path = complete(tmp_path / "second/checkpoints")[-1]
    origin = read_manifest(path)["inherited"]
    assert origin.keys() == set(GROUPS)
    assert set(origin.values()) == {str(complete(earlier / "epoch/checkpoints")[-1])}


@pytest.mark.dist
@pytest.mark.parametrize("policy", ["progressive", "fresh_tables", "nightly"])
def test_every_group_comes_from_where_the_policy_says(policy, logs, earlier, processes, tmp_path):
    words = ["--inherit.policy", policy]
    if policy == "progressive":
        words += ["--inherit.warmup", str(earlier / "warmup")]
    config = inheriting(logs, earlier, *words)
    said = processes.run(begin, config, tmp_path / "run")[0]
    state, epoch = tensors(tmp_path / "run"), tensors(earlier / "epoch")
    tables = tensors(earlier / "warmup") if policy == "progressive" else epoch
    if policy == "fresh_tables":
        assert not any(value.any() for value in group(state, "fused.").values())
        assert not same(group(state, "model.embeddings."), group(epoch, "model.embeddings."))
        tables = state
    for prefix, source in (
        ("model.embeddings.", tables),
        ("fused.", tables),
        ("model.t", epoch),  # tokenizer and tower
        ("model.objective.", epoch),
        ("dense.", epoch),
    ):
        assert same(group(state, prefix), group(source, prefix)), prefix
    assert not same(group(epoch, "fused."), group(tensors(earlier / "warmup"), "fused."))
    manifest = read_manifest(complete(tmp_path / "run/checkpoints")[-1])
    expected = (0, 0) if policy == "nightly" else (STEPS, 1)
    assert (manifest["step"], manifest["epoch"]) == expected
    (line,) = [one for one in said if one.startswith("embeddings ")]
    fresh = policy == "fresh_tables"
    assert line.split()[1:4] == (["0", "0", "9"] if fresh else ["9", "0", "0"])


@pytest.mark.dist
def test_groups_of_other_sources_than_the_policys_begin_there(logs, earlier, processes, tmp_path):
    words = ("embedding_optimizer", "fresh", "dense_optimizer", "fresh", "data_position", "fresh")
    config = inheriting(logs, earlier, "--inherit.sources", *words)
    processes.run(begin, config, tmp_path / "run")
    state, epoch = tensors(tmp_path / "run"), tensors(earlier / "epoch")
    assert same(group(state, "model."), group(epoch, "model."))
    assert not any(value.any() for value in group(state, "dense.").values())
    assert not any(value.any() for value in group(state, "fused.").values())


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_grown_table_gives_every_id_the_vector_it_had(
    world_size, logs, earlier, processes, tmp_path
):
    config = changed(inheriting(logs, earlier), user=1 + 3 * 511, hour=40)
    said = processes.run(begin, config, tmp_path / "run", world_size=world_size)[0]
    state, epoch = tensors(tmp_path / "run"), tensors(earlier / "epoch")
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 5000)
    for name in (
        "model.embeddings.bags.embedding_bags.user.weight",
        "fused.embeddings.bags.embedding_bags.user.weight.user.momentum1",
    ):
        assert epoch[name].any() and len(state[name]) == 1534
        assert torch.equal(state[name][to_rows(ids, 1534)], epoch[name][to_rows(ids, 512)])
        assert torch.equal(state[name][0], epoch[name][0])
    hours = "model.embeddings.bags.embedding_bags.hour.weight"
    assert torch.equal(state[hours][:32], epoch[hours])
    fresh = dataclasses.replace(config, inherit=InheritConfig())
    assert "resized model.embeddings.bags.embedding_bags.user.weight" in "\n".join(said)
    assert fresh.schema.table("hour").num_embeddings == 40


@pytest.mark.dist
def test_a_hashed_table_of_any_other_size_is_refused_unless_it_may_begin_fresh(
    logs, earlier, processes, tmp_path
):
    config = changed(inheriting(logs, earlier), user=700)
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "table user: hashed ids have other rows in 700 than in 512 rows" in message
        assert "with 1,023 rows every id would keep its vector" in message
    assert not (tmp_path / "run").exists()
    allowed = dataclasses.replace(config.inherit, incompatible="fresh")
    config = dataclasses.replace(config, inherit=allowed)
    processes.run(begin, config, tmp_path / "run")
    state, epoch = tensors(tmp_path / "run"), tensors(earlier / "epoch")
    name = "model.embeddings.bags.embedding_bags.user.weight"
    assert not torch.equal(state[name][:512], epoch[name])
    assert not state["fused" + name[5:] + ".user.momentum1"].any()
    item = "model.embeddings.collections.dim16.embeddings.item.weight"
    assert torch.equal(state[item], epoch[item])


@pytest.mark.dist
def test_a_feature_that_goes_and_a_tower_that_deepens_leave_the_rest_inherited(
    logs, earlier, processes, tmp_path
):
    config = inheriting(logs, earlier, "--model.tower.hidden-units", "512", "256", "256")
    kept = tuple(feature for feature in config.schema.sparse if feature.name != "device")
    tables = tuple(table for table in config.schema.tables if table.name != "device")
    schema = dataclasses.replace(config.schema, sparse=kept, tables=tables)
    said = processes.run(begin, dataclasses.replace(config, schema=schema), tmp_path / "run")[0]
    statuses = json.loads((tmp_path / "run/inherit.json").read_text())
    dense = {name: status for name, (status, _) in statuses["tensors"]["dense"].items()}
    assert dense["model.tokenizer.fields.project.weight"] == "fresh"  # a matrix a field
    assert dense["model.tower.top.linears.1.weight"] == "inherited"
    assert dense["model.tower.top.linears.2.weight"] == "fresh"
    assert statuses["left"] == ["model.embeddings.bags.embedding_bags.device.weight"]
    assert any(line.startswith("left behind: ") for line in said)
    state, epoch = tensors(tmp_path / "run"), tensors(earlier / "epoch")
    name = "dense.tower.top.linears.1.weight.exp_avg"
    assert torch.equal(state[name], epoch[name])
    assert not state["dense.tower.top.linears.2.weight.exp_avg"].any()


@pytest.mark.dist
def test_nothing_left_to_train_and_a_source_that_is_no_checkpoint_are_named(
    logs, earlier, processes, tmp_path
):
    config = inheriting(logs, earlier, "--epochs", "1")
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "has trained 1 epochs (5 steps), which leaves none to train" in message
    config = runs.small("dlrm.demo", logs, "--inherit.path", str(logs))
    for message in processes.run(runs.failure, config, tmp_path / "other"):
        assert "expected a checkpoint" in message
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"policy": "naive"}, "inherit.path: expected a checkpoint"),
        ({"path": "x", "policy": "progressive"}, "inherit.warmup: policy 'progressive' takes"),
        ({"path": "x", "warmup": "y"}, "inherit.warmup: has no effect"),
        ({"path": "x", "sources": {"dens": "fresh"}}, "no group 'dens'"),
        ({"path": "x", "sources": {"id_maps": "fresh"}}, "id_maps follow embeddings"),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(values, expected):
    with pytest.raises(ValueError, match=expected.replace("?", r"\?")):
        InheritConfig(**values)


def test_policies_name_a_source_for_every_group():
    assert {frozenset(policy) for policy in POLICIES.values()} == {frozenset(GROUPS)}
    mapping = InheritConfig(path="x", sources={"embeddings": "fresh"}).mapping()
    assert mapping["embeddings"] == mapping["id_maps"] == "fresh"
    assert mapping["dense"] == "previous"


@pytest.mark.parametrize("old_rows", [2, 5, 8])
@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("cuts", [(), (1,), (4, 5, 9)])
def test_tiles_of_any_shard_read_the_rows_that_ids_had(old_rows, factor, cuts):
    new_rows = 1 + factor * (old_rows - 1)
    rule = TableRule(old_rows=old_rows, new_rows=new_rows, hashed=True)
    table = torch.full((new_rows,), -1)
    bounds = [0, *[cut for cut in cuts if cut < new_rows], new_rows]
    for low, high in itertools.pairwise(bounds):
        for region in shard_regions(table, low, high, rule, old_rows):
            region.view.copy_(region.offsets[0] + torch.arange(len(region.view)))
    ids = np.arange(1000)
    assert table[0] == 0
    assert (table[to_rows(ids, new_rows)].numpy() == to_rows(ids, old_rows)).all()


def shard_regions(table, low, high, rule, old_rows):
    """Return the regions of rows `low` to `high` as if they alone were on this rank."""
    from unittest import mock

    view = table[low:high]
    with mock.patch("trainer.warm_start.match.local_shards", lambda _: [(view, low, 0)]):
        return match_table("t", table, {"t": (old_rows,)}, rule).regions


def test_tables_whose_rows_would_be_those_of_other_ids_have_a_problem():
    old = runs.load_recipe("dlrm.demo").schema
    item = old.table("hour")
    wide = dataclasses.replace(item, embedding_dim=32)
    tables = tuple(wide if table is item else table for table in old.tables)
    new = dataclasses.replace(
        old,
        tables=(*tables, Table(name="x", num_embeddings=9, embedding_dim=4)),
        sparse=(*old.sparse, SparseFeature(name="x", table="x")),
    )
    rules = table_rules(old, new)
    assert rules["hour"].problem == "embedding_dim was 16, is 32"
    assert rules["x"].absent == "a new table"
    assert not rules["user"].problem
    sparse = tuple(
        dataclasses.replace(f, transform="hash") if f.table == "hour" else f for f in old.sparse
    )
    rehashed = table_rules(old, dataclasses.replace(old, sparse=sparse))
    assert "now by hash: rows of other ids" in rehashed["hour"].problem


def test_features_that_were_exchanged_are_told_apart_from_added_ones():
    old = to_dict(runs.load_recipe("dlrm.demo"))
    sparse, dense = old["schema"]["sparse"], old["schema"]["dense"]

    def problem(**changes) -> str:
        return layout_problem(old, {**old, "schema": {**old["schema"], **changes}})

    assert not problem()
    added = {"name": "extra", "kind": "id"}
    assert not problem(sparse=[*sparse, added])
    assert not problem(sparse=sparse[1:])
    assert "fields have changed" in problem(sparse=[added, *sparse[1:]])
    assert "reordered" in problem(sparse=[sparse[1], sparse[0], *sparse[2:]])
    other = {**dense[0], "name": "other"}
    changed = {**dense[0], "transform": "none", "standardize": True}
    assert "dense features have changed" in problem(dense=[changed, *dense[1:]])
    assert "dense features have changed" in problem(sparse=sparse[1:], dense=[*dense[1:], other])
    sliced = {"model": {"tokenizer": {"num_tokens": 4}}, "schema": {**old["schema"]}}
    sliced["schema"]["sparse"] = sparse[1:]
    assert "fields have changed" in layout_problem(old, sliced)

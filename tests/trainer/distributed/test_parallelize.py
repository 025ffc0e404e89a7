# SPDX-License-Identifier: MIT
"""Equivalences of distribution: ranks, shards and the pipeline change nothing but speed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from embeddings.optimizer import SparseOptimizerConfig
from models.batch import Batch
from tests.support.processes import Processes
from tests.support.tiny import TinyRanker, make_batch
from tests.support.training import Recipe, Session, train, whole_tables
from trainer.distributed.parallelize import ParallelConfig, build_dense, parallelize
from trainer.distributed.train_pipeline import Pipeline
from trainer.runtime.runtime import Runtime

pytestmark = pytest.mark.dist


def _close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(
            value, b[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "sgd"])
def test_two_ranks_of_half_a_batch_train_like_one_rank_of_a_whole_batch(
    processes: Processes, kind: str
) -> None:
    recipe = Recipe(sparse=SparseOptimizerConfig(kind=kind, learning_rate=0.1))  # type: ignore
    one = processes.run(train, recipe, world_size=1)
    two = processes.run(train, recipe)
    assert one[0].losses == pytest.approx(two[0].losses, rel=1e-5)
    assert two[0].losses == two[1].losses
    _close(whole_tables(one), whole_tables(two), 1e-5)
    _close(one[0].dense, two[0].dense, 1e-5)
    for name, value in two[0].dense.items():
        assert torch.equal(value, two[1].dense[name]), name


def test_the_pipeline_changes_nothing_and_covers_every_sharded_module(processes: Processes) -> None:
    recipe = Recipe()
    with_pipeline = processes.run(train, recipe)
    without = processes.run(train, dataclasses.replace(recipe, pipelined=False))
    assert with_pipeline[0].losses == without[0].losses
    tables, expected = whole_tables(with_pipeline), whole_tables(without)
    assert all(torch.equal(tables[name], expected[name]) for name in expected)
    assert with_pipeline[0].num_pipelined == with_pipeline[0].num_sharded == 3


def test_every_table_moves_and_untouched_rows_stay(processes: Processes) -> None:
    outcomes = processes.run(train, Recipe())
    before, after = whole_tables(outcomes, start=True), whole_tables(outcomes)
    assert sorted(after) == ["action", "item", "tag", "user"]
    touched: dict[str, set[int]] = {name: set() for name in after}
    for step in range(Recipe().num_steps):
        features = make_batch(Recipe().global_batch, step).sparse.to_dict()
        for feature, table in (("item", "item"), ("clicks", "item"), ("user", "user")):
            touched[table].update(features[feature].values().tolist())
        touched["tag"].update(features["tags"].values().tolist())
        touched["action"].update(features["acts"].values().tolist())
    for name, table in after.items():
        moved = (table != before[name]).any(1).nonzero().flatten().tolist()
        assert set(moved) == touched[name], name


def _train_with_empty_rank(runtime: Runtime) -> list[float]:
    """Give rank 1 batches without any bag or history, and no weight at all in the second."""
    session = Session(runtime, Recipe(num_steps=3))
    losses = []
    for step in range(3):
        batch = session.batch(step)
        if runtime.rank == 1:
            batch = _without_lists(batch)
            batch.weights = batch.weights * (step != 1)
        session.backward(batch)
        result = session.precision.apply()
        assert not result.skipped
        losses.append(result.loss)
    return losses


def _without_lists(batch: Batch) -> Batch:
    kept = ("item", "user")
    parts = batch.sparse.to_dict()
    size = batch.labels.shape[0]
    values = [parts[key].values() if key in kept else parts[key].values()[:0] for key in parts]
    lengths = [torch.full((size,), int(key in kept)) for key in parts]
    sparse = type(batch.sparse)(
        keys=batch.sparse.keys(), values=torch.cat(values), lengths=torch.cat(lengths)
    )
    return dataclasses.replace(batch, sparse=sparse)


def test_a_rank_without_lists_or_weight_trains_along(processes: Processes) -> None:
    losses = processes.run(_train_with_empty_rank)
    assert losses[0] == losses[1]
    assert all(loss > 0 for loss in losses[0])


def _predict(runtime: Runtime) -> tuple[bool, bool]:
    """Predict through the pipeline in evaluation mode; say whether tables stayed."""
    session = Session(runtime, Recipe())
    before = session.tables()
    pipeline = Pipeline(session.parallel, session.precision, runtime.device)
    session.parallel.module.eval()
    output = pipeline.progress(session.batches())
    after = session.tables()
    same = all(torch.equal(before[key], after[key]) for key in before)
    return same, pipeline.last_step is None and output.logits.shape == (8, 1)


def test_evaluation_mode_predicts_without_training(processes: Processes) -> None:
    assert processes.run(_predict) == [(True, True), (True, True)]


class _Reordering(TinyRanker):
    """Touches the ids between batch and tables."""

    def forward(self, batch):  # type: ignore
        sparse = batch.sparse.permute([0, 1, 2, 3, 4])
        return self.rest(self.tokenizer(self.embeddings(sparse), batch.dense), batch)


def _pipeline_with_touched_ids(runtime: Runtime) -> str:
    model = _Reordering(torch.device("meta"))
    recipe = Recipe()
    parallel = parallelize(model, ParallelConfig(), recipe.sparse, runtime)
    optimizer = recipe.dense.build(parallel.dense_parameters)
    dense = build_dense(parallel, optimizer, runtime)
    precision = recipe.precision.build(parallel.model, dense)
    pipeline = Pipeline(parallel, precision, runtime.device)
    try:
        pipeline.progress(iter([make_batch(4, 0)]))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_that_touches_ids_before_the_tables_is_refused(processes: Processes) -> None:
    (message,) = processes.run(_pipeline_with_touched_ids, world_size=1)
    assert "expected all 3 modules of tables" in message


def _pipeline_with_unused_weights(runtime: Runtime) -> str:
    recipe = Recipe()
    parallel = parallelize(
        TinyRanker(torch.device("meta")), ParallelConfig(), recipe.sparse, runtime
    )
    optimizer = recipe.dense.build(parallel.dense_parameters)
    dense = build_dense(parallel, optimizer, runtime)
    precision = recipe.precision.build(parallel.model, dense)
    try:
        pipeline = Pipeline(parallel, precision, runtime.device)
        pipeline.progress(iter([make_batch(4, 0)]))
    except RuntimeError as error:
        return str(error)
    return ""


def test_dense_weights_without_a_gradient_are_named_on_every_rank(processes: Processes) -> None:
    for message in processes.run(_pipeline_with_unused_weights):
        assert "got none of ['rest.unused.weight', 'rest.unused.bias']" in message


def _parallelize_without_layer(runtime: Runtime) -> str:
    model = nn.Module()
    model.embeddings = nn.Linear(2, 2)
    try:
        parallelize(model, ParallelConfig(), SparseOptimizerConfig(), runtime)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_without_an_embedding_layer_is_refused(processes: Processes) -> None:
    (message,) = processes.run(_parallelize_without_layer, world_size=1)
    assert "expected model.embeddings to be an EmbeddingLayer, got Linear" in message


def test_a_bucket_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_megabytes"):
        ParallelConfig(bucket_megabytes=0)

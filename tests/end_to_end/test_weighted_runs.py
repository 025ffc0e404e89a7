# SPDX-License-Identifier: MIT
"""Ids with weights, from columns of Parquet to a run that learns from them, dies and goes on."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema.lifetime import DynamicConfig
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from tests.support import runs
from trainer.config.command_line import apply_overrides
from trainer.config.fit_to_log import fit_recipe
from trainer.data.collate import empty_batch, pad_batch, to_batch
from trainer.data.columns import RowError
from trainer.data.files import discover
from trainer.data.loader import LoaderConfig
from trainer.recipes.load import load_recipe


def schema_of(keep=3, table_rows=20, **feature):
    """Return tags with weights and without, an item, a history, and bags of it with weights."""
    bag = {"table": "tag", "column": "tags", "kind": "bag", "max_length": keep, **feature}
    rated = {"column": "past", "kind": "bag", "max_length": 2, "weights": "ratings"}
    history = {"table": "item", "kind": "sequence", "max_length": 3, "history": "h"}
    return Schema(
        tables=(
            Table(name="tag", num_embeddings=table_rows, embedding_dim=8),
            Table(name="item", num_embeddings=23, embedding_dim=8),
            Table(name="fresh", num_embeddings=64, embedding_dim=8, dynamic=DynamicConfig()),
        ),
        sparse=(
            SparseFeature(name="item", table="item", side="item"),
            SparseFeature(name="scored", pooling="sum", weights="scores", **bag),
            SparseFeature(name="means", pooling="mean", weights="scores", **bag),
            SparseFeature(name="bare", pooling="mean", **bag),
            SparseFeature(name="past", **history),
            SparseFeature(name="liked", table="item", **rated),
            SparseFeature(name="fresh", table="fresh", **rated),
        ),
        labels=(Label(name="click"),),
    )


FLOAT = pa.float32()


def records(tags, scores, type_=FLOAT, rows=None):
    rows = len(tags) if rows is None else rows
    return pa.table(
        {
            "item": pa.array(range(rows)),
            "tags": tags if isinstance(tags, pa.Array) else pa.array(tags, pa.list_(pa.int64())),
            "scores": pa.array(scores, pa.list_(type_)) if isinstance(scores, list) else scores,
            "past": pa.array([[1, 2, 3]] * rows),
            "ratings": pa.array([[1.0, 0.5, 0.25]] * rows),
            "click": pa.array([0] * rows),
        }
    )


PAIRS = st.lists(
    st.none() | st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 9, width=32)), max_size=5),
    max_size=8,
)


@given(PAIRS, st.integers(1, 4), st.integers(0, 3), st.sampled_from([pa.float32(), pa.float64()]))
@settings(deadline=None, max_examples=40)
def test_weights_stay_with_the_newest_ids_and_a_mean_divides_by_their_number(
    pairs, keep, start, type_
):
    tags = [None if row is None else [tag for tag, _ in row] for row in pairs]
    # A null list of weights is an empty one, as that of ids is.
    scores = [None if not row else [score for _, score in row] for row in pairs]
    batch = to_batch(records(tags, scores, type_).slice(start), schema_of(keep))
    kept = [[score for _, score in row or ()][-keep:] for row in pairs[start:]]
    sizes = [len(row) for row in kept]
    assert batch.sparse["scored"].lengths().tolist() == sizes
    expected = torch.tensor([score for row in kept for score in row], dtype=torch.float32)
    assert torch.equal(batch.sparse["scored"].weights(), expected)
    over = torch.tensor([float(len(row)) for row in kept for _ in row])
    assert torch.equal(batch.sparse["means"].weights(), expected / over)
    assert torch.equal(batch.sparse["bare"].weights(), 1 / over)
    for name in ("item", "past"):
        assert bool((batch.sparse[name].weights() == 1).all())
    assert batch.sparse["liked"].weights().tolist() == [0.25, 0.125] * len(kept)
    assert len(batch.sparse.weights()) == len(batch.sparse.values())


@pytest.mark.parametrize("policy", ["oov", "count"])
def test_an_id_out_of_range_or_null_keeps_its_weight_on_the_row_of_missing_ids(policy):
    schema = schema_of(4, 10, transform="identity", out_of_range=policy)
    batch = to_batch(records([[3, None, 99], [-1]], [[0.5, 2, -1], [4]]), schema)
    assert batch.sparse["scored"].values().tolist() == [4, 0, 0, 0]
    assert batch.sparse["scored"].weights().tolist() == [0.5, 2.0, -1.0, 4.0]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (
            [[1.0], [1.0]],
            "expected a weight for each of the 2 ids of column 'tags', got 1, at row 1",
        ),
        (
            [[1.0], None],
            "expected a weight for each of the 2 ids of column 'tags', got 0, at row 1",
        ),
        ([[1.0], [1.0, NAN]], "expected finite 32-bit numbers, got nan, at row 1"),
        ([[-INF], [1.0, 2.0]], "expected finite 32-bit numbers, got -inf, at row 0"),
        ([[1.0], [None, 2.0]], "expected finite 32-bit numbers, got None, at row 1"),
        ([[1.0], [1.0, 1e39]], r"expected finite 32-bit numbers, got 1e\+39, at row 1"),
    ],
)
def test_a_bad_weight_is_refused_with_feature_column_and_row(scores, message):
    with pytest.raises(RowError, match=f"sparse feature 'scored', column 'scores': {message}"):
        to_batch(records([[7], [8, 9]], scores, pa.float64()), schema_of())


def test_weights_that_are_cut_off_are_not_read():
    batch = to_batch(records([[7, 8]], [[NAN, 2.0]]), schema_of(1))
    assert batch.sparse["scored"].weights().tolist() == [2.0]


def test_a_column_of_weights_that_is_missing_or_no_list_of_numbers_is_named():
    table = records([[1]], [[1.0]]).drop_columns("ratings")
    table = table.set_column(2, "scores", pa.array([["high"]]))
    with pytest.raises(ValueError) as error:
        to_batch(table, schema_of())
    for part in (
        "column 'scores' (weights of sparse feature 'scored'): expected a list of integers or "
        "floats or decimals, got list",
        "column 'ratings' (weights of sparse feature 'liked'): expected a list of integers or "
        "floats or decimals, got no such column",
    ):
        assert part in str(error.value)


def test_batches_without_rows_and_padded_ones_have_weights_for_all_their_ids():
    schema = schema_of()
    assert empty_batch(schema).sparse.weights().numel() == 0
    batch = to_batch(records([[1, 2], []], [[0.5, -1.0], []]), schema)
    for before in (batch, empty_batch(schema)):
        padded = pad_batch(before, 5, schema)
        for feature in schema.sparse:
            old, new = before.sparse[feature.name], padded.sparse[feature.name]
            more = 5 - len(old.lengths()) if feature.kind == "id" else 0
            assert new.weights().tolist() == [*old.weights().tolist(), *[1.0] * more]
    moved = batch.to(torch.device("meta"))
    assert moved.sparse.weights().is_meta and moved.sparse.weights().shape == (22,)
    plain = dataclasses.replace(
        schema, sparse=tuple(dataclasses.replace(one, weights="") for one in schema.sparse)
    )
    for batch in (to_batch(records([[1]], [[1.0]]), plain), empty_batch(plain)):
        assert batch.sparse.weights_or_none() is None


def write_log(folder, rows=640):
    """Write two days of a log whose clicks follow from tags times their scores."""
    random = np.random.default_rng(0)
    good = random.choice([-1.0, 1.0], 12)
    for day in runs.DAYS:
        sizes = random.integers(0, 5, rows)
        owner = np.repeat(np.arange(rows), sizes)
        tags, scores = random.integers(0, 12, len(owner)), random.normal(0, 1, len(owner))
        total = np.bincount(owner, scores * good[tags], rows) + random.normal(0, 0.1, rows)
        table = records(lists(tags, sizes), lists(scores.astype(np.float32), sizes), rows=rows)
        table = table.set_column(5, "click", pa.array((total > 0).astype(np.int8)))
        (folder / f"dt={day}").mkdir(parents=True)
        pq.write_table(table, folder / f"dt={day}" / "part-0.parquet", row_group_size=100)
    return folder


def lists(values, sizes):
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def test_a_loader_names_the_file_and_the_row_of_a_bad_weight(tmp_path):
    folder, schema = write_log(tmp_path / "log", 300), schema_of()
    loader = LoaderConfig(batch_size=64).build(discover(folder, None, schema), schema)
    sizes = [(batch.sparse.weights().numel(), batch.sparse.values().numel()) for batch in loader]
    assert len(sizes) == 10 and all(one == other for one, other in sizes)
    path = folder / f"dt={runs.DAYS[1]}" / "part-0.parquet"
    table = pq.read_table(path, partitioning=None)
    scores = table["scores"].to_pylist()
    row = next(i for i, one in enumerate(scores) if len(one) > 1 and i > 200)
    scores[row] = scores[row][1:]
    scores = pa.array(scores, pa.list_(pa.float32()))
    pq.write_table(table.set_column(2, "scores", scores), path, row_group_size=100)
    loader = LoaderConfig(batch_size=64).build(discover(folder, None, schema), schema)
    place = f"at row {row - 200} of row group 2 of {path}"
    with pytest.raises(
        ValueError, match=rf"'scored', column 'scores': expected a weight .*{place}"
    ):
        list(loader)


def config_of(folder, schema, *overrides):
    config = fit_recipe(load_recipe("dlrm.demo"), schema)
    return apply_overrides(
        config,
        [
            *("--data.path", str(folder), "--loader.batch-size", "32", "--epochs", "2"),
            *("--data.train-days", runs.DAYS[0], "--data.test-days", runs.DAYS[1]),
            *("--sparse.learning-rate", "0.2", "--dense.learning-rate", "0.01"),
            *("--telemetry.interval-steps", "1", "--telemetry.mode", "quiet", *overrides),
        ],
    )


@pytest.mark.dist
def test_a_run_on_two_ranks_learns_from_weights_and_resumes_bit_for_bit(processes, tmp_path):
    folder = write_log(tmp_path / "log")
    config = config_of(folder, schema_of(4), "--checkpoint.interval-steps", "8")
    metrics = processes.run(runs.train, config, tmp_path / "whole")[0]
    assert metrics["auc"] > 0.7  # ids alone say nothing: a tag's score has either sign
    processes.run(runs.train_until, config, tmp_path / "cut", 11)
    processes.run(runs.train, config, tmp_path / "cut")
    assert runs.losses(tmp_path / "cut") == runs.losses(tmp_path / "whole")
    expected, found = runs.saved(tmp_path / "whole"), runs.saved(tmp_path / "cut")
    assert expected.keys() == found.keys()
    assert any("embeddings.weighted." in name for name in expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

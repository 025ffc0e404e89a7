# SPDX-License-Identifier: MIT
import dataclasses
import json
import pickle

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema.schema import Table
from tests.support.crashes import LAYOUTS, ORDERS, rows_over_crashes, runs
from tests.support.logs import SCHEMA, loaders, records, rows_of, same, write_log
from trainer.data.block import Block
from trainer.data.files import LogFile, discover, keep_rows
from trainer.data.loader import LoaderConfig

DAYS = [f"2026-01-0{day}" for day in range(1, 6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that writes a layout once and finds its files."""
    written = {}

    def files_of(layout) -> tuple[LogFile, ...]:
        key = str(layout)
        if key not in written:
            folder = write_log(tmp_path_factory.mktemp("log"), layout, DAYS[: len(layout)])
            written[key] = discover(folder, None, SCHEMA)
        return written[key]

    return files_of


@given(
    LAYOUTS,
    st.integers(1, 4),
    st.sampled_from(ORDERS),
    st.integers(1, 7),
    st.integers(0, 40),
)
@settings(deadline=None, max_examples=25)
def test_all_ranks_together_read_every_row_once_in_equally_many_steps(
    folders, layout, world_size, order, batch_size, shuffle_rows
):
    files = folders(layout)
    config = LoaderConfig(batch_size=batch_size, shuffle_rows=shuffle_rows, order=order)
    total = sum(map(sum, layout))
    steps, rows = set(), []
    for loader in loaders(files, config, world_size):
        batches = list(loader)
        steps.add(len(batches))
        assert len(batches) == len(loader) == loader.step
        assert all(1 <= batch.labels.shape[0] <= batch_size for batch in batches)
        read = rows_of(batches)
        assert abs(len(read) - total / world_size) < 1
        rows += read
    assert sorted(rows) == list(range(total))
    assert steps == {-(-total // (world_size * batch_size))}


@given(LAYOUTS, st.lists(runs(), min_size=1, max_size=3), st.sampled_from(ORDERS))
@settings(deadline=None, max_examples=30)
def test_an_epoch_that_crashes_again_and_again_at_any_world_size_trains_every_row_once(
    folders, layout, crashes, order
):
    rows = rows_over_crashes(folders(layout), crashes, order)
    assert sorted(rows) == list(range(sum(map(sum, layout))))


@pytest.mark.parametrize("order", ORDERS)
def test_a_resumed_loader_gives_the_batches_of_an_uninterrupted_one(folders, order):
    files = folders([[17, 9], [30], [5, 5, 5]])
    config = LoaderConfig(batch_size=3, shuffle_rows=12, order=order)
    for rank in range(2):
        whole = config.build(files, SCHEMA, rank=rank, world_size=2, seed=3)
        whole.set_epoch(1)
        batches = list(whole)
        for step in range(len(batches) + 1):
            resumed = config.build(files, SCHEMA, rank=rank, world_size=2, seed=3)
            resumed.load_state_dict(whole.state_dict(step))
            rest = list(resumed)
            assert len(rest) == len(batches) - step and len(resumed) == len(batches)
            assert all(same(a, b) for a, b in zip(rest, batches[step:], strict=True))


def test_a_pipeline_that_reads_ahead_saves_the_step_it_trained(folders):
    loader = LoaderConfig(batch_size=3).build(folders([[30]]), SCHEMA)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    assert loader.state_dict()["step"] == 5 and loader.state_dict(2)["step"] == 2
    with pytest.raises(ValueError, match=r"expected a step in \[0, 5\], got 6"):
        loader.state_dict(6)


def test_a_position_inside_another_log_order_or_seed_is_refused(folders):
    files, other = folders([[30]]), folders([[31]])
    config = LoaderConfig(batch_size=3)
    loader = config.build(files, SCHEMA)
    next(iter(loader))
    state = loader.state_dict()
    for changed, message in (
        (config.build(other, SCHEMA), "expected log"),
        (config.build(files, SCHEMA, seed=5), "expected seed 0, as in the checkpoint, got 5"),
        (LoaderConfig(batch_size=3, order="none").build(files, SCHEMA), "expected order 'shuffle'"),
    ):
        with pytest.raises(ValueError, match=message):
            changed.load_state_dict(state)
        changed.load_state_dict(loader.state_dict(0))


def test_epochs_differ_repeat_exactly_and_start_again_when_finished(folders):
    loader = LoaderConfig(batch_size=4, shuffle_rows=8).build(folders([[9, 9], [9]]), SCHEMA)
    first = rows_of(loader)
    assert rows_of(loader) == first and loader.epoch == 0
    loader.set_epoch(1)
    second = rows_of(loader)
    assert second != first and sorted(second) == sorted(first)
    loader.set_epoch(0)
    assert rows_of(loader) == first


def test_time_order_goes_through_the_days_in_order_on_every_rank(folders):
    layout = [[20, 10], [15], [30, 1]]
    config = LoaderConfig(batch_size=4, shuffle_rows=8, order="time")
    for loader in loaders(folders(layout), config, 2):
        days = [0 if row < 30 else 1 if row < 45 else 2 for row in rows_of(loader)]
        assert days == sorted(days)
        assert [round(days.count(day) - n / 2) for day, n in enumerate((30, 15, 31))] == [0, 0, 0]


def test_without_shuffling_rows_come_as_they_lie(folders):
    config = LoaderConfig(batch_size=4, shuffle_rows=8, order="none")
    rows = [rows_of(loader) for loader in loaders(folders([[20, 10], [15]]), config, 2)]
    assert rows[0] + rows[1] == list(range(45))


def test_shuffling_mixes_the_rows_of_a_window(folders):
    rows = rows_of(
        LoaderConfig(batch_size=50, shuffle_rows=400).build(folders([[200, 200]]), SCHEMA)
    )
    steps = np.abs(np.diff(rows))
    assert steps.mean() > 90, "neighbours of a random order of 400 rows lie 133 apart"


def test_part_of_a_log_is_read_exactly(folders):
    files = keep_rows(folders([[20, 10], [15]]), (0.2, 0.8))
    config = LoaderConfig(batch_size=4, shuffle_rows=8)
    rows = [row for loader in loaders(files, config, 3) for row in rows_of(loader)]
    assert sorted(rows) == list(range(9, 36))


def test_a_rank_without_rows_steps_along_on_padding(folders):
    ranks = loaders(folders([[1]]), LoaderConfig(batch_size=2), 3)
    batches = [list(loader) for loader in ranks]
    assert [len(b) for b in batches] == [1, 1, 1]
    assert [b[0].num_examples for b in batches] == [1, 0, 0]
    assert batches[2][0].num_padding == 1 and batches[2][0].weights.sum() == 0


@pytest.fixture(scope="module")
def many(folders):
    return folders([[100, 60], [7], [80, 80, 3]])


def test_a_window_travels_as_one_block_that_owns_its_memory(many):
    loader = LoaderConfig(batch_size=5, shuffle_rows=20).build(many, SCHEMA)
    share = loader._order.share(loader._legs, 0)
    block = loader._blocks._dataset[next(loader._order.windows(share, 20))]
    copy = pickle.loads(pickle.dumps(dataclasses.replace(block, memory=block.memory.numpy())))
    assert isinstance(copy, Block) and len(copy.slots) == 4
    for tensors, others in zip(block.tensors(), copy.tensors(), strict=True):
        assert all(
            torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            for a, b in zip(tensors, others, strict=True)
        )


def test_out_of_range_values_are_counted(many):
    sparse = [
        dataclasses.replace(f, table="tiny", out_of_range="count") if f.name == "place" else f
        for f in SCHEMA.sparse
    ]
    tables = [*SCHEMA.tables[:3], Table(name="tiny", num_embeddings=4, embedding_dim=4)]
    schema = dataclasses.replace(SCHEMA, sparse=tuple(sparse), tables=tuple(tables))
    loader = LoaderConfig(batch_size=50).build(many, schema)
    batches = list(loader)
    outside = [sum(row % 5 > 2 for row in rows_of([batch])) for batch in batches]
    assert loader.out_of_range() == {"place": sum(outside)}
    assert loader.out_of_range(len(batches) - 2) == {"place": sum(outside[:-2])}
    loader.set_epoch(1)
    assert loader.out_of_range() == {"place": sum(outside)} == loader.out_of_range(0)
    next(iter(loader))
    assert loader.out_of_range(0) == {"place": sum(outside)}
    assert loader.out_of_range().total() > sum(outside)


@pytest.mark.parametrize(
    ("setting", "value"), [("batch_size", 0), ("num_workers", -1), ("shuffle_rows", -1)]
)
def test_a_wrong_setting_is_named(setting, value):
    with pytest.raises(ValueError, match=f"loader.{setting}: expected at least .*, got {value}"):
        LoaderConfig(**{setting: value})
    with pytest.raises(ValueError, match=r"expected a rank in \[0, 1\], got 2"):
        LoaderConfig().build((), SCHEMA, rank=2, world_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("add", r"new: 2026-01-02/late\.parquet"),
        ("remove", r"gone: 2026-01-02/part-1\.parquet"),
        ("rewrite", r"changed: 2026-01-02/part-1\.parquet"),
        ("rename", r"new: 2026-01-02/other\.parquet; gone: 2026-01-02/part-1\.parquet"),
    ],
)
def test_a_position_in_a_log_that_has_changed_names_the_files(tmp_path, change, message):
    days = ["2026-01-01", "2026-01-02", "2026-01-03"]
    write_log(tmp_path, [[8], [8], [8]], days)
    config = LoaderConfig(batch_size=4)
    loader = config.build(discover(tmp_path, None, SCHEMA), SCHEMA)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    path = tmp_path / "dt=2026-01-02" / "part-1.parquet"
    if change == "add":
        pq.write_table(records(3), path.with_name("late.parquet"))
    elif change == "remove":
        path.unlink()
    elif change == "rewrite":
        pq.write_table(records(8, first=100), path)
    else:
        path.rename(path.with_name("other.parquet"))
        pq.write_table(records(9), path.with_name("other.parquet"))
    again = config.build(discover(tmp_path, None, SCHEMA), SCHEMA)
    with pytest.raises(ValueError, match=rf"expected log .* \({message}\); restore it, or begin a"):
        again.load_state_dict(state)
    del state["files"]  # of a checkpoint before there were any
    with pytest.raises(ValueError, match=r"expected log '\w+', as in the checkpoint, got '\w+'; "):
        again.load_state_dict(state)


def test_a_log_that_was_moved_is_the_same_log(tmp_path):
    write_log(tmp_path / "a", [[8], [8]], ["2026-01-01", "2026-01-02"])
    config = LoaderConfig(batch_size=4)
    loader = config.build(discover(tmp_path / "a", None, SCHEMA), SCHEMA)
    next(iter(loader))
    (tmp_path / "a").rename(tmp_path / "b")
    moved = config.build(discover(tmp_path / "b", None, SCHEMA), SCHEMA)
    moved.load_state_dict(loader.state_dict())
    assert moved.step == 1
    assert moved.describe() == "16 rows of 2 days (2026-01-01 to 2026-01-02)"


@pytest.mark.parametrize(
    ("whole", "ranks", "here", "became"),
    [(512, 1, 512, 512), (512, 2, 256, 512), (100, 3, 33, 99), (500, 8, 62, 496), (5, 4, 1, 4)],
)
def test_a_global_batch_is_divided_among_the_ranks(whole, ranks, here, became):
    config = LoaderConfig(batch_size=0, global_batch_size=whole).on(ranks)
    assert (config.batch_size, config.global_batch_size) == (here, became)
    assert config.on(ranks) == config and config.on(7) == config  # what a run recorded stays
    assert f"batch of {became} examples" in config.describe(ranks)


def test_a_global_batch_of_fewer_examples_than_ranks_is_refused():
    with pytest.raises(ValueError, match="at least one example for each of 8 ranks, got 4"):
        LoaderConfig(batch_size=0, global_batch_size=4).on(8)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_takes_as_many_steps_with_one_global_batch(folders, ranks):
    files = folders([[24, 24], [16]])
    config = LoaderConfig(batch_size=0, global_batch_size=8, order="time")
    sizes = [
        loader.build(files, SCHEMA, rank=rank, world_size=ranks)
        for rank, loader in enumerate([config] * ranks)
    ]
    assert {len(loader) for loader in sizes} == {8}

# SPDX-License-Identifier: MIT
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema import Table
from tests.support.logs import SCHEMA, rows_of, write_log
from trainer.data.loader import Loader, LoaderConfig
from trainer.data.parquet import LogFile, discover, keep_rows
from trainer.data.windows import Block

DAYS = [f"2026-01-0{day}" for day in range(1, 6)]
LAYOUTS = st.lists(st.lists(st.integers(0, 17), max_size=4), min_size=1, max_size=5).filter(
    lambda layout: sum(map(sum, layout))
)


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


def loaders(files, config, world_size, seed=1, schema=SCHEMA) -> list[Loader]:
    return [
        config.build(files, schema, rank=rank, world_size=world_size, seed=seed)
        for rank in range(world_size)
    ]


def same(first, second) -> bool:
    """Return whether two batches are equal bit for bit."""
    pairs = [(first.sparse.values(), second.sparse.values())]
    pairs.append((first.sparse.lengths(), second.sparse.lengths()))
    for name in ("labels", "weights", "groups", "actions"):
        pairs.append((getattr(first, name), getattr(second, name)))
    return all(torch.equal(a, b) for a, b in pairs) and np.array_equal(
        first.dense.numpy(), second.dense.numpy(), equal_nan=True
    )


@given(
    LAYOUTS,
    st.integers(1, 4),
    st.sampled_from(["shuffle", "time", "none"]),
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


@given(
    LAYOUTS,
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 20), st.integers(0, 5)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["shuffle", "time", "none"]),
)
@settings(deadline=None, max_examples=25)
def test_an_epoch_interrupted_again_and_again_at_any_world_size_reads_every_row_once(
    folders, layout, runs, order
):
    files, state, rows = folders(layout), None, []
    for world_size, batch_size, shuffle_rows, stop in [*runs, (2, 3, 10, 10**9)]:
        config = LoaderConfig(batch_size=batch_size, shuffle_rows=shuffle_rows, order=order)
        states = []
        for loader in loaders(files, config, world_size):
            if state is not None:
                loader.load_state_dict(state)
            taken = []
            for batch in loader if loader.step < len(loader) else ():
                taken.append(batch)
                if len(taken) > stop:
                    break
            rows += rows_of(taken)
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states), "ranks agree on the position"
        state = pickle.loads(pickle.dumps(states[0]))
    assert sorted(rows) == list(range(sum(map(sum, layout))))


@pytest.mark.parametrize("order", ["shuffle", "time", "none"])
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


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_batches_do_not_depend_on_the_number_of_workers_and_one_file_feeds_many(many):
    config = LoaderConfig(batch_size=5, shuffle_rows=20)
    for files, world_size, num_workers in ((many, 1, 2), (many[:1], 2, 4)):
        alone = loaders(files, config, world_size)
        helped = loaders(files, dataclasses.replace(config, num_workers=num_workers), world_size)
        for one, other in zip(alone, helped, strict=True):
            for epoch in range(2):
                one.set_epoch(epoch)
                other.set_epoch(epoch)
                batches = list(one)
                assert all(same(a, b) for a, b in zip(batches, other, strict=True))
            other.close()


def test_workers_resume_in_the_middle_of_an_abandoned_epoch(many):
    config = LoaderConfig(batch_size=5, shuffle_rows=20, num_workers=1)
    expected = list(dataclasses.replace(config, num_workers=0).build(many, SCHEMA))
    loader = config.build(many, SCHEMA)
    first = [batch for batch, _ in zip(loader, range(7), strict=False)]
    # zip takes one batch more than it gives.
    loader.load_state_dict(loader.state_dict(7))
    got = [*first, *loader]
    loader.close()
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))


def test_bad_rows_are_named_with_file_row_group_and_row_by_whoever_reads_them(tmp_path):
    folder = write_log(tmp_path, [[20, 30], [10]])
    path = folder / "part-0.parquet"
    table = pq.read_table(path)
    places = table["place"].to_pylist()
    places[33] = 77
    table = table.set_column(3, "place", pa.array(places, pa.int8()))
    pq.write_table(table, path, row_group_size=20)
    files = discover(folder, None, SCHEMA)
    for num_workers in (0, 1):
        config = LoaderConfig(batch_size=4, shuffle_rows=16, num_workers=num_workers)
        with pytest.raises(ValueError) as error:
            for loader in loaders(files, config, 2):
                list(loader)
        message = str(error.value)
        assert message.startswith("rank ")
        assert ("loader worker 0" in message) == bool(num_workers)
        for part in ("feature 'place'", "got 77", f"at row 13 of row group 1 of {path}"):
            assert part in message
        assert "Traceback" not in message


def test_a_file_that_vanishes_is_named_and_not_waited_for(tmp_path):
    files = discover(write_log(tmp_path, [[20], [20]]), None, SCHEMA)
    (tmp_path / "part-1.parquet").unlink()
    loader = LoaderConfig(batch_size=4, shuffle_rows=4, num_workers=1).build(files, SCHEMA)
    with pytest.raises(
        ValueError, match=r"rank 0, loader worker 0: .*part-1\.parquet, row group 0"
    ):
        list(loader)


def test_a_killed_worker_is_named_within_seconds(many):
    config = LoaderConfig(batch_size=1, shuffle_rows=1, num_workers=2, prefetch_windows=1)
    loader = config.build(many, SCHEMA, rank=1, world_size=2)
    batches = iter(loader)
    next(batches)
    worker = loader._workers._iterator._workers[1]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1: loader worker 1 \(pid {worker.pid}\) ended"):
        list(batches)
    assert time.monotonic() - start < 20


def test_a_window_travels_as_one_block_that_owns_its_memory(many):
    loader = LoaderConfig(batch_size=5, shuffle_rows=20).build(many, SCHEMA)
    share = loader._order.share(loader._legs, 0)
    block = loader._dataset[next(loader._order.windows(share, 20))]
    copy = pickle.loads(pickle.dumps(dataclasses.replace(block, memory=block.memory.numpy())))
    assert isinstance(copy, Block) and len(copy.slots) == 4
    for tensors, others in zip(block.tensors(), copy.tensors(), strict=True):
        assert all(
            torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            for a, b in zip(tensors, others, strict=True)
        )


def test_out_of_vocabulary_values_are_counted(many):
    sparse = [
        dataclasses.replace(f, table="tiny", out_of_range="oov") if f.name == "place" else f
        for f in SCHEMA.sparse
    ]
    tables = [*SCHEMA.tables[:3], Table(name="tiny", num_embeddings=4, embedding_dim=4)]
    schema = dataclasses.replace(SCHEMA, sparse=tuple(sparse), tables=tuple(tables))
    loader = LoaderConfig(batch_size=50).build(many, schema)
    rows = rows_of(loader)
    assert loader.out_of_range == {"place": sum(row % 5 > 2 for row in rows)}


@pytest.mark.parametrize(
    ("setting", "value"), [("batch_size", 0), ("num_workers", -1), ("shuffle_rows", -1)]
)
def test_a_wrong_setting_is_named(setting, value):
    with pytest.raises(ValueError, match=f"loader.{setting}: expected at least .*, got {value}"):
        LoaderConfig(**{setting: value})
    with pytest.raises(ValueError, match=r"expected a rank in \[0, 1\], got 2"):
        LoaderConfig().build((), SCHEMA, rank=2, world_size=2)


GROWTH = """
import resource, sys
from embeddings.schema import Label, Schema, SparseFeature, Table
from trainer.data.order import EpochOrder, Leg
from trainer.data.parquet import discover
from trainer.data.windows import WindowDataset

schema = Schema(
    tables=(Table(name="t", num_embeddings=100, embedding_dim=4),),
    sparse=tuple(SparseFeature(name=f"c{i}", table="t") for i in range(8)),
    labels=(Label(name="click"),),
)
order = EpochOrder(discover(sys.argv[1], None, schema), "shuffle", 0, 0)
share = order.share([Leg(1, 2048, 16384, 0)], 0)
dataset = WindowDataset(schema, 2048, 0)
peaks = []
for window in order.windows(share, 16384):
    dataset[window]
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(peaks[3], peaks[-1])
"""


def test_memory_is_flat_over_one_enormous_row_group(tmp_path):
    rows = 1_000_000
    column = pa.array(np.random.default_rng(0).integers(0, 2**60, rows))
    table = pa.table({**{f"c{i}": column for i in range(8)}, "click": pa.array([1] * rows)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=rows, use_dictionary=False)
    root = Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    early, late = map(float, output.split())
    assert late - early < 20, f"MB resident after 4 of 62 windows and at the end: {output}"

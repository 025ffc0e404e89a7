# SPDX-License-Identifier: MIT
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.crashes import LAYOUTS, ORDERS, rows_over_crashes, runs
from tests.support.logs import SCHEMA, loaders, same, write_log
from trainer.data.files import discover
from trainer.data.loader import LoaderConfig


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = write_log(tmp_path_factory.mktemp("log"), [[100, 60], [7], [80, 80, 3]])
    return discover(folder, None, SCHEMA)


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


@given(
    LAYOUTS,
    st.lists(runs(max_workers=4, max_world_size=3), min_size=2, max_size=3),
    st.sampled_from(ORDERS),
)
@settings(deadline=None, max_examples=4)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_an_epoch_that_crashes_under_any_number_of_ranks_and_workers_trains_every_row_once(
    tmp_path_factory, layout, crashes, order
):
    days = [f"2026-01-0{day + 1}" for day in range(len(layout))]
    folder = write_log(tmp_path_factory.mktemp("log"), layout, days)
    rows = rows_over_crashes(discover(folder, None, SCHEMA), crashes, order)
    assert sorted(rows) == list(range(sum(map(sum, layout))))


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
    worker = loader._blocks._workers._iterator._workers[1]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1: loader worker 1 \(pid {worker.pid}\) ended"):
        list(batches)
    assert time.monotonic() - start < 20


def test_a_worker_that_dies_between_two_epochs_is_named_too(many):
    config = LoaderConfig(batch_size=5, shuffle_rows=20, num_workers=1)
    loader = config.build(many, SCHEMA, rank=1, world_size=2)
    list(loader)
    worker = loader._blocks._workers._iterator._workers[0]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"rank 1: loader worker 0 \(pid {worker.pid}\) ended"):
        list(loader)


TRAINER = """
import sys, time
from tests.support.logs import SCHEMA
from trainer.data.loader import LoaderConfig
from trainer.data.files import discover

if __name__ == "__main__":
    config = LoaderConfig(batch_size=1, shuffle_rows=1, num_workers=2)
    loader = config.build(discover(sys.argv[1], None, SCHEMA), SCHEMA)
    next(iter(loader))
    print(*(worker.pid for worker in loader._blocks._workers._iterator._workers), flush=True)
    time.sleep(600)
"""


def test_a_killed_trainer_leaves_no_worker_behind(tmp_path):
    folder = write_log(tmp_path / "log", [[20]])
    command = [sys.executable, "-c", TRAINER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


GROWTH = """
import resource, sys
from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from trainer.data.order import EpochOrder, Leg
from trainer.data.files import discover
from trainer.data.worker import WindowDataset

schema = Schema(
    tables=(Table(name="t", num_embeddings=100, embedding_dim=4),),
    sparse=(SparseFeature(name="ids", table="t", kind="bag", max_length=4),),
    labels=(Label(name="click"),),
)
order = EpochOrder(discover(sys.argv[1], None, schema), "shuffle", 0, 0)
share = order.share([Leg(1, 2048, 16384, 0)], 0)
dataset = WindowDataset(schema, 2048, 0)
peaks = []
for window in order.windows(share, 16384):
    block = dataset[window]
    assert not block.error, block.error
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(len(peaks), peaks[len(peaks) // 10], peaks[-1])
"""
GROUP_BYTES = 2 * 2**30


def test_memory_is_flat_over_one_row_group_of_two_gigabytes(tmp_path):
    width, chunk = 256, 2**14
    chunks = GROUP_BYTES // (8 * width * chunk)
    ids = pa.array(np.zeros(chunk * width, np.int64))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(chunk + 1, dtype=np.int32) * width), ids)
    rows = pa.record_batch({"ids": lists, "click": pa.array([1] * chunk, pa.int8())})
    path = tmp_path / "x.parquet"
    table = pa.Table.from_batches([rows] * chunks)  # one piece of memory, many times
    pq.write_table(table, path, row_group_size=len(table), use_dictionary=False, compression="zstd")
    group = pq.ParquetFile(path).metadata.row_group(0)
    assert group.num_rows == chunks * chunk and group.total_byte_size > GROUP_BYTES
    root = Path(__file__).parents[3]
    output = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    windows, early, late = map(float, output.split())
    assert windows == chunks
    assert late < 1.05 * early, f"MB resident after a tenth of the windows and at the end: {output}"

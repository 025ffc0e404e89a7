# SPDX-License-Identifier: MIT
"""Slices by columns that the schema does not read: every row once, in its slice, on any ranks."""

import collections
import decimal
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from tests.support import runs
from trainer.checkpoint.layout import complete
from trainer.data.files import LogFile, discover
from trainer.data.loader import LoaderConfig
from trainer.evaluation import compare
from trainer.evaluation.evaluate import Detail, evaluate_checkpoint, read_config
from trainer.evaluation.slices import SliceCodes, _side_schema
from trainer.evaluation.slicing import find_days, find_slices
from trainer.recipes.schemas import demo

SLICES = ("note", "price", "day", "user_id", "country")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two days of logs, with a column of text with nulls that no schema names."""
    folder = runs.generate(tmp_path_factory.mktemp("sliced") / "logs", rows_per_day=400)
    for path in sorted(folder.rglob("*.parquet")):
        table = pq.read_table(path, partitioning=None)
        notes = [None if i % 11 == 0 else f"n{min(i % 40, 25)}" for i in range(len(table))]
        pq.write_table(table.append_column("note", pa.array(notes)), path, row_group_size=150)
    return folder


def sliced(runtime, checkpoint, data):
    detail = Detail(deep=True, replicates=10, slice_by=SLICES)
    days = f"{runs.DAYS[0]}:{runs.DAYS[1]}"
    return evaluate_checkpoint(checkpoint, str(data), days, runtime, detail=detail)


def predictions(runtime, checkpoint, data):
    """The model's rows in the order of the files, and what it is against itself."""
    rows = compare.Rows(str(data), (":".join(runs.DAYS), ""), read_config(checkpoint)[0].loader)
    batches = []
    compare.Model(checkpoint, rows, runtime).predict(lambda batch, _: batches.append(batch))
    columns = [np.concatenate([one.numpy() for one in part]) for part in zip(*batches, strict=True)]
    return columns, compare.compare([checkpoint, checkpoint], rows, runtime, SLICES, 4)


@pytest.mark.dist
def test_slices_hold_the_rows_and_metrics_of_their_values(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs, "--max-steps", "3")
    processes.run(runs.train, config, tmp_path / "run")
    deep = json.loads((tmp_path / "run" / "evaluation.json").read_text("utf-8"))
    assert {"step", "intervals", "reliability", "user_activity"} < deep.keys()
    assert [*deep["labels"]] == ["click", "like"] and "auc" in deep["labels"]["like"]["intervals"]
    assert deep["sampled_steps"] > 0 and sum(deep["phase_seconds"].values()) > 0
    (checkpoint,) = complete(tmp_path / "run" / "checkpoints")
    first, second = processes.run(sliced, checkpoint, logs)
    assert str(first) == str(second)  # NaN, too
    ((columns, compared),) = processes.run(predictions, checkpoint, logs, world_size=1)
    score, label, _ = (one[:, 0] for one in columns[:3])
    by_two = processes.run(predictions, checkpoint, logs)[0][1]
    for name, (low, high) in compared["models"][0]["intervals"].items():
        assert by_two["models"][0]["intervals"][name] == pytest.approx(
            (low, high), abs=0.2 * (high - low)
        )
    assert str(by_two["slices"].keys()) == str(compared["slices"].keys())
    for column in SLICES:
        parts = [(one["slice"], one["rows"]) for one in compared["slices"][column]]
        assert parts == [(one["slice"], one["rows"]) for one in first["slices"][column]]
        moves = [one["differences"]["auc"]["difference"] for one in compared["slices"][column]]
        assert not np.nan_to_num(moves).any(), "a model is no different from itself"
    table = pq.ParquetDataset(sorted(map(str, logs.rglob("*.parquet"))), partitioning=None).read()
    days = [path.parent.name[3:] for path in sorted(logs.rglob("*.parquet"))]
    rows = [pq.read_metadata(path).num_rows for path in sorted(logs.rglob("*.parquet"))]
    columns = {
        "note": np.array([str(x or "null") for x in table["note"].to_pylist()]),
        "day": np.repeat(days, rows),
        "country": table["country"].to_numpy().astype(str),
    }
    for column, values in columns.items():
        found = {one["slice"]: one for one in first["slices"][column]}
        assert sum(one["rows"] for one in found.values()) == len(label)
        for name in set(values) & found.keys():
            chosen = values == name
            assert found[name]["rows"] == chosen.sum()
            if 0 < label[chosen].sum() < chosen.sum():
                expected = roc_auc_score(label[chosen], score[chosen])
                assert found[name]["auc"] == pytest.approx(expected, abs=1e-6)
    assert {"others", "null"} <= {one["slice"] for one in first["slices"]["note"]}
    price = table["price"].to_numpy()
    bins = first["slices"]["price"]
    assert sum(one["rows"] for one in bins) == len(price)
    edge = float(bins[0]["slice"].removeprefix("below "))
    assert bins[0]["rows"] == pytest.approx((price < edge).sum(), abs=2)
    assert len(first["slices"]["user_id"]) == 21  # twenty users and the others


def test_a_column_that_cannot_be_sliced_is_refused_with_the_way_out(logs):
    files = discover(logs, None, demo())
    with pytest.raises(ValueError, match=r"--slice-by contry: .*did you mean 'country'"):
        find_slices("contry", files, demo())
    with pytest.raises(ValueError, match=r"--slice-by hist_item: expected a column of ids or numb"):
        find_slices("hist_item", files, demo())


def test_ids_that_ingestion_has_hashed_are_named_by_their_texts(logs):
    files = discover(logs, None, demo())
    folders = {Path(file.path).parent for file in files}
    manifests = {folder / "_manifest.json" for folder in folders}
    before = {path: path.read_text("utf-8") if path.is_file() else "{}" for path in manifests}
    try:
        for number, path in enumerate(sorted(manifests)):
            texts = {"country": {"NL": 0} if number else {"BE": 1}}
            path.write_text(json.dumps(json.loads(before[path]) | {"texts": texts}), "utf-8")
        names = find_slices("country", files, demo()).names
        assert {"NL", "BE", "2"} < {*names} and not {"0", "1"} & {*names}
    finally:
        for path, text in before.items():
            path.write_text(text, "utf-8")


def test_numbers_are_cut_into_bins_of_about_equal_rows(logs):
    files = discover(logs, None, demo())
    slicing = find_slices("price", files, demo())
    assert len(slicing.names) == 11
    values = pq.read_table(files[0].path, columns=["price"])["price"].to_numpy()
    values = values[~np.isnan(values)]
    counts = np.bincount(np.searchsorted(slicing.edges, values, "right"), minlength=10)
    assert counts.max() < 0.25 * len(values)  # one price is that of a fifth of the rows


def rows_by_slice(folder, *parts):
    """Return how many rows each slice of column `x` has, as the loader reads them."""
    folder.mkdir()
    for number, part in enumerate(parts):
        item = pa.array(np.arange(len(part)))
        table = pa.table({"item_id": item, "click": pa.array(item.to_numpy() % 2), "x": part})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)
    schema = Schema(
        tables=(Table(name="item", num_embeddings=64, embedding_dim=4),),
        sparse=(SparseFeature(name="item_id", table="item"),),
        labels=(Label(name="click"),),
    )
    slicing = find_slices("x", discover(folder, None, schema), schema)
    assert len({*slicing.names}) == len(slicing.names), "each has a name of its own"
    side = _side_schema(slicing, schema)
    config = LoaderConfig(batch_size=16, num_workers=0, order="none")
    loader = config.build(discover(folder, None, side), side, rank=0, world_size=1, seed=0)
    found = collections.Counter(slicing.names[i] for batch in loader for i in slicing.of(batch))
    loader.close()
    return dict(found)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Texts that are called as the slices of nulls and of others are.
        (
            [pa.array(["null", "others", None, "a"] * 3)],
            {"'null'": 3, "'others'": 3, "null": 3, "a": 3},
        ),
        # Few numbers that are not whole, and decimals, each a slice.
        (
            [pa.array([0.5, 1.5, 1.5, None, float("nan")])],
            {"0.5": 1, "1.5": 2, "null": 2},
        ),
        (
            [pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("2.0")])],
            {"1.5": 1, "2": 1, "null": 1},
        ),
        ([pa.array([1, 2]), pa.array([1.5, 2.0])], {"1": 1, "1.5": 1, "2": 2}),
        # Ids beyond 2^53, which no float tells apart.
        (
            [pa.array([2**60, 2**60 + 1, 2**60 + 1])],
            {str(2**60): 1, str(2**60 + 1): 2},
        ),
        # Ids beyond 2^63, whose bits are kept.
        ([pa.array([2**63 + 5, 7, 7], pa.uint64())], {str(2**63 + 5): 1, "7": 2}),
        # Nothing but nulls in the first file.
        ([pa.nulls(2), pa.array(["x", "y"])], {"x": 1, "y": 1, "null": 2}),
    ],
)
def test_every_row_is_in_the_slice_of_its_value(parts, expected, tmp_path):
    assert rows_by_slice(tmp_path / "log", *parts) == expected


def test_bins_of_large_numbers_that_lie_close_have_names_of_their_own(tmp_path):
    found = rows_by_slice(tmp_path / "log", pa.array(1_507_766_400_000 + np.arange(100) * 250_000))
    assert sum(found.values()) == 100
    assert max(found.values()) <= 12


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([pa.array([1, 2]), pa.array(["x", "y"])], "expected one kind of values, got integer in"),
        ([pa.array([0.5, float("inf")])], "expected finite 32-bit numbers, got inf"),
        ([pa.array([0.5, 1e39])], r"expected finite 32-bit numbers, got 1e\+39"),
    ],
)
def test_values_that_no_slice_can_hold_are_refused_before_anything_is_read(
    parts, message, tmp_path
):
    with pytest.raises(ValueError, match=f"--slice-by x: {message}"):
        rows_by_slice(tmp_path / "log", *parts)


def test_numbers_beyond_the_sign_are_binned_as_what_they_are(tmp_path):
    found = rows_by_slice(tmp_path / "log", pa.array([2**62 + i * 2**56 for i in range(40)]))
    large = pa.array([2**62 + i * 2**56 for i in range(40)], pa.uint64())
    assert rows_by_slice(tmp_path / "other", large) == found
    larger = pa.array([2**63 + i * 2**57 for i in range(40)] + [1, 2], pa.uint64())
    found = rows_by_slice(tmp_path / "larger", larger)
    assert sum(found.values()) == 42
    assert not any("-" in name for name in found)
    assert max(found.values()) <= 6


DAY_MS = 86_400_000


def without_days(folder, *times):
    """Write files without days whose rows have these times, and return them."""
    folder.mkdir()
    for number, part in enumerate(times):
        table = pa.table({"timestamp": part}).append_column("click", pa.nulls(len(part)))
        pq.write_table(table.append_column("like", table["click"]), folder / f"{number}.parquet")
    metas = {path: pq.read_metadata(path) for path in sorted(folder.iterdir())}
    return [LogFile(path=str(path), row_group_rows=(m.num_rows,)) for path, m in metas.items()]


def test_where_no_folder_names_a_day_the_schemas_time_does(tmp_path, logs):
    config = runs.small("dlrm.demo", logs)
    first = 20_454 + np.arange(10) // 4  # 2026-01-01 on
    times = pa.array(first * DAY_MS + DAY_MS - 1)
    later = pa.array((20_456 + np.arange(5)) * DAY_MS).cast(pa.timestamp("ms"))
    files = without_days(tmp_path / "log", times, later.cast(pa.timestamp("us")))
    found = {}
    for world_size in (1, 2):
        ranks = [
            SimpleNamespace(rank=rank, world_size=world_size, is_first=True)
            for rank in range(world_size)
        ]
        days = []
        for rank in ranks:
            codes = SliceCodes("day", config, files, rank)  # type: ignore[arg-type]
            own = len(times) + len(later) if world_size == 1 else 8 - rank.rank
            batches = [codes.of(rows) for rows in (3, 0, own - 3)]
            days += [codes.names[one] for one in np.concatenate(batches)]
            codes.close()
        found[world_size] = collections.Counter(days)
    assert found[1] == found[2]
    assert found[1] == {
        **{"2026-01-01": 4, "2026-01-02": 4, "2026-01-03": 3},
        **{f"2026-01-0{day}": 1 for day in range(4, 8)},
    }


def test_times_that_are_no_milliseconds_are_refused_as_days(tmp_path):
    files = without_days(tmp_path / "log", pa.array([1_767_225_600]))
    with pytest.raises(ValueError, match="20 days after 1970-01-01, which is not between 1990 and"):
        find_days("timestamp", files)
    many = pa.array((20_454 + np.arange(1_001)) * DAY_MS)
    with pytest.raises(ValueError, match="expected at most 1,000 days, got 1,001 in column 'tim"):
        find_days("timestamp", without_days(tmp_path / "many", many))
    with pytest.raises(ValueError, match=r"--slice-by day: .*dt=YYYY-MM-DD folders or a schema's"):
        find_slices("day", files, demo())

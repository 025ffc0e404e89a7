# SPDX-License-Identifier: MIT
import dataclasses
import datetime
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature, Table
from tests.support.logs import SCHEMA, records
from trainer.data.collate import empty_batch, pad_batch, to_batch
from trainer.data.columns import RowError
from trainer.data.hashing import hash_strings, to_rows


def one(transform, values, num_embeddings=200, type_=None, **feature):
    """Return the table rows that one sparse feature gets for `values`."""
    schema = Schema(
        tables=(Table(name="t", num_embeddings=num_embeddings, embedding_dim=4),),
        sparse=(SparseFeature(name="f", table="t", transform=transform, **feature),),
        labels=(Label(name="y"),),
    )
    array = values if isinstance(values, pa.Array) else pa.array(values, type_)
    rows = pa.table({"f": array, "y": pa.array([0] * len(array), pa.int8())})
    return to_batch(rows, schema).sparse["f"].values().tolist()


LISTS = st.lists(st.none() | st.lists(st.none() | st.integers(0, 2**62), max_size=7), max_size=12)


@given(LISTS, st.integers(1, 5), st.integers(0, 3), st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_a_list_gives_the_rows_of_its_newest_ids_and_missing_ids_row_0(values, keep, start, kind):
    list_type = (pa.list_, pa.large_list, pa.list_)[kind](pa.int64())
    if kind == 2:
        values = [v and (v * 3)[:3] if v else None for v in values]
        list_type = pa.list_(pa.int64(), 3)
    schema = dataclasses.replace(
        SCHEMA,
        tables=(Table(name="t", num_embeddings=50, embedding_dim=4),),
        sparse=(SparseFeature(name="f", table="t", kind="bag", max_length=keep),),
        dense=(),
        user="",
    )
    table = pa.table({"f": pa.array(values, list_type), "click": [1] * len(values)})
    sparse = to_batch(table.slice(start), schema).sparse
    newest = [(v or [])[-keep:] for v in values[start:]]
    assert sparse.lengths().tolist() == [len(v) for v in newest]
    assert sparse.values().tolist() == [
        0 if id_ is None else int(to_rows(np.array([id_]), 50)[0]) for v in newest for id_ in v
    ]


def test_a_batch_holds_every_kind_of_feature_in_the_declared_order():
    table = records(40)
    batch = to_batch(table, SCHEMA)
    values = {name: batch.sparse[name] for name in batch.sparse.keys()}  # noqa: SIM118
    assert list(values) == ["item", "tags", "place", "clicks", "ages"]
    assert torch.equal(values["item"].lengths(), torch.ones(40, dtype=torch.int32))
    assert values["clicks"].lengths().tolist() == [min(r % 6, 3) for r in range(40)]
    assert torch.equal(values["clicks"].lengths(), values["ages"].lengths())
    assert values["place"].values().tolist() == [r % 5 + 1 for r in range(40)]
    items = to_rows(hash_strings(table["item"]), 100)
    assert values["item"].values().tolist() == items.tolist() and items[11] == 0
    np.testing.assert_allclose(batch.dense[:, 0], np.log1p(np.arange(40) / 7), rtol=1e-6)
    assert batch.labels[:, 0].tolist() == [float(r % 3 == 0) for r in range(40)]
    assert batch.weights.tolist() == [[1.0]] * 40
    assert batch.groups.unique().numel() == 40 and batch.groups.dtype == torch.int64
    assert batch.num_examples == 40 and batch.actions.numel() == 0


def test_integers_of_any_width_floats_and_booleans_of_one_value_share_a_row():
    expected = one("hash", [0, 1, None], type_=pa.int64())
    assert expected[2] == 0
    for type_ in (pa.int8(), pa.int16(), pa.uint32(), pa.uint64(), pa.float32(), pa.bool_()):
        assert one("hash", pa.array([0, 1, None]).cast(type_)) == expected
    assert one("hash", pa.array([0, 1, None]).dictionary_encode()) == expected
    assert one("hash", [0.0, 1.0, math.nan]) == expected
    negative = one("hash", [-1], type_=pa.int64())
    assert one("hash", [2**64 - 1], type_=pa.uint64()) == negative


def test_ids_hashed_beforehand_get_the_rows_of_their_text():
    text = pa.array(["a", "bc", None, "ünïcode"])
    assert one("hash", text) == one("hash", hash_strings(text))


def test_a_fraction_is_no_id():
    with pytest.raises(RowError, match=r"feature 'f': expected whole numbers .*got 1\.5, at row 1"):
        one("hash", [1.0, 1.5])


def test_identity_maps_v_to_row_v_plus_1_and_names_what_is_out_of_range():
    assert one("identity", [0, 3, None], 5) == [1, 4, 0]
    for bad in (4, -1):
        with pytest.raises(RowError) as error:
            one("identity", [0, bad], 5, column="f")
        for part in ("feature 'f'", "table 't' of 5 rows", "[0, 3]", f"got {bad}", "at row 1"):
            assert part in str(error.value)
    with pytest.raises(RowError, match=r"got 9.* at row 2"):
        one("identity", [[1], [], [0, 9]], 5, kind="bag", max_length=2)
    assert one("identity", [[9, 0]], 5, kind="bag", max_length=1) == [1], "what is cut is not read"


@pytest.mark.parametrize(("policy", "expected"), [("count", {"place": 2}), ("oov", {})])
def test_values_out_of_range_read_row_0_and_are_counted_where_that_is_asked(policy, expected):
    schema = dataclasses.replace(
        SCHEMA,
        sparse=(
            *(f for f in SCHEMA.sparse if f.name != "place"),
            SparseFeature(name="place", table="place", transform="identity", out_of_range=policy),
        ),
    )
    table = records(3).set_column(3, "place", pa.array([0, 77, -5]))
    counts = Counter()
    assert to_batch(table, schema, counts).sparse["place"].values().tolist() == [1, 0, 0]
    assert counts == expected


def test_log_square_buckets_equal_the_published_ones():
    values = [0, 1, 2, 3, 10, 100, 1000, 1382, 65535, -4, None]
    buckets = [0, 1, 2, 1, 5, 21, 47, 52, 122, 0, -1]
    assert one("log_square", values) == [bucket + 1 for bucket in buckets]
    assert one("log_square", [65535, math.inf, 21], 10) == [9, 9, 9], "capped at the last row"
    assert one("log_square", [1.9, 2.5, math.nan]) == [2, 1, 0]


def test_log_quarter_buckets_are_four_to_a_factor_of_e():
    values = [0, 1, 2, 3, 10, 100, 1000, -4, None, math.nan]
    buckets = [0, 2, 4, 5, 9, 18, 27, 0, -1, -1]
    assert one("log_quarter", values) == [bucket + 1 for bucket in buckets]
    assert one("log_quarter", [1e9, math.inf], 10) == [9, 9], "capped at the last row"


def test_hours_are_read_from_milliseconds_and_timestamps_alike():
    monday = datetime.datetime(2017, 10, 2, 13, 59, 59, tzinfo=datetime.UTC)
    sunday = datetime.datetime(2017, 10, 8, 23, 0, tzinfo=datetime.UTC)
    for unit in ("s", "ms", "us", "ns"):
        stamps = pa.array([monday, sunday, None], pa.timestamp(unit, "UTC"))
        assert one("hour_of_day", stamps) == [14, 24, 0]
        assert one("hour_of_week", stamps) == [14, 168, 0]
    numbers = [int(day.timestamp() * 1000) for day in (monday, sunday)]
    assert one("hour_of_week", numbers) == [14, 168]
    assert one("hour_of_day", [-1]) == [24], "the hour before 1970"
    with pytest.raises(ValueError, match="at least 169 rows, got 168"):
        one("hour_of_week", [0], 168)


def replaced(name, values, type_=None, rows=4, schema=SCHEMA):
    table = records(rows)
    index = table.schema.get_field_index(name)
    return to_batch(table.set_column(index, name, pa.array(values, type_)), schema)


def test_labels_are_0_or_1_and_a_null_one_has_weight_0():
    batch = replaced("click", [1.0, None, 0.0, math.nan])
    assert batch.labels[:, 0].tolist() == [1, 0, 0, 0]
    assert batch.weights[:, 0].tolist() == [1, 0, 1, 0]
    with pytest.raises(
        RowError, match=r"column 'click' \(label\): expected 0, 1 .*got 2, at row 3"
    ):
        replaced("click", [0, 1, 0, 2])


def test_weights_come_from_their_column_and_must_be_numbers_not_below_0():
    schema = dataclasses.replace(SCHEMA, labels=(Label(name="click", weight="price"),))
    assert replaced("price", [0, 0.5, 2, 3], schema=schema).weights[:, 0].tolist() == [0, 0.5, 2, 3]
    for bad in (-1.0, None, math.inf):
        with pytest.raises(RowError, match=r"column 'price' \(weight\).* at row 2"):
            replaced("price", [1.0, 1.0, bad, 1.0], schema=schema)


def test_dense_nulls_are_nan_logarithms_keep_the_sign_and_infinity_is_refused():
    dense = replaced("price", [None, -1.0, 0.0, 1.0]).dense[:, 0]
    assert math.isnan(dense[0])
    np.testing.assert_allclose(dense[1:], [-math.log(2), 0, math.log(2)], rtol=1e-6)
    schema = dataclasses.replace(SCHEMA, dense=(DenseFeature(name="price"),))
    with pytest.raises(RowError, match=r"column 'price': expected a finite .*got 1e.*, at row 1"):
        replaced("price", [1.0, 1e300, 1.0, 1.0], schema=schema)


def test_sequences_of_a_history_must_have_equal_lengths():
    with pytest.raises(
        RowError, match=r"column 'ages': expected 1 values.*'h' have, got 2, at row 1"
    ):
        replaced("ages", [[], [1, 2], [1, 2], [1, 2, 3]])


def test_past_actions_are_aligned_with_their_history_and_checked():
    schema = dataclasses.replace(SCHEMA, history_actions={"h": "acts"})
    table = records(6).append_column("acts", pa.array([[1] * (r % 6) for r in range(6)]))
    batch = to_batch(table, schema)
    assert batch.actions.tolist() == [1] * batch.sparse["clicks"].values().numel()
    bad = pa.array([[1] * (r % 6) if r < 5 else [1, 1, 1, 1, 2] for r in range(6)])
    with pytest.raises(RowError, match=r"'acts': expected actions in \[0, 1\].*got 2, at row 5"):
        to_batch(table.set_column(8, "acts", bad), schema)


def test_a_null_user_is_an_error():
    with pytest.raises(RowError, match=r"column 'row' \(user\): expected no nulls.* at row 2"):
        replaced("row", [1, 2, None, 3])


def test_missing_and_wrong_columns_are_all_named():
    table = records(2).drop_columns("item").set_column(1, "tags", pa.array([1, 2]))
    with pytest.raises(ValueError) as error:
        to_batch(table, SCHEMA)
    assert "column 'item' (sparse feature 'item'): expected integers or floats" in str(error.value)
    assert "column 'tags' (sparse feature 'tags'): expected a list of" in str(error.value)


def test_a_batch_of_no_rows_and_one_of_only_nulls_are_batches():
    assert to_batch(records(0), SCHEMA).num_examples == 0
    table = records(3)
    nulls = {name: pa.nulls(3) for name in table.column_names}
    nulls |= {"row": table["row"], "price": pa.nulls(3)}
    batch = to_batch(pa.table(nulls), SCHEMA)
    assert batch.sparse["item"].values().tolist() == [0, 0, 0]
    assert batch.sparse["clicks"].lengths().tolist() == [0, 0, 0]
    assert batch.weights.sum() == 0


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_padding_has_weight_0_the_missing_id_and_empty_lists(rows):
    batch = to_batch(records(rows, 5), SCHEMA) if rows else empty_batch(SCHEMA)
    padded = pad_batch(batch, 7, SCHEMA)
    assert padded.num_examples == rows and padded.num_padding == 7 - rows
    assert padded.weights[rows:].sum() == 0 and padded.weights.shape == (7, 1)
    assert padded.dense.shape == (7, 1) and padded.groups.shape == (7,)
    for feature in SCHEMA.sparse:
        before, after = batch.sparse[feature.name], padded.sparse[feature.name]
        extra = int(feature.kind == "id") * (7 - rows)
        assert after.lengths().tolist()[rows:] == [int(feature.kind == "id")] * (7 - rows)
        assert after.values().tolist() == before.values().tolist() + [0] * extra
    assert pad_batch(padded, 7, SCHEMA) is padded
    with pytest.raises(ValueError, match="at most 6 rows, got 7"):
        pad_batch(padded, 6, SCHEMA)

# SPDX-License-Identifier: MIT
"""The schema: what it derives, what it refuses, and that it comes back from plain data and YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from embeddings.schema.plain import suggest
from embeddings.schema.schema import (
    DenseFeature,
    Label,
    Schema,
    SparseFeature,
    Table,
    load_schema,
    schema_from_dict,
)

ITEM = Table(name="item", num_embeddings=100, embedding_dim=8)
LABEL = Label(name="click")
CLICKS = SparseFeature(name="clicks", table="item", kind="sequence", max_length=5, history="h")
SCHEMA = Schema(
    tables=(ITEM, Table(name="tag", num_embeddings=10, embedding_dim=4)),
    sparse=(
        SparseFeature(name="item", table="item", column="item_id", side="item"),
        CLICKS,
        SparseFeature(name="tags", table="tag", kind="bag", max_length=3),
    ),
    dense=(DenseFeature(name="price", transform="log1p"),),
    labels=(LABEL, Label(name="buy", weight="buy_weight")),
    user="user_id",
    history_actions={"h": "actions"},
)


def test_columns_are_everything_a_log_must_have_once_and_in_order() -> None:
    expected = ("item_id", "clicks", "tags", "price", "actions", "click", "buy", "buy_weight")
    assert SCHEMA.columns == (*expected, "user_id")


def test_histories_group_sequences_by_name() -> None:
    assert SCHEMA.histories == {"h": (CLICKS,)}


def test_a_schema_survives_plain_data_and_yaml(tmp_path: Path) -> None:
    assert schema_from_dict(SCHEMA.to_dict()) == SCHEMA
    path = tmp_path / "schema.yaml"
    path.write_text(yaml.safe_dump(SCHEMA.to_dict()), encoding="utf-8")
    assert load_schema(path) == SCHEMA


def test_the_fingerprint_changes_with_any_field_and_with_nothing_else() -> None:
    assert schema_from_dict(SCHEMA.to_dict()).fingerprint() == SCHEMA.fingerprint()
    larger = dataclasses.replace(ITEM, num_embeddings=101)
    changed = dataclasses.replace(SCHEMA, tables=(larger, SCHEMA.tables[1]))
    assert changed.fingerprint() != SCHEMA.fingerprint()


def test_weights_of_ids_are_a_column_and_leave_schemas_without_any_their_fingerprint() -> None:
    assert "weights" not in SCHEMA.to_dict()["sparse"][2]
    assert SCHEMA.fingerprint() == "a78fafffcfe84ce4"
    tags = dataclasses.replace(SCHEMA.sparse[2], weights="tag_scores")
    schema = dataclasses.replace(SCHEMA, sparse=(*SCHEMA.sparse[:2], tags))
    assert schema.has_weights and not SCHEMA.has_weights
    assert set(schema.columns) - set(SCHEMA.columns) == {"tag_scores"}
    assert schema.fingerprint() != SCHEMA.fingerprint()
    assert schema_from_dict(schema.to_dict()) == schema


def test_yaml_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.yaml"
    path.write_text("tables: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"schema\.yaml: not valid YAML"):
        load_schema(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"schema\.yaml: expected a mapping, got NoneType"):
        load_schema(path)
    for unreadable in (tmp_path, tmp_path / "nothing.yaml"):
        with pytest.raises(ValueError, match=rf"{unreadable}: expected YAML in UTF-8, cannot"):
            load_schema(unreadable)


def _spoil(*keys: Any, value: Any) -> dict[str, Any]:
    """Return the schema as plain data with one value replaced."""
    values = SCHEMA.to_dict()
    place: Any = values
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (_spoil("tabels", value=[]), r"schema\.tabels: unknown key, did you mean 'tables'"),
        (
            _spoil("tables", 0, "num_embedings", value=3),
            r"schema\.tables\[0\]\.num_embedings: unknown key, did you mean 'num_embeddings'",
        ),
        (
            _spoil("tables", 0, "num_embeddings", value="many"),
            r"schema\.tables\[0\]\.num_embeddings: expected int, got 'many' \(str\)",
        ),
        (
            _spoil("tables", 0, "num_embeddings", value=True),
            r"schema\.tables\[0\]\.num_embeddings: expected int, got True",
        ),
        (
            _spoil("sparse", 2, "pooling", value="mena"),
            r"schema\.sparse\[2\]\.pooling: expected one of .*, did you mean 'mean'",
        ),
        (_spoil("sparse", value="item"), r"schema\.sparse: expected a list, got str"),
        (_spoil("history_actions", value=[]), r"schema\.history_actions: expected a mapping"),
        (_spoil("labels", 0, value={}), r"schema\.labels\[0\]\.name: missing key"),
        (
            _spoil("tables", 0, "embedding_dim", value=6),
            r"schema\.tables\[0\]: table 'item': embedding_dim must be .* got 6; use 8",
        ),
        (
            _spoil("tables", 0, "name", value="item.id"),
            r"schema\.tables\[0\]: table 'item\.id': .* write it without dots",
        ),
        (_spoil("tables", 0, "init_std", value=-1), r"init_std must be a number >= 0, got -1"),
        (_spoil("tables", 0, "init_std", value=float("nan")), r"init_std must be .* got nan"),
        (_spoil("labels", 0, "name", value=""), r"a label needs a name, one of them is empty"),
        (
            _spoil("sparse", 0, "table", value="itme"),
            r"names table 'itme', which does not exist, did you mean 'item'",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_from_dict(values)


def test_a_whole_number_is_a_float_where_a_float_is_meant() -> None:
    schema = schema_from_dict(_spoil("tables", 0, "init_std", value=1))
    assert schema.tables[0].init_std == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": (ITEM, ITEM)}, r"table names must be unique, these are repeated: \['item'\]"),
        ({"dense": (DenseFeature(name="item"),)}, "feature names must be unique"),
        ({"labels": (LABEL, LABEL)}, "label names must be unique"),
        ({"labels": ()}, "at least one label"),
        ({"sparse": ()}, "at least one sparse feature"),
        ({"sparse": (CLICKS,)}, r"no feature uses the tables \['tag'\]"),
        ({"history_actions": {"hh": "actions"}}, "names 'hh', .* did you mean 'h'"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SCHEMA, **change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "id", "max_length": 3}, "max_length has no effect on kind 'id'"),
        ({"kind": "bag"}, "kind 'bag' needs max_length >= 1, got 0"),
        ({"kind": "sequence", "max_length": 3}, "kind 'sequence' and history go together"),
        ({"kind": "id", "history": "h"}, "kind 'sequence' and history go together"),
        ({"position": 1}, "position counts from the newest entry"),
        ({"kind": "bag", "max_length": 3, "position": -1}, "goes with kind 'id'"),
        ({"kind": "bag", "max_length": 3, "transform": "length"}, "needs kind 'id'"),
        ({"weights": "w"}, "weights are .* go with kind 'bag', got kind 'id'"),
        (
            {"kind": "sequence", "max_length": 3, "history": "h", "weights": "w"},
            "go with kind 'bag', got kind 'sequence'",
        ),
        ({"kind": "bag", "max_length": 3, "weights": "f"}, "weights names the column of the ids"),
    ],
)
def test_a_feature_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseFeature(name="f", table="item", **settings)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (10, 0), (10, 6)])
def test_a_table_that_cannot_be_looked_up_is_refused(rows: int, width: int) -> None:
    with pytest.raises(ValueError, match="table 't'"):
        Table(name="t", num_embeddings=rows, embedding_dim=width)


def test_a_suggestion_is_made_only_for_something_close() -> None:
    assert suggest("itme", ["item", "user"]) == ", did you mean 'item'?"
    assert suggest("zebra", ["item", "user"]) == ""

# SPDX-License-Identifier: MIT
"""A dataset configuration of FuxiCTR becomes a schema, and what has no counterpart is said."""

import pytest
import yaml

from embeddings.schema.schema import load_schema
from pipelines.fuxictr import convert, main

CONFIG = """
criteo_x1:
    data_root: ../data/
    data_format: csv
    feature_cols:
        - {name: [I1, I2], active: true, dtype: float, type: numeric, fill_na: 0}
        - {name: [C1, C2], active: true, dtype: str, type: categorical, vocab_size: 9000}
        - {name: old, active: false, dtype: str, type: categorical}
        - {name: item, active: true, dtype: str, type: categorical, source: item, embedding_dim: 10}
        - {name: clicks, active: true, dtype: str, type: sequence, splitter: ^, max_len: 20,
           share_embedding: item}
        - {name: request, active: true, dtype: str, type: meta}
    label_col: {name: label, dtype: float}
    group_id: user
"""


def test_columns_tables_and_labels_are_taken_over(tmp_path, capsys):
    (tmp_path / "dataset_config.yaml").write_text(CONFIG)
    path = tmp_path / "schema.yaml"
    assert main([str(tmp_path / "dataset_config.yaml"), "--output", str(path)]) == 0
    schema = load_schema(path)
    assert [one.name for one in schema.dense] == ["I1", "I2"]
    assert [one.name for one in schema.sparse] == ["C1", "C2", "item", "clicks"]
    assert schema.table("C1").num_embeddings == 36_000
    assert (schema.table("item").num_embeddings, schema.table("item").embedding_dim) == (
        100_000,
        12,
    )
    item, clicks = schema.sparse[2:]
    assert (item.side, clicks.table, clicks.kind, clicks.max_length) == ("item", "item", "bag", 20)
    assert (schema.user, schema.labels[0].name) == ("user", "label")
    text = path.read_text("utf-8")
    assert "--list-separator '^'" in text
    assert "clicks: read as bags" in text
    assert main([str(tmp_path / "dataset_config.yaml"), "--output", str(path)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "categorial"}, r"feature_cols\[0\]\.type: expected one of"),
        (
            {"vocab_sise": 3},
            r"feature_cols\[0\]\.vocab_sise: not known here, did you mean 'vocab_size'",
        ),
        ({7: 3}, r"feature_cols\[0\]\.7: not known here"),
        ({"vocab_size": "many"}, r"\[0\]\.vocab_size: expected a whole number .* got 'many'"),
        ({"vocab_size": float("inf")}, r"\[0\]\.vocab_size: expected a whole number .* got inf"),
        ({"embedding_dim": [4]}, r"\[0\]\.embedding_dim: expected a whole number .* got \[4\]"),
        ({"max_len": -1}, r"\[0\]\.max_len: expected a whole number .* got -1"),
        ({"active": "false"}, r"\[0\]\.active: expected true or false \(no quotes\), got 'false'"),
        ({"name": [None]}, r"\[0\]: expected names of columns and tables, got None"),
        ({"share_embedding": {"a": 1}}, r"expected names of columns and tables, got \{'a': 1\}"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(change, message):
    values = yaml.safe_load(CONFIG)
    values["criteo_x1"]["feature_cols"][0] |= change
    with pytest.raises(ValueError, match=message):
        convert(values, "", 1_000, 16)


def test_several_datasets_need_a_name():
    values = yaml.safe_load(CONFIG)
    values["other"] = values["criteo_x1"]
    with pytest.raises(ValueError, match="name one with --dataset"):
        convert(values, "", 1_000, 16)
    assert convert(values, "other", 1_000, 16)[1] == "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1,", "not valid YAML: while parsing"),
        ("a: *b", "not valid YAML: found undefined alias"),
        ("d: {feature_cols: 7, label_col: {name: y}}", "d.feature_cols: expected a list of feat"),
        ("d: {7: 1, x: 2}", "expected feature_cols and label_col with a name, got ['7', 'x']"),
        ("\xff", "can't decode byte"),
    ],
)
def test_a_malformed_file_is_one_line_of_error(text, message, tmp_path, capsys):
    path = tmp_path / "dataset_config.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_what_a_remark_holds_never_becomes_a_part_of_the_schema():
    values = yaml.safe_load(CONFIG)
    values["criteo_x1"]["feature_cols"][1] |= {"fill_na": "none\nuser: admin", "vocab_size": "1e3"}
    values["criteo_x1"]["feature_cols"][4] |= {"embedding_dim": 64}
    text, _ = convert(values, "", 1_000, 16)
    schema = yaml.safe_load(text)
    assert schema["user"] == "user"
    assert schema["tables"][0]["num_embeddings"] == 4_000
    assert "clicks: embedding_dim 64 is not taken over: item's is 12 wide" in text

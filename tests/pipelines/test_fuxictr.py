# SPDX-License-Identifier: MIT
"""A dataset configuration of FuxiCTR becomes a schema, and what has no counterpart is said."""

import pytest
import yaml

from embeddings.schema.schema import load_schema, schema_from_dict
from pipelines.fuxictr import convert, main
from pipelines.ingest import ingest
from pipelines.ingestion.casting import Times
from pipelines.ingestion.ingestion import IngestConfig

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
        ("d: {data_root: a, data_root: b}", "key 'data_root' is already given in line 1"),
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


# The settings of published configurations, with fewer columns.
PUBLISHED = {
    "criteo_x4": """
criteo_x4:
    data_format: csv
    min_categr_count: 10
    feature_cols:
        - {name: [I1, I2], active: True, dtype: float, type: categorical,
           preprocess: convert_to_bucket, na_value: 0}
        - {name: [C1, C2], active: True, dtype: str, type: categorical, na_value: ""}
    label_col: {name: Label, dtype: float}
""",
    "avazu_x4": """
avazu_x4:
    min_categr_count: 2
    feature_cols:
        - {name: id, active: False, dtype: str, type: categorical}
        - {name: hour, active: True, dtype: str, type: categorical, preprocess: convert_hour}
        - {name: [C1, site_id], active: True, dtype: str, type: categorical}
        - {name: weekday, active: True, dtype: str, type: categorical, preprocess: convert_weekday}
        - {name: weekend, active: True, dtype: str, type: categorical, preprocess: convert_weekend}
    label_col: {name: click, dtype: float}
""",
    "tiny_emb": """
tiny_emb:
    data_format: parquet
    feature_cols:
        - {active: true, dtype: float, name: feat1, type: numeric}
        - {active: true, dtype: list, name: feat3, pretrain_dim: 96, type: embedding}
        - {name: item, dtype: str, type: categorical, pretrained_emb: item.npz, pretrain_dim: 32,
           freeze_emb: True, pretrain_usage: init, emb_output_dim: 16, remap: False}
        - {name: again, dtype: str, type: categorical, preprocess: copy_from(item)}
        - {name: bucket, dtype: str, type: categorical, category_processor: hash_bucket,
           num_buckets: 50}
        - {name: cut, dtype: float, type: categorical, category_processor: quantile_bucket}
    label_col: {dtype: float, name: label}
""",
}


def convert_published(name):
    text, _ = convert(yaml.safe_load(PUBLISHED[name]), "", 1_000, 16)
    return schema_from_dict(yaml.safe_load(text)), text


def test_counts_of_criteo_become_their_buckets():
    schema, text = convert_published("criteo_x4")
    by_name = {one.name: one for one in schema.sparse}
    assert [by_name[name].transform for name in ("I1", "I2", "C1")] == ["log_square"] * 2 + ["hash"]
    assert "all columns: min_categr_count 10 has no counterpart" in text
    assert not schema.timestamp and "na_value" not in text, "0 and nothing are no other value here"


def test_hours_and_days_of_avazu_come_from_the_rows_time(tmp_path):
    schema, text = convert_published("avazu_x4")
    by_name = {one.name: one for one in schema.sparse}
    assert (by_name["hour"].transform, by_name["weekday"].transform) == (
        "hour_of_day",
        "hour_of_week",
    )
    assert by_name["weekday"].column == schema.timestamp == "hour"
    assert "weekend" not in by_name and "weekend: left out, hour_of_week tells" in text
    assert "--timestamp-format '%y%m%d%H'" in text
    (tmp_path / "a.csv").write_text("hour,C1,site_id,click\n14102100,1005,1fbe,0\n14102123,7,x,1\n")
    config = IngestConfig(times=Times(pattern="%y%m%d%H"))
    assert ingest([str(tmp_path / "a.csv")], schema, tmp_path / "out", config).rows_in == 2


def test_vectors_pretrained_tables_and_processors_are_said():
    schema, text = convert_published("tiny_emb")
    by_name = {one.name: one for one in schema.sparse}
    assert "feat3: a vector of 96 numbers a row is left out" in text
    assert "item: pretrained_emb item.npz has no counterpart" in text
    assert by_name["again"].column == "item"
    assert schema.table("bucket").num_embeddings == 51
    assert by_name["cut"].transform == "log_quarter" and "cut: quantile buckets" in text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"preprocess": "my_function"}, r"\.preprocess: .*got 'my_function'; compute the column"),
        ({"preprocess": "convert_weekday"}, "no column has convert_hour; add that column, or"),
        ({"category_processor": "tree"}, r"\.category_processor: expected one of .* remove it"),
        ({"num_buckets": -4}, r"\.num_buckets: expected a whole number"),
    ],
)
def test_what_would_give_a_column_another_meaning_is_refused(setting, message):
    values = yaml.safe_load(CONFIG)
    values["criteo_x1"]["feature_cols"][1] |= setting
    with pytest.raises(ValueError, match=message):
        convert(values, "", 1_000, 16)

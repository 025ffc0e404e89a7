# SPDX-License-Identifier: MIT
"""What a recipe does with a log that it was not written for."""

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.schema.schema import Label, Schema, SparseFeature, Table
from trainer.checkpoint.early_stopping import EarlyStoppingConfig
from trainer.config.config import DataConfig
from trainer.config.fit_to_log import (
    check_schema,
    choose_split,
    choose_validation,
    fit_recipe,
    unsaid,
)
from trainer.recipes.load import load_recipe

SCHEMA = Schema(
    tables=(Table(name="a", num_embeddings=50, embedding_dim=8),),
    sparse=(
        SparseFeature(name="a", table="a"),
        SparseFeature(name="past", table="a", kind="sequence", history="h", max_length=33),
    ),
    labels=(Label(name="y"),),
)


@pytest.fixture
def days(tmp_path):
    for day in ("05-01", "05-02", "05-04"):
        (tmp_path / f"dt=2026-{day}").mkdir()
        (tmp_path / f"dt=2026-{day}" / "a.parquet").touch()
    return tmp_path


def split(path, recipe="dlrm.demo", output=None, **chosen):
    config = load_recipe(recipe)
    own = config.data
    config = dataclasses.replace(config, data=dataclasses.replace(own, path=str(path), **chosen))
    found, note = choose_split(config, own, output or path / "run")
    data = found.data
    return (data.train_days, data.test_days, data.train_rows, data.test_rows), note


def test_the_last_day_tests_where_the_log_has_none_of_the_recipes_days(days):
    chosen, note = split(days)
    assert chosen == ("2026-05-01:2026-05-02", "2026-05-04", "", "")
    assert "2026-01-01:2026-01-03" in note


def test_the_last_fifth_tests_where_there_are_no_days(tmp_path):
    (tmp_path / "a.parquet").touch()
    assert split(tmp_path)[0] == ("", "", "0:0.8", "0.8:1")
    assert split(tmp_path, "dlrm.frappe")[0] == ("", "", "0:0.8", "0.8:1")


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ({"train_days": "2026-05-01"}, ("2026-05-01", "2026-05-02", "", "")),
        ({"test_days": "2026-05-02"}, ("2026-05-01:2026-05-01", "2026-05-02", "", "")),
        ({"train_rows": "0:0.6"}, ("", "", "0:0.6", "0.6:1")),
        ({"test_rows": "0.9:1"}, ("", "", "0:0.9", "0.9:1")),
    ],
)
def test_half_a_choice_is_completed(days, said, chosen):
    assert split(days, "dlrm.frappe", **said)[0] == chosen


def test_a_choice_is_left_alone(days):
    said = {"train_days": "2026-05-01", "test_days": "2026-05-04"}
    assert split(days, **said) == (("2026-05-01", "2026-05-04", "", ""), "")
    # The user's own days are not given up, even if the log has none of them: that is an error.
    wrong = {"train_days": "2026-06-01", "test_days": "2026-06-02"}
    assert split(days, **wrong)[0][:2] == ("2026-06-01", "2026-06-02")
    assert split(days, "dlrm.frappe", allow_overlap=True)[1] == ""


def test_a_recipe_whose_days_are_there_keeps_them(tmp_path):
    for day in ("01", "02", "03", "04", "05"):
        (tmp_path / f"dt=2026-01-{day}").mkdir()
        (tmp_path / f"dt=2026-01-{day}" / "a.parquet").touch()
    assert split(tmp_path)[0][:2] == ("2026-01-01:2026-01-03", "2026-01-04")


@pytest.mark.parametrize(
    ("days", "recipe"),
    [
        (("2026-01-03", "2026-01-04", "2026-01-12"), "dlrm.demo"),
        (("2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04", "2026-01-09"), "dlrm.demo"),
        (("2017-10-09", "2017-10-10", "2017-10-31"), "dlrm.globo"),
    ],
)
def test_a_recipes_days_never_apply_to_a_log_with_a_schema_of_its_own(tmp_path, days, recipe):
    for day in days:
        (tmp_path / f"dt={day}").mkdir()
        (tmp_path / f"dt={day}" / "a.parquet").touch()
    chosen, note = split(tmp_path, recipe, schema="own.yaml")
    assert chosen == (f"{days[0]}:{days[-2]}", days[-1], "", "")
    assert "are of another log than this schema's; rows chosen: train_days" in note


def test_what_the_command_line_says_holds_even_if_the_recipe_says_the_same():
    own = load_recipe("dlrm.demo").data
    assert own.train_days and own.test_days
    for words in (["--data.train-days", own.train_days], [f"--data.train_days={own.train_days}"]):
        left = unsaid(own, ["--data.path", "logs", *words])
        assert (left.train_days, left.test_days) == ("", own.test_days)
    assert unsaid(own, ["--data.path", "--data.train"]) == own


def test_a_run_that_has_begun_keeps_its_days_when_the_recipes_have_come(days):
    output = days / "run"
    output.mkdir()
    begun = DataConfig(path=str(days), train_days="2026-05-01", test_days="2026-05-02")
    (output / "config.json").write_text(json.dumps({"data": dataclasses.asdict(begun)}))
    for day in ("01", "02", "03", "04"):  # those of the recipe
        (days / f"dt=2026-01-{day}").mkdir()
        (days / f"dt=2026-01-{day}" / "a.parquet").touch()
    assert split(days, output=output)[0] == ("2026-05-01", "2026-05-02", "", "")


def test_a_run_that_has_begun_keeps_its_days_when_others_have_come(days):
    output = days / "run"
    output.mkdir()
    begun = DataConfig(path=str(days), train_days="2026-05-01", test_days="2026-05-02")
    (output / "config.json").write_text(json.dumps({"data": dataclasses.asdict(begun)}))
    assert split(days, output=output)[0] == ("2026-05-01", "2026-05-02", "", "")


def test_settings_of_columns_that_the_schema_lacks_are_dropped():
    globo = load_recipe("tokenformer.globo")
    assert globo.sparse.table_learning_rates
    assert globo.model.tokenizer.stream_fields
    fitted = fit_recipe(globo, SCHEMA)
    assert fitted.schema == SCHEMA
    assert not fitted.sparse.table_learning_rates
    assert not fitted.model.tokenizer.stream_fields
    assert fitted.model.tower.max_length == 33


def validated(path, output=None, **chosen):
    config = load_recipe("dlrm.frappe")
    config = dataclasses.replace(
        config,
        data=DataConfig(path=str(path), **chosen),
        epochs=5,
        early_stopping=EarlyStoppingConfig(patience=2),
    )
    found, note = choose_validation(config, output or path / "run")
    data = found.data
    rows = (data.train_days, data.train_rows, data.validation_days, data.validation_rows)
    return rows, note


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (
            {"train_days": "2026-05-01:2026-05-03", "test_days": "2026-05-04"},
            ("2026-05-01:2026-05-01", "", "2026-05-02", ""),
        ),
        ({"test_path": "other"}, ("2026-05-01:2026-05-02", "", "2026-05-04", "")),
        (
            {"train_days": "2026-05-01", "test_days": "2026-05-02"},
            ("2026-05-01", "0:0.9", "2026-05-01", "0.9:1"),
        ),
        ({"train_rows": "0.2:0.7"}, ("", "0.2:0.65", "", "0.65:0.7")),
    ],
    ids=["the last training day", "of all days", "of one day", "of a share"],
)
def test_early_stopping_takes_its_rows_from_training_and_a_resumed_run_the_same(
    chosen, expected, days
):
    rows, note = validated(days, **chosen)
    assert rows == expected and "which do not train" in note
    names = ("train_days", "train_rows", "validation_days", "validation_rows")
    begun = {**chosen, **dict(zip(names, rows, strict=True))}
    output = days / "run"
    output.mkdir()
    values = dataclasses.asdict(DataConfig(path=str(days), **begun))
    (output / "config.json").write_text(json.dumps({"data": values}))
    assert validated(days, **chosen)[0] == expected  # the same words again
    restored = {key: value for key, value in begun.items() if not key.startswith("validation")}
    assert validated(days, **restored)[0] == expected  # rows that nobody says: those of the run


def test_validation_rows_that_are_chosen_stay():
    config = dataclasses.replace(
        load_recipe("dlrm.frappe"),
        data=DataConfig(path="somewhere", validation_rows="0.7:0.8"),
        epochs=5,
        early_stopping=EarlyStoppingConfig(patience=2),
    )
    assert choose_validation(config, Path("run")) == (config, "")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"a": pa.nulls(rows, pa.int64()), "b": pa.nulls(rows, pa.int8())}), path
    )


@pytest.mark.parametrize(
    ("counts", "tested"),
    [
        ([100, 100, 100, 100], "2026-01-04"),
        ([50_000] * 27 + [20_000], "2026-01-28"),  # a day of a large log is enough
        ([1_000] * 26 + [20, 10], "2026-01-25:2026-01-28"),  # a long tail of days is not
        ([1_000, 0], "2026-01-02"),
        ([1, 1_000_000], "2026-01-02"),
    ],
    ids=["even days", "large days", "a long tail", "an empty last day", "nearly all at the end"],
)
def test_as_many_of_the_last_days_test_as_hold_enough_rows(counts, tested, tmp_path):
    for number, rows in enumerate(counts, start=1):
        write(tmp_path / f"dt=2026-01-{number:02}" / "a.parquet", rows)
    (train, test, _, _), note = split(tmp_path, "dlrm.frappe")
    assert test == tested and train.startswith("2026-01-01:") and test in note
    assert train.split(":")[1] < test.split(":")[0]


def test_a_log_without_the_recipes_columns_is_refused_with_the_setting_that_was_forgotten(tmp_path):
    write(tmp_path / "dt=2026-01-01" / "a.parquet", 3)
    config = load_recipe("dlrm.demo")
    config = dataclasses.replace(config, data=DataConfig(path=str(tmp_path)))
    with pytest.raises(
        ValueError, match=r"data\.schema: the log lacks .* it has a, b\. Pass"
    ) as refused:
        check_schema(config)
    assert f"python -m pipelines.schema {tmp_path} --output schema.yaml" in str(refused.value)
    own = dataclasses.replace(config.data, schema="mine.yaml")
    check_schema(dataclasses.replace(config, data=own))
    check_schema(dataclasses.replace(config, data=DataConfig()))

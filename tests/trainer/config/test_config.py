# SPDX-License-Identifier: MIT
"""Recipes, overrides and the errors that name the way out."""

import dataclasses
import json

import pytest
import torch

from models.ranking import RankingModel
from trainer.config.command_line import apply_overrides
from trainer.config.config import config_from_dict, fingerprint, to_dict
from trainer.config.overrides import setting_names
from trainer.data.splits import parse_days, parse_rows
from trainer.recipes.load import load_recipe, recipes


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_builds_on_the_meta_device_and_survives_json(name):
    config = load_recipe(name)
    with torch.device("meta"):
        model = RankingModel(config.schema, config.model, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert config_from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.recipe == name


def test_every_recipe_has_a_one_line_summary():
    for name, function in recipes().items():
        summary = (function.__doc__ or "").partition("\n")[0]
        assert summary.endswith("."), name


def test_an_override_reaches_its_setting():
    config = apply_overrides(
        load_recipe("dlrm.demo"),
        ["--data.path", "logs", "--dense.learning-rate", "0.5", "--loader.batch-size=64"],
    )
    assert config.data.path == "logs"
    assert config.dense.learning_rate == 0.5
    assert config.loader.batch_size == 64


def test_an_override_inside_the_tower_reaches_it():
    config = apply_overrides(load_recipe("specformer.demo"), ["--model.tower.num-layers", "5"])
    assert config.model.tower.num_layers == 5


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--data.pth", "did you mean '--data.path'"),
        ("--dense.learning-rte", "did you mean '--dense.learning-rate'"),
    ],
)
def test_a_misspelt_override_is_an_error_that_proposes_the_right_one(argument, expected):
    with pytest.raises(ValueError, match=expected):
        apply_overrides(load_recipe("dlrm.demo"), [argument, "1"])


def test_an_override_of_the_wrong_type_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="batch-size"):
        apply_overrides(load_recipe("dlrm.demo"), ["--loader.batch-size", "many"])


def test_a_recipe_that_does_not_exist_is_an_error_that_proposes_one():
    with pytest.raises(ValueError, match=r"did you mean 'specformer\.demo'"):
        load_recipe("specfomer.demo")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_recipe("nowhere.recipes:feed")


def test_a_recipe_from_outside_the_repository_is_found_by_module_and_function():
    name = "trainer.recipes.dlrm:movielens"
    outside = dataclasses.replace(load_recipe("dlrm.movielens"), recipe=name)
    assert load_recipe(name) == outside


def test_day_ranges_are_inclusive_pairs_and_bad_ones_are_named():
    assert parse_days("") is None
    assert parse_days("2026-01-01") == ("2026-01-01", "2026-01-01")
    assert parse_days("2026-01-01:2026-01-03") == ("2026-01-01", "2026-01-03")
    with pytest.raises(ValueError, match=r"data\.train_days: expected FIRST:LAST"):
        parse_days("yesterday", "data.train_days")
    with pytest.raises(ValueError, match="last day is before the first"):
        parse_days("2026-01-03:2026-01-01")


def test_row_shares_are_between_zero_and_one():
    assert parse_rows("") == (0.0, 1.0)
    assert parse_rows("0:0.8") == (0.0, 0.8)
    assert parse_rows("0.8:") == (0.8, 1.0)
    for text in ("0.8:0.2", "a:b", "0:2"):
        with pytest.raises(ValueError, match="expected FROM:TO"):
            parse_rows(text)


def test_a_history_longer_than_the_tower_takes_is_an_error_across_sections():
    config = load_recipe("tokenformer.demo")
    tower = dataclasses.replace(config.model.tower, max_length=5)
    with pytest.raises(ValueError, match=r"model\.tower\.max_length"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, tower=tower))


def test_the_fingerprint_follows_what_changes_a_model_and_nothing_else():
    config = load_recipe("dlrm.demo")
    quiet = dataclasses.replace(
        config, telemetry=dataclasses.replace(config.telemetry, interval_steps=7)
    )
    other = dataclasses.replace(config, epochs=config.epochs + 1)
    other = dataclasses.replace(other, dense=dataclasses.replace(config.dense, eps=1e-7))
    assert fingerprint(config) == fingerprint(quiet)
    assert fingerprint(config) != fingerprint(other)


def test_a_schema_file_replaces_the_recipes_schema(tmp_path):
    import yaml

    schema = load_recipe("dlrm.frappe").schema
    path = tmp_path / "schema.yaml"
    path.write_text(yaml.safe_dump(schema.to_dict()))
    config = apply_overrides(load_recipe("dlrm.demo"), ["--data.schema", str(path)])
    assert config.schema == schema


def test_settings_are_listed_with_their_section():
    names = setting_names(load_recipe("dlrm.demo"))
    assert "--data.train-days" in names
    assert "--loader.global-batch-size" in names


def test_a_rate_for_a_table_that_does_not_exist_is_an_error():
    config = load_recipe("dlrm.globo")
    sparse = dataclasses.replace(config.sparse, table_learning_rates={"usr": 0.1})
    with pytest.raises(ValueError, match=r"no table 'usr', did you mean 'user'"):
        dataclasses.replace(config, sparse=sparse)


def test_a_tokenizer_setting_without_effect_is_an_error():
    config = load_recipe("dlrm.demo")
    tokenizer = dataclasses.replace(config.model.tokenizer, target_fields="all")
    with pytest.raises(ValueError, match=r"model\.tokenizer\.target_fields: has no effect"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, tokenizer=tokenizer))


def test_a_stream_field_that_is_no_context_field_is_an_error():
    config = load_recipe("tokenformer.demo")
    tokenizer = dataclasses.replace(config.model.tokenizer, stream_fields=("contry",))
    model = dataclasses.replace(config.model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"'contry' is no context field, did you mean 'country'"):
        RankingModel(config.schema, model, torch.device("meta"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--early-stopping.patience", "2"], r"early_stopping\.patience: has no effect with one"),
        (["--data.validation-rows", "0.8:1"], r"have no effect without early_stopping\.patience"),
        (["--checkpoint.best-metric", "ne"], r"checkpoint\.best_metric: 'ne' has no effect"),
        (["--evaluate-epochs"], "evaluate_epochs has no effect with one epoch"),
    ],
)
def test_settings_of_evaluations_after_epochs_that_do_nothing_are_refused(words, expected):
    with pytest.raises(ValueError, match=expected):
        apply_overrides(load_recipe("dlrm.demo"), words)


def test_early_stopping_keeps_the_best_checkpoint():
    words = ["--epochs", "4", "--early-stopping.patience", "2", "--checkpoint.best-metric", "ne"]
    config = apply_overrides(load_recipe("dlrm.demo"), words)
    assert config.kept_checkpoints.keep_best == 1 and config.checkpoint.keep_best == 0
    more = apply_overrides(config, ["--checkpoint.keep-best", "3"])
    assert more.kept_checkpoints.keep_best == 3

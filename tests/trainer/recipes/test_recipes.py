# SPDX-License-Identifier: MIT
"""The recipes: baselines train end to end; released models have the published sizes."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from models.baselines.tokens.rankmixer import RankMixerConfig
from models.ranking import RankingModel
from pipelines import demo
from tests.support import runs
from tests.support.settings import changed
from trainer.config.command_line import apply_overrides
from trainer.recipes import datasets, towers
from trainer.recipes.datasets import DATASETS
from trainer.recipes.load import load_recipe, recipes
from trainer.recipes.towers import TOWERS

BASELINES = ("rankmixer.demo", "onetrans.demo", "hstu.demo")
# Dense parameters of the released models, embeddings (and the maps of numbers to them) left out.
# avazu_dim32 is published with its AUC only.
RELEASED = {
    "rankelastor.criteo_dim10": 1_484_093,
    "rankelastor.criteo_dim20": 3_681_981,
    "rankelastor.avazu_dim16": 1_870_209,
    "rankelastor.avazu_dim64": 25_980_289,
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=1280)


def build(config) -> RankingModel:
    with torch.device("meta"):
        return RankingModel(config.schema, config.model, torch.device("meta"))


@pytest.mark.dist
@pytest.mark.parametrize("recipe", BASELINES)
def test_a_baseline_trains_end_to_end_on_two_ranks(recipe, logs, processes, tmp_path):
    config = runs.small(recipe, logs, "--max-steps", "20", "--epochs", "2")
    metrics = processes.run(runs.train, config, tmp_path / "run", world_size=2)[0]
    losses = runs.losses(tmp_path / "run")
    assert len(losses) == metrics["steps"] == 20
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert metrics["rows"] == 1280
    assert json.loads((tmp_path / "run/metrics.json").read_text())["auc"] == metrics["auc"]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", BASELINES)
def test_a_baseline_trains_in_half_precision(recipe, dtype, logs, processes, tmp_path):
    # A scale at which no step overflows, which would be skipped.
    scale = ("--precision.initial-scale", "128") if dtype == "fp16" else ()
    half = runs.small(recipe, logs, "--max-steps", "5", "--precision.dtype", dtype, *scale)
    full = runs.small(recipe, logs, "--max-steps", "5")
    for name, config in (("half", half), ("full", full)):
        processes.run(runs.train, config, tmp_path / name, world_size=1)
    assert runs.losses(tmp_path / "half") == pytest.approx(runs.losses(tmp_path / "full"), abs=0.02)


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_a_released_model_has_as_many_dense_parameters_as_published(name):
    outside = ("embeddings.", "tokenizer.dense.")
    parameters = build(load_recipe(name)).named_parameters()
    dense = sum(p.numel() for path, p in parameters if not path.startswith(outside))
    assert dense == RELEASED[name]


def test_all_five_released_models_are_recipes_with_the_published_sizes_of_tokens():
    sizes = {
        name: (tokenizer.num_tokens, tokenizer.token_dim, config.model.tower.depth)
        for name, config in ((name, load_recipe(name)) for name in recipes() if "_dim" in name)
        for tokenizer in (config.model.tokenizer,)
    }
    assert sizes == {
        "rankelastor.criteo_dim10": (15, 26, 1),
        "rankelastor.criteo_dim20": (26, 30, 1),
        "rankelastor.avazu_dim16": (24, 16, 4),
        "rankelastor.avazu_dim32": (24, 32, 3),
        "rankelastor.avazu_dim64": (24, 64, 5),
    }


def test_a_released_model_reads_39_criteo_or_24_avazu_fields_of_the_published_width():
    for name in recipes():
        if "_dim" not in name:
            continue
        config = load_recipe(name)
        width = int(name.partition("_dim")[2])
        fields = len(config.schema.sparse) + len(config.schema.dense)
        assert fields == (39 if "criteo" in name else 24)
        columns = build(config).tokenizer.columns
        assert sum(columns.widths) == fields * width and columns.padding == 0


@pytest.mark.dist
@pytest.mark.parametrize("name", ["rankelastor.criteo_dim10", "rankelastor.avazu_dim16"])
def test_a_released_model_trains_on_a_log_of_its_columns(name, processes, tmp_path):
    config = load_recipe(name)
    random = np.random.default_rng(0)
    columns = {
        feature.column: random.integers(0, 50, 512)
        for feature in (*config.schema.sparse, *config.schema.dense)
    }
    label = config.schema.labels[0].name
    columns[label] = (columns[config.schema.sparse[0].column] < 15).astype(np.int64)
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    tables = tuple(dataclasses.replace(t, num_embeddings=512) for t in config.schema.tables)
    config = apply_overrides(
        dataclasses.replace(config, schema=dataclasses.replace(config.schema, tables=tables)),
        [
            *("--data.path", str(tmp_path / "log.parquet"), "--loader.batch-size", "64"),
            *("--data.train-rows", "0:0.75", "--data.test-rows", "0.75:1", "--epochs", "3"),
            *("--telemetry.interval-steps", "1", "--telemetry.mode", "quiet"),
        ],
    )
    metrics = processes.run(runs.train, config, tmp_path / "run", world_size=1)[0]
    losses = runs.losses(tmp_path / "run")
    assert metrics["rows"] == 128
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-6:]) < sum(losses[:6])


def test_a_tower_that_its_tokens_do_not_fit_is_refused_with_the_numbers_that_would():
    config = load_recipe("rankmixer.demo")
    tokenizer = dataclasses.replace(config.model.tokenizer, num_tokens=0)
    model = dataclasses.replace(config.model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"15 tokens of width 32.*multiple of 15 \(30 or 45\)"):
        build(dataclasses.replace(config, model=model))
    assert isinstance(config.model.tower, RankMixerConfig)


@pytest.mark.parametrize("recipe", ["onetrans.demo", "hstu.demo"])
def test_settings_without_effect_on_a_stream_tower_are_errors(recipe):
    for setting in (["num-tokens", "4"], ["projection.field-dim", "8"]):
        with pytest.raises(ValueError, match="has no effect on"):
            apply_overrides(load_recipe(recipe), [f"--model.tokenizer.{setting[0]}", setting[1]])
    with pytest.raises(ValueError, match=r"model\.tower\.max_length"):
        apply_overrides(load_recipe(recipe), ["--model.tower.max-length", "5"])


def test_every_tower_has_a_recipe_for_every_log_and_other_recipes_are_functions():
    pairs = {f"{tower}.{log}" for tower in TOWERS for log in DATASETS}
    assert pairs <= recipes().keys()
    assert all(name.partition(".")[0] in TOWERS for name in recipes())


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_keeps_its_name_and_what_it_sets_and_its_model_can_be_built(name):
    config = load_recipe(name)
    assert config.recipe == name and recipes()[name].summary
    settings = json.dumps(changed(config), sort_keys=True)
    known = json.loads((Path(__file__).parent / "settings.json").read_text())
    assert hashlib.sha256(settings.encode()).hexdigest()[:12] == known[name], settings
    build(config)


def test_a_composed_recipe_is_its_tower_on_its_log():
    assert load_recipe("specformer.globo") == dataclasses.replace(
        datasets.globo(towers.specformer()), recipe="specformer.globo"
    )


@pytest.mark.parametrize("name", ["hstu.globo", "onetrans.demo", "hstu.frappe"])
def test_a_stream_is_as_long_as_the_longest_history_of_its_log(name):
    config = load_recipe(name)
    lengths = [one.max_length for one in config.schema.sparse if one.kind == "sequence"]
    assert config.model.tower.max_length == max(lengths, default=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("specformer.globos", "specformer.globo"), ("specfomer.demo", "specformer.demo"), ("", "")],
)
def test_a_misspelt_recipe_is_refused_with_the_closest_name(name, meant):
    with pytest.raises(ValueError, match=f"does not exist.*{meant}"):
        load_recipe(name)


@pytest.mark.parametrize("name", ["os:getcwd", "nowhere.recipes:feed", "json:nothing", ":", "a:"])
def test_what_is_no_recipe_is_refused(name):
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_recipe(name)


def test_the_demo_trains_the_three_towers_and_one_baseline():
    towers = ("specformer.demo", "rankelastor.demo", "tokenformer.demo", "dlrm.demo")
    assert sorted(demo.RECIPES) == sorted(towers)

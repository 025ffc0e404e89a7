# SPDX-License-Identifier: MIT
"""Schemas proposed for logs: what each column becomes, and that the file trains as it is."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from embeddings.schema.schema import load_schema
from pipelines.schema import main
from pipelines.schema_proposal.column_profile import profile
from pipelines.schema_proposal.proposal import propose
from pipelines.schema_proposal.roles import Choices
from pipelines.schema_proposal.sampling import read_sample
from tests.support import runs
from trainer.config.command_line import apply_overrides
from trainer.config.fit_to_log import choose_split
from trainer.data.files import discover
from trainer.recipes.load import load_recipe

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
ROWS = 4_000
START_MS = 1_767_225_600_000  # 2026-01-01


def log(rows=ROWS, seed=0, **changes):
    """A log with a column of every kind; `changes` replace columns, None takes one away."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 9, rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    events = int(lengths.sum())
    item = draw.zipf(1.3, rows) % 900
    stars = draw.integers(1, 6, rows)
    columns = {
        "request_id": pa.array([f"r{i}" for i in range(rows)]),
        "user_id": draw.integers(0, 300, rows),
        "item_id": pa.array([f"i{value}" for value in item]),
        "device": pa.array(draw.choice(["phone", "desk", None], rows).tolist()),
        "position": draw.integers(0, 10, rows),
        "views": np.minimum(draw.zipf(1.5, rows) - 1, 10**7),
        "price": draw.lognormal(3, 1, rows),
        "stars": stars,
        "ts": START_MS + np.arange(rows) * 60_000,
        "clicked_items": pa.ListArray.from_arrays(
            offsets, pa.array([f"i{value}" for value in draw.zipf(1.3, events) % 900])
        ),
        "clicked_age_s": pa.ListArray.from_arrays(offsets, draw.zipf(1.2, events) % 10**6),
        "tags": pa.array([[f"t{i % 7}", f"t{i % 3}"] for i in range(rows)]),
        "country": pa.array(["NL"] * rows),
        "click": (stars > 3).astype(np.int8),
        "like": (draw.random(rows) < 0.1).astype(np.int8),
    }
    columns |= changes
    return pa.table({name: value for name, value in columns.items() if value is not None})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two days of the log."""
    root = tmp_path_factory.mktemp("log")
    table = log()
    for day, part in enumerate((table.slice(0, 3_000), table.slice(3_000))):
        path = root / f"dt=2026-01-0{day + 1}" / "part.parquet"
        path.parent.mkdir()
        pq.write_table(part, path, row_group_size=500)
    return root


@pytest.fixture(scope="module")
def proposed(folder):
    return propose(read_sample([str(folder)]))


def by_name(parts):
    return {part["name"]: part for part in parts}


def test_every_kind_of_column_becomes_what_it_looks_like(proposed):
    schema = proposed.schema
    sparse, dense = by_name(schema["sparse"]), by_name(schema["dense"])
    assert [label["name"] for label in schema["labels"]] == ["click", "like"]
    assert (schema["user"], schema["timestamp"]) == ("user_id", "ts")
    assert sparse["item_id"] == {"name": "item_id", "table": "item_id", "side": "item"}
    assert sparse["position"]["transform"] == "identity"
    assert sparse["views"]["transform"] == "log_quarter"
    assert dense["views_value"]["transform"] == "log1p"
    assert dense["price_value"]["standardize"] is True
    assert sparse["tags"]["kind"] == "bag"
    assert sparse["hour_of_day"]["column"] == "ts"
    assert sparse["clicked_items"]["kind"] == sparse["clicked_age_s"]["kind"] == "sequence"
    assert sparse["clicked_items"]["history"] == sparse["clicked_age_s"]["history"]
    assert sparse["clicked_age_s"]["transform"] == "log_square"


def test_a_history_of_a_columns_ids_shares_its_table(proposed):
    assert by_name(proposed.schema["sparse"])["clicked_items"]["table"] == "item_id"
    assert "clicked_items too" in proposed.roles.remarks["tables", "item_id"]


def test_what_tells_the_label_or_never_comes_back_is_left_out_with_the_reason(proposed):
    left = proposed.roles.left_out
    assert set(left) == {"request_id", "stars", "country"}
    assert "tells 'click' by itself" in left["stars"]
    assert "same value" in left["country"]


def test_guesses_are_marked_in_the_file_and_it_loads_as_it_is(folder, tmp_path, capsys):
    path = tmp_path / "schema.yaml"
    assert main([str(folder), "--output", str(path)]) == 0
    text = path.read_text("utf-8")
    assert "- {name: click}  # GUESS, by its name; " in text
    assert "user: user_id  # GUESS" in text
    assert "4,000 of 4,000 rows" in text
    assert load_schema(path).user == "user_id"
    assert "python -m trainer.train" in capsys.readouterr().out
    assert main([str(folder), "--output", str(path)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_what_the_user_says_comes_before_any_guess(folder):
    choices = Choices(labels=("like",), user="device", drop=("price",))
    found = propose(read_sample([str(folder)]), choices)
    assert [label["name"] for label in found.schema["labels"]] == ["like"]
    assert found.schema["user"] == "device"
    assert "price" in found.roles.left_out
    assert "stars" not in found.roles.left_out  # tells nothing of likes
    with pytest.raises(ValueError, match="'lik': there is no such column, did you mean 'like'"):
        propose(read_sample([str(folder)]), Choices(labels=("lik",)))
    with pytest.raises(ValueError, match=r"label 'stars': expected values 0 and 1.*rating >= 4"):
        propose(read_sample([str(folder)]), Choices(labels=("stars",)))


def test_a_log_without_a_label_is_refused_and_says_which_file_lacks_it(tmp_path):
    pq.write_table(log(100), tmp_path / "a.parquet")
    pq.write_table(log(100, click=None, like=None), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"--label.*click cannot be: b\.parquet has no such col"):
        propose(read_sample([str(tmp_path)]))


def few(**columns):
    """Eight rows with a user and a label, and `columns`."""
    fixed = {"user_id": pa.array([1, 2] * 4), "click": pa.array([0, 0, 1, 1] * 2)}
    return pa.table({**fixed, **columns})


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([bytes([200, i]) for i in range(8)]), "id"),  # no UTF-8
        (pa.array([f"x{i}" for i in range(8)], pa.string_view()), "id"),
        (pa.array([f"x{i % 3}" for i in range(8)]).dictionary_encode(), "id"),
        (
            pa.ListArray.from_arrays(
                pa.array(range(9), pa.int32()), pa.array(["x", "y"] * 4).dictionary_encode()
            ),
            "bag",
        ),
        (pa.array([["x", None], None, []] + [["y"]] * 5, pa.list_(pa.string_view())), "bag"),
    ],
)
def test_every_way_to_keep_strings_becomes_ids_that_load(column, kind, tmp_path):
    pq.write_table(few(odd=column), tmp_path / "log.parquet")
    path = tmp_path / "schema.yaml"
    assert main([str(tmp_path / "log.parquet"), "--output", str(path)]) == 0
    schema = load_schema(path)
    assert {one.name: one.kind for one in schema.sparse}["odd"] == kind
    discover(tmp_path / "log.parquet", None, schema)


@pytest.mark.parametrize(
    ("tables", "name", "reason"),
    [
        ([few(**{"": pa.array(range(8))})], "", "it has no name"),
        (
            [
                pa.Table.from_arrays(
                    [*few(a=pa.array(range(8))).columns, pa.array(range(8))],
                    names=["user_id", "click", "a", "a"],
                )
            ],
            "a",
            "0.parquet has 2 columns of that name",
        ),
        (
            [few(p=pa.array([Decimal(i) for i in range(8)])), few(p=pa.array([1.0] * 8))],
            "p",
            "it is decimal128",
        ),
        (
            [few(ts=pa.array([START_MS, None] * 4, pa.timestamp("ms")))],
            "ts",
            "a time, and 50.0% of the rows have none",
        ),
    ],
)
def test_what_training_would_refuse_is_left_out_with_the_reason(tables, name, reason, tmp_path):
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    proposal = propose(read_sample([str(tmp_path)]))
    assert proposal.roles.left_out[name].startswith(reason)
    assert proposal.schema.get("timestamp") is None


def test_numbers_of_several_types_keep_their_fractions(tmp_path):
    pq.write_table(few(x=pa.array([[1]] * 8)), tmp_path / "0.parquet")
    pq.write_table(few(x=pa.array([[1.5]] * 8)), tmp_path / "1.parquet")
    pq.write_table(few(x=pa.array([[]] * 8)), tmp_path / "2.parquet")
    assert read_sample([str(tmp_path)]).columns["x"].values.to_pylist() == [1.0] * 8 + [1.5] * 8


def test_a_log_without_rows_is_named(tmp_path, capsys):
    pq.write_table(few().slice(0, 0), tmp_path / "log.parquet")
    assert main([str(tmp_path)]) == 2
    assert "expected rows, got 1 files without any" in capsys.readouterr().err


def test_times_in_seconds_are_left_to_ingestion(tmp_path):
    seconds = START_MS // 1_000 + np.arange(ROWS)
    pq.write_table(log(ts=seconds), tmp_path / "a.parquet")
    found = propose(read_sample([str(tmp_path)]))
    assert "timestamp" not in found.schema
    assert "--timestamp-unit s" in found.roles.left_out["ts"]


def test_a_time_that_was_asked_for_may_have_any_name(tmp_path):
    path = tmp_path / "a.csv"
    rows = [f"{i % 9},{i % 2},{START_MS // 1_000 + i},{i}" for i in range(100)]
    path.write_text("\n".join(["user,click,seen,other", *rows]))
    sample = read_sample([str(path)])
    assert "timestamp" not in propose(sample).schema
    found = propose(sample, Choices(timestamp="seen"))
    assert (found.schema["timestamp"], found.roles.time_unit) == ("seen", "s")
    assert "seen" not in by_name(found.schema["sparse"])
    with pytest.raises(ValueError, match="timestamp 'other': expected times since 1970"):
        propose(sample, Choices(timestamp="other"))


def test_a_sample_of_a_large_log_is_bounded_and_spread_and_says_so(tmp_path):
    rows = 20_000
    table = pa.table({"user_id": np.arange(rows) // 4, "click": (np.arange(rows) % 3 == 0) + 0})
    for part in range(10):
        pq.write_table(table.slice(part * 2_000, 2_000), tmp_path / f"{part}.parquet")
    sample = read_sample([str(tmp_path)], rows=1_000)
    assert (sample.rows, sample.total_rows, sample.files) == (1_000, rows, 10)
    users = sample.columns["user_id"].to_numpy()
    assert users.min() == 0
    assert users.max() >= 18_000 // 4
    # 5,000 users, of which the sample holds 250, four times each: an estimate from below.
    tables = by_name(propose(sample).schema["tables"])
    assert tables["user_id"]["num_embeddings"] >= 1_024


def test_a_csv_is_typed_and_its_steps_begin_with_ingestion(tmp_path, capsys):
    lines = ["user,item,hist,price,click,time"]
    for i in range(400):
        values = (f"u{i % 20}", i % 50, f"{i % 50}|{i % 7}", f"{i / 7:.2f}", i % 2)
        lines.append(",".join(map(str, values)) + f",2026-01-0{1 + i // 200}T10:00:00")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    output = tmp_path / "schema.yaml"
    assert main([str(path), "--output", str(output)]) == 0
    schema = yaml.safe_load(output.read_text("utf-8"))
    assert by_name(schema["sparse"])["hist"]["kind"] == "sequence"
    assert schema["dense"][0].get("column", "price") == "price"
    assert schema["timestamp"] == "time"
    assert "pipelines.ingest" in capsys.readouterr().out


@pytest.mark.parametrize(
    "recipe",
    ["specformer.demo", "tokenformer.globo", "rankelastor.criteo", "dlrm.demo", "onetrans.globo"],
)
def test_any_recipe_fits_a_proposed_schema(recipe, proposed, folder, tmp_path):
    import torch

    from models.ranking import RankingModel

    path = tmp_path / "schema.yaml"
    path.write_text(yaml.safe_dump(proposed.schema))
    config = apply_overrides(load_recipe(recipe), ["--data.schema", str(path)])
    RankingModel(config.schema, config.model, torch.device("meta"))


@pytest.mark.dist
def test_a_proposed_schema_trains_with_nothing_else_said(folder, tmp_path, processes):
    assert main([str(folder), "--output", str(tmp_path / "s.yaml")]) == 0
    recipe = load_recipe("tokenformer.demo")
    words = ["--data.path", str(folder), "--data.schema", str(tmp_path / "s.yaml")]
    words += ["--loader.batch-size", "64", "--telemetry.mode", "quiet", "--max-steps", "4"]
    config, _ = choose_split(apply_overrides(recipe, words), recipe.data, tmp_path / "run")
    metrics = processes.run(runs.train, config, tmp_path / "run", timeout_seconds=120)[0]
    assert metrics["rows"] == 1_000


@pytest.mark.dist
@pytest.mark.skipif(not DATA.is_dir(), reason=f"the public logs are not at {DATA}")
def test_a_public_log_that_nobody_described_is_ranked(tmp_path, processes):
    source = str(DATA / "avazu_10k")
    assert main([source, "--output", str(tmp_path / "s.yaml")]) == 0
    recipe = load_recipe("dlrm.demo")
    words = ["--data.path", source, "--data.schema", str(tmp_path / "s.yaml")]
    config = apply_overrides(recipe, [*words, "--telemetry.mode", "quiet"])
    config, note = choose_split(config, recipe.data, tmp_path / "run")
    assert "the recipe's train_days (2026-01-01:2026-01-03) are of another log" in note
    metrics = processes.run(runs.train, config, tmp_path / "run", timeout_seconds=120)[0]
    # The hashed logistic regression has .697 with a standard error of .017.
    assert metrics["auc"] > 0.68


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the public logs are not at {DATA}")
@pytest.mark.parametrize(
    ("source", "user", "out", "numbers"),
    [
        ("frappe/validation.parquet", "user", set(), 0),
        ("ml100k", "user_id", {"timestamp", "rating"}, 0),
        ("criteo_kaggle_10k", None, set(), 10),
        ("avazu_10k", None, {"id", "hour"}, 0),
    ],
)
def test_proposals_for_public_logs(source, user, out, numbers):
    found = propose(read_sample([str(DATA / source)]))
    assert found.schema.get("user") == user
    assert set(found.roles.left_out) == out
    assert len(found.schema.get("dense", ())) == numbers


def test_short_histories_with_bars_are_lists_and_titles_with_commas_are_not(tmp_path):
    users = [f"u{i % 90}" for i in range(600)]
    few = ("sku-1", "sku-2", "sku-3|sku-1", "sku-4")
    bars = ["" if i % 3 else few[2] if i % 60 == 0 else few[i % 2] for i in range(600)]
    titles = [f"Shoe {i % 5}, red" if i % 20 == 0 else f"Hat {i % 5}" for i in range(600)]
    columns = enumerate(zip(users, bars, titles, strict=True))
    rows = [f'{u},{b},"{t}",{i % 2}' for i, (u, b, t) in columns]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,recent,title,click", *rows]))
    assert read_sample([str(tmp_path / "log.csv")]).lists == {"recent": "|"}


def test_a_history_is_as_long_as_those_that_have_one():
    column = pa.array([[]] * 990 + [[1, 2, 3, 4, 5]] * 10, pa.list_(pa.int64()))
    mean, usual, largest = profile("clicked", column, 1.0).lengths
    assert (round(mean, 2), usual, largest) == (0.05, 5, 5)


def test_files_of_two_logs_in_one_folder_are_told_apart(tmp_path, capsys):
    pq.write_table(pa.table({"user": [1, 2], "label": [0, 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"user": [3, 4], "count": [5, 6]}), tmp_path / "b.parquet")
    assert main([str(tmp_path), "--output", str(tmp_path / "schema.yaml")]) == 2
    error = capsys.readouterr().err
    assert "if the files are not of one log, pass those that are" in error
    assert "label cannot be: b.parquet has no such column, and every file must" in error

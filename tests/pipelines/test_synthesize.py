# SPDX-License-Identifier: MIT
"""The generated log: what it promises of its ceiling, its histories and its items."""

import json
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from embeddings.schema.schema import load_schema
from pipelines.ingestion.partition import read_manifests
from pipelines.synthesize import SynthesisConfig, auc, demo_schema, generate, main, synthesize
from pipelines.synthetic.click_model import ClickConfig
from trainer.data.columns import check_columns

SMALL = SynthesisConfig(
    days=3, rows_per_day=3_001, clicks=ClickConfig(num_users=300, num_items=200, seed=3)
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    output = tmp_path_factory.mktemp("synthesize") / "log"
    return output, synthesize(output, SMALL)


@pytest.fixture(scope="module")
def days():
    return list(generate(SMALL))


def read(output, day):
    return pq.read_table(output / f"dt={day}" / "part-00000.parquet", partitioning=None)


def test_the_log_on_disk_is_what_the_seed_draws_and_another_seed_draws_another(log, days):
    output, summary = log
    assert list(summary["rows"].values()) == [3_001] * 3
    for day, table, _ in days:
        assert read(output, day).equals(table)
    other = ClickConfig(num_users=300, num_items=200, seed=4)
    _, table, _ = next(generate(SynthesisConfig(rows_per_day=3_001, clicks=other)))
    assert not table.equals(days[0][1])


def test_the_ceiling_is_the_auc_and_logloss_of_the_true_probability(log, days):
    output, summary = log
    ceiling = json.loads((output / "ceiling.json").read_text())
    assert ceiling == summary["ceiling"]
    drawn = {day: (table, probabilities) for day, table, probabilities in days}
    parts = {**{day: [pair] for day, pair in drawn.items()}, "overall": list(drawn.values())}
    for name, pairs in parts.items():
        found = ceiling["overall"] if name == "overall" else ceiling["days"][name]
        for k, task in enumerate(("click", "like")):
            labels = np.concatenate([table.column(task).to_numpy() for table, _ in pairs])
            scores = np.concatenate([probabilities[:, k] for _, probabilities in pairs])
            assert found[task]["rows"] == len(labels)
            assert found[task]["rate"] == pytest.approx(labels.mean())
            assert found[task]["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
            assert found[task]["logloss"] == pytest.approx(log_loss(labels, scores), abs=1e-12)


def test_labels_are_drawn_from_the_probabilities_and_a_like_needs_a_click():
    config = SynthesisConfig(days=1, rows_per_day=20_000, clicks=ClickConfig(num_users=1_000))
    _, table, probabilities = next(generate(config))
    labels = np.stack([table.column(task).to_numpy() for task in ("click", "like")], axis=1)
    assert not (labels[:, 1] > labels[:, 0]).any()
    assert 0.1 < labels[:, 0].mean() < 0.25
    error = np.sqrt((probabilities * (1 - probabilities)).mean(axis=0) / len(labels))
    assert (np.abs(labels.mean(axis=0) - probabilities.mean(axis=0)) < 4 * error).all()
    # Deciles of the probability have the label rate they promise.
    for part in np.array_split(np.argsort(probabilities[:, 0]), 10):
        assert labels[part, 0].mean() == pytest.approx(probabilities[part, 0].mean(), abs=0.04)


def test_the_best_click_auc_is_near_0_80_at_the_default_size():
    _, table, probabilities = next(generate(SynthesisConfig(days=1)))
    best = auc(table.column("click").to_numpy().astype(float), probabilities[:, 0])
    assert 0.78 < best < 0.83


def test_a_history_holds_only_what_the_user_did_before(days):
    done = defaultdict(list)
    checked = 0
    first_ms = days[0][1].column("timestamp")[0].as_py()
    for _, table, _ in days:
        rows = table.to_pylist()
        for row in rows:
            action = row["click"] + 2 * row["like"]
            event = (row["timestamp"], row["category_id"], action)
            done[row["user_id"], row["item_id"]].append(event)
        for row in rows:
            events = zip(
                *(row[f"hist_{name}"] for name in ("item", "category", "action", "age_s")),
                strict=True,
            )
            for item, category, action, age in events:
                assert age >= 0
                latest = row["timestamp"] - 1_000 * age
                if latest - 1_000 < first_ms:
                    continue  # from the day before the log begins
                assert any(
                    latest - 1_000 < ms <= latest and ms < row["timestamp"]
                    for ms, *rest in done[row["user_id"], item]
                    if rest == [category, action]
                )
                checked += 1
    assert checked > 10_000


def test_every_click_is_in_the_next_history_of_its_user_oldest_first(days):
    table = days[-1][1]
    rows = table.to_pylist()
    pages = defaultdict(list)
    for row in rows:
        pages[row["user_id"], row["timestamp"]].append(row)
    by_user = defaultdict(list)
    for (user, ms), page in sorted(pages.items()):
        by_user[user].append((ms, page))
    checked = 0
    for visits in by_user.values():
        for (_, page), (_, following) in pairwise(visits):
            clicked = {row["item_id"] for row in page if row["click"]}
            assert clicked <= set(following[0]["hist_item"][-SMALL.clicks.page_size :])
            ages = following[0]["hist_age_s"]
            assert ages == sorted(ages, reverse=True)
            checked += len(clicked)
    assert checked > 100


def test_items_die_and_are_born_overnight(days):
    shown = [set(table.column("item_id").to_pylist()) for _, table, _ in days]
    assert shown[0] - shown[1] and shown[1] - shown[0]
    assert min(shown[1] - shown[0]) > 0
    newborn = {item for item in shown[1] if item > max(shown[0])}
    assert newborn and not newborn & shown[0]
    assert len(shown[2]) <= SMALL.clicks.num_items


def test_a_page_never_shows_an_item_twice_and_days_begin_at_utc_midnight(days):
    for day, table, _ in days:
        midnight = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1_000
        times = table.column("timestamp").to_numpy()
        assert (np.diff(times) >= 0).all()
        assert midnight <= times[0] and times[-1] < midnight + 86_400_000
        names = ("user_id", "timestamp", "item_id")
        keys = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
        assert len(set(keys)) == len(keys)


def test_the_schema_beside_the_log_fits_it(log):
    output, summary = log
    schema = load_schema(summary["schema"])
    assert schema == demo_schema()
    for day, manifest in read_manifests(output).items():
        assert manifest["rows"] == 3_001 and manifest["schema"] == schema.fingerprint()
        check_columns(read(output, day).schema, schema, day)


def test_numbers_have_nulls_and_lists_have_the_types_of_ingestion(days):
    table = days[0][1]
    assert 0.05 < table.column("price").null_count / table.num_rows < 0.15
    assert table.schema.field("hist_item").type == pa.list_(pa.int64())
    assert table.schema.field("click").type == pa.int8()
    assert table.schema.field("price").type == pa.float32()


def test_the_command_refuses_days_that_exist_and_bad_settings(log, tmp_path, capsys):
    output, _ = log
    arguments = ["--days", "1", "--rows-per-day", "50", "--users", "20", "--items", "60"]
    assert main([str(output), *arguments]) == 2
    assert "already exists (complete)" in capsys.readouterr().err
    assert main([str(tmp_path / "new"), *arguments]) == 0
    assert "best click AUC" in capsys.readouterr().out
    assert main([str(tmp_path / "new"), *arguments, "--overwrite"]) == 0
    for wrong in (["--days", "0"], ["--start", "tomorrow"], ["--items", "3"]):
        assert main([str(tmp_path / "wrong"), *wrong]) == 2
        assert not (tmp_path / "wrong").exists()

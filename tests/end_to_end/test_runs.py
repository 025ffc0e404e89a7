# SPDX-License-Identifier: MIT
"""Whole runs: ranks, restarts and repetitions change nothing; bad input ends with a message."""

import dataclasses
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import runs
from tests.support.runs import BATCH, DAYS
from trainer.checkpoint.layout import complete
from trainer.evaluation import evaluate

TOWERS = (
    "specformer.demo",
    "rankelastor.demo",
    "rankelastor.demo_code",
    "tokenformer.demo",
    "tokenformer.demo_user_centric",
    "dlrm.demo",
    "rankmixer.demo",
    "onetrans.demo",
    "hstu.demo",
    "dcnv2.demo",
    "gdcn.demo",
    "autoint.demo",
    "masknet.demo",
    "wukong.demo",
)
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="module")
def interleaved(logs, tmp_path_factory):
    """The same rows, ordered so that one rank's batch of 2 B is what two ranks read in one step."""
    folder = tmp_path_factory.mktemp("interleaved")
    for day in DAYS:
        table = pa.concat_tables(
            pq.read_table(path) for path in sorted((logs / f"dt={day}").glob("*.parquet"))
        )
        half, order = table.num_rows // 2, []
        for start in range(0, half, BATCH):
            stop = min(start + BATCH, half)
            order += [*range(start, stop), *range(half + start, half + stop)]
        (folder / f"dt={day}").mkdir()
        pq.write_table(table.take(order), folder / f"dt={day}" / "part-0.parquet")
    return folder


@pytest.mark.parametrize("recipe", TOWERS)
def test_two_ranks_of_b_equal_one_rank_of_two_b(recipe, logs, interleaved, processes, tmp_path):
    two = runs.small(recipe, logs)
    one = runs.small(recipe, interleaved, "--loader.batch-size", str(2 * BATCH))
    processes.run(runs.train, two, tmp_path / "two", world_size=2)
    processes.run(runs.train, one, tmp_path / "one", world_size=1)
    expected = runs.losses(tmp_path / "one")
    assert len(expected) == 5
    assert expected[0] != expected[-1]
    assert runs.losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


def test_the_same_run_twice_gives_the_same_losses_and_metrics(logs, processes, tmp_path):
    config = runs.small("specformer.demo", logs, "--loader.order", "shuffle")
    first, second = (processes.run(runs.train, config, tmp_path / name)[0] for name in ("a", "b"))
    assert runs.losses(tmp_path / "a") == runs.losses(tmp_path / "b")
    for name in ("auc", "gauc", "logloss", "calibration", "rows"):
        assert first[name] == second[name]
    ranks = processes.run(runs.train, config, tmp_path / "c")
    assert ranks[0]["auc"] == ranks[1]["auc"]


@pytest.mark.parametrize("recipe", ["tokenformer.demo", "specformer.demo"])
def test_a_killed_run_resumes_bit_by_bit(recipe, logs, processes, tmp_path):
    words = ["--checkpoint.interval-steps", "3", "--epochs", "2", "--loader.order", "time"]
    # Dropped fields are drawn anew, so the random numbers go on too.
    config = runs.small(recipe, logs, *words, "--model.tokenizer.field-dropout", "0.3")
    whole = processes.run(runs.train, config, tmp_path / "whole")[0]
    processes.run(runs.train_until, config, tmp_path / "cut", 7)
    assert [path.name for path in complete(tmp_path / "cut/checkpoints")] == [
        "step-3",
        "step-6",
    ]
    resumed = processes.run(runs.train, config, tmp_path / "cut")[0]
    assert runs.losses(tmp_path / "cut") == runs.losses(tmp_path / "whole")
    assert resumed["auc"] == whole["auc"]
    assert resumed["logloss"] == whole["logloss"]
    assert set(resumed) == set(whole), "a run that was interrupted says as much of itself"


def test_a_checkpoint_evaluates_to_the_runs_metrics_at_any_world_size(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs)
    trained = processes.run(runs.train, config, tmp_path / "run")[0]
    path = complete(tmp_path / "run/checkpoints")[-1]
    for world_size, workers in ((1, 2), (2, 0)):
        count = (_with_workers, path, logs, workers)
        metrics = processes.run(*count, world_size=world_size)[0]
        assert metrics["rows"] == trained["rows"] == 640
        for name in ("auc", "gauc", "logloss"):
            assert metrics[name] == pytest.approx(trained[name], rel=1e-6)


def _with_workers(runtime, path, logs, workers):
    """Evaluate a checkpoint with so many loader workers on each rank."""
    read = evaluate.open_loader

    def open_loader(config, *arguments, **options):
        loader = dataclasses.replace(config.loader, num_workers=workers)
        return read(dataclasses.replace(config, loader=loader), *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "open_loader", open_loader)
        return runs.evaluated(runtime, path, logs, DAYS[1])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["specformer.demo", "rankelastor.demo", "tokenformer.demo"])
def test_half_precision_trains_near_full_precision(recipe, dtype, logs, processes, tmp_path):
    config = runs.small(recipe, logs)
    # A scale that does not overflow: a skipped first step would be right, but not comparable.
    scale = ("--precision.initial-scale", "1024") if dtype == "fp16" else ()
    half = runs.small(recipe, logs, "--precision.dtype", dtype, *scale)
    processes.run(runs.train, config, tmp_path / "full")
    metrics = processes.run(runs.train, half, tmp_path / "half")[0]
    assert metrics["skipped_steps"] == 0
    assert runs.losses(tmp_path / "half") == pytest.approx(runs.losses(tmp_path / "full"), rel=0.03)


def test_uneven_last_batches_and_one_file_for_two_ranks_with_four_workers(
    logs, processes, tmp_path
):
    folder = tmp_path / "log"
    for day, rows in zip(DAYS, (131, 129), strict=True):
        table = pq.read_table(next((logs / f"dt={day}").glob("*.parquet"))).slice(0, rows)
        (folder / f"dt={day}").mkdir(parents=True)
        pq.write_table(table, folder / f"dt={day}" / "one.parquet")
    config = runs.small("dlrm.demo", folder, "--loader.num-workers", "4")
    metrics = processes.run(runs.train, config, tmp_path / "run")[0]
    assert metrics["rows"] == 129
    assert metrics["steps"] == 2
    assert all(math.isfinite(loss) for loss in runs.losses(tmp_path / "run"))


def test_a_finished_run_and_a_foreign_folder_are_never_overwritten(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs, "--max-steps", "1")
    processes.run(runs.train, config, tmp_path / "run")
    before = (tmp_path / "run/metrics.json").read_bytes()
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "holds a finished run" in message
    assert (tmp_path / "run/metrics.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    for message in processes.run(runs.failure, config, tmp_path / "mine"):
        assert "is not empty and holds no run" in message


def test_an_unfinished_run_of_other_settings_is_refused_by_name(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs)
    processes.run(runs.train_until, config, tmp_path / "run", 1)
    other = runs.small("dlrm.demo", logs, "--dense.learning-rate", "0.5")
    for message in processes.run(runs.failure, other, tmp_path / "run"):
        assert "dense.learning_rate: 0.002, now 0.5" in message


def test_tables_that_do_not_fit_are_refused_before_the_folder_is_touched(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs)
    tables = tuple(
        dataclasses.replace(table, num_embeddings=10**12 if table.name == "user" else 512)
        for table in config.schema.tables
    )
    config = dataclasses.replace(config, schema=dataclasses.replace(config.schema, tables=tables))
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "schema: the tables do not fit into memory" in message
        assert "the largest is 'user' (1,000,000,000,000 rows x" in message
    assert not (tmp_path / "run").exists()


def test_test_days_that_were_trained_on_are_refused_unless_allowed(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs, "--data.test-days", f"{DAYS[0]}:{DAYS[1]}")
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert f"640 of the 1,280 test rows are training rows too ({DAYS[0]})" in message
    assert not (tmp_path / "run").exists()
    allowed = runs.small(
        "dlrm.demo",
        logs,
        *("--data.test-days", DAYS[0], "--data.allow-overlap", "--max-steps", "1"),
    )
    assert processes.run(runs.train, allowed, tmp_path / "run")[0]["rows"] == 640


def test_a_run_killed_after_its_last_checkpoint_still_finishes(logs, processes, tmp_path):
    config = runs.small("dlrm.demo", logs)
    whole = processes.run(runs.train, config, tmp_path / "run")[0]
    before = (tmp_path / "run/evaluations.jsonl").read_text(), ranks(tmp_path / "run")
    (tmp_path / "run/metrics.json").unlink()
    assert processes.run(runs.train, config, tmp_path / "run")[0] == whole
    assert before == ((tmp_path / "run/evaluations.jsonl").read_text(), ranks(tmp_path / "run"))


def test_a_resumed_run_lists_every_evaluation_once(logs, processes, tmp_path):
    """A checkpoint at the end of an epoch is written before that epoch is evaluated."""
    config = runs.small(
        "dlrm.demo", logs, *("--epochs", "2", "--evaluate-epochs", "--checkpoint.interval-steps=5")
    )
    processes.run(runs.train, config, tmp_path / "whole")
    processes.run(runs.train_until, config, tmp_path / "cut", 7)
    processes.run(runs.train, config, tmp_path / "cut")
    expected = (tmp_path / "whole/evaluations.jsonl").read_text()
    assert [json.loads(line)["step"] for line in expected.splitlines()] == [5, 10]
    assert (tmp_path / "cut/evaluations.jsonl").read_text() == expected
    assert ranks(tmp_path / "cut") == ranks(tmp_path / "whole")


def ranks(output):
    return json.loads((output / "ranks.json").read_text())


def test_an_epoch_in_which_no_example_counts_ends_with_the_weight_columns_name(
    logs, processes, tmp_path
):
    def weightless(table):
        return table.append_column("seconds", pa.array([0.0] * table.num_rows))

    folder = corrupt(logs, tmp_path / "log", weightless)
    day = folder / f"dt={DAYS[1]}" / "part-0.parquet"
    table = pq.read_table(day, partitioning=None)
    pq.write_table(table.append_column("seconds", pa.array([1.0] * table.num_rows)), day)
    config = runs.small("dlrm.demo", folder)
    labels = tuple(dataclasses.replace(label, weight="seconds") for label in config.schema.labels)
    schema = dataclasses.replace(config.schema, labels=labels)
    config = dataclasses.replace(config, schema=schema)
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "label 'click': every example of steps 1 to 5 has weight 0" in message
        assert "its weight column 'seconds' is 0" in message


def test_a_column_that_is_a_number_in_training_and_text_in_testing_is_named(
    logs, processes, tmp_path
):
    def to_text(table):
        return replace_column(table, "item_id", table["item_id"].cast(pa.string()))

    config = runs.small("dlrm.demo", corrupt(logs, tmp_path / "log", to_text))
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "item_id" in message
        assert "two embeddings" in message


def corrupt(logs, folder, change):
    """Write the first day anew with `change` applied to its table."""
    for day in DAYS:
        table = pq.read_table(next((logs / f"dt={day}").glob("*.parquet")))
        (folder / f"dt={day}").mkdir(parents=True)
        changed = change(table) if day == DAYS[0] else table
        pq.write_table(changed, folder / f"dt={day}" / "part-0.parquet")
    return folder


def replace_column(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.drop_columns(["item_id"]), ["item_id", "no such column", "part-0.parquet"]),
        (
            lambda t: replace_column(t, "price", pa.array(["x"] * t.num_rows)),
            ["price", "got string", "part-0.parquet"],
        ),
        (
            lambda t: replace_column(t, "user_id", pa.nulls(t.num_rows, pa.int64())),
            ["user_id", "got a null", "part-0.parquet"],
        ),
        (
            lambda t: replace_column(t, "click", pa.array([2] * t.num_rows, pa.int8())),
            ["click", "expected 0, 1 or null, got 2", "part-0.parquet"],
        ),
        (lambda t: t.slice(0, 0), ["expected rows"]),
    ],
    ids=["missing column", "wrong type", "null user", "label of 2", "no rows"],
)
def test_bad_data_ends_all_ranks_with_a_message_that_names_it(
    change, expected, logs, processes, tmp_path
):
    config = runs.small("dlrm.demo", corrupt(logs, tmp_path / "log", change))
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        for part in expected:
            assert part in message


@pytest.mark.parametrize("content", [b"", b"PAR1 but then nothing"], ids=["empty", "truncated"])
def test_an_empty_or_truncated_file_is_named_before_training(content, logs, processes, tmp_path):
    folder = corrupt(logs, tmp_path / "log", lambda table: table)
    (folder / f"dt={DAYS[0]}/part-1.parquet").write_bytes(content)
    config = runs.small("dlrm.demo", folder)
    for message in processes.run(runs.failure, config, tmp_path / "run"):
        assert "part-1.parquet" in message
    assert not (tmp_path / "run/metrics.json").exists()


def test_a_run_leaves_the_files_of_its_contract(logs, processes, tmp_path):
    config = runs.small("specformer.demo", logs)
    processes.run(runs.train, config, tmp_path / "run")
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    for name in (
        *("auc", "gauc", "gauc_unweighted", "logloss", "ne", "calibration", "rows"),
        *("rows_per_second", "input_wait", "world_size", "click_auc", "like_auc"),
    ):
        assert isinstance(metrics[name], int | float), name
    assert metrics["world_size"] == 2
    assert metrics["train_rows"] == 640
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["recipe"] == "specformer.demo"
    ranks = json.loads((tmp_path / "run/ranks.json").read_text())
    assert {record["module"] for record in ranks} >= {
        *("layer", "attention", "learned"),
        *("gradient", "clusters", "table"),
    }
    assert dataclasses.asdict(config)["data"] == saved["data"]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-5"]

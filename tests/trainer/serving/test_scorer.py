# SPDX-License-Identifier: MIT
"""A model in one process predicts what the evaluation predicts, from columns of any kind."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch

from tests.support import runs
from tests.support.serving import predicted, rows_of, trained
from trainer.serving import Scorer

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = """
tables:
  - {name: user, num_embeddings: 300, embedding_dim: 8}
  - name: item
    num_embeddings: 512
    embedding_dim: 8
    dynamic: {}
sparse:
  - {name: user_id, table: user}
  - {name: item_id, table: item, side: item}
  - name: clicked
    table: item
    column: hist_item
    kind: sequence
    history: clicks
    max_length: 5
dense:
  - {name: price, transform: log1p, standardize: true}
labels:
  - {name: click}
user: user_id
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return runs.generate(tmp_path_factory.mktemp("logs"), rows_per_day=320)


@pytest.fixture(scope="module")
def run(logs, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "dlrm.demo", logs)


@pytest.fixture(scope="module")
def scorer(run):
    return Scorer.load(run, batch_rows=100)


def _predicted(runtime, run, logs):
    return predicted(runtime, run, logs)


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    ["specformer", "tokenformer", "rankelastor", "bf16", "unpooled", "dynamic"],
)
def test_a_scorer_predicts_what_the_evaluation_of_two_ranks_does(processes, logs, tmp_path, case):
    recipe = f"{case if case.endswith(('former', 'elastor')) else 'dlrm'}.demo"
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    overrides = {
        "bf16": ["--precision.dtype", "bf16"],
        "unpooled": ["--parallel.sharding.unpool-ids"],
        "dynamic": ["--data.schema", str(tmp_path / "schema.yaml")],
    }.get(case, [])
    run = trained(tmp_path, recipe, logs, *overrides)
    expected = np.concatenate(processes.run(_predicted, run, logs))
    found = Scorer.load(run)(rows_of(logs))
    tolerance = 2e-2 if case == "bf16" else 1e-6
    for task, probabilities in enumerate(found.values()):
        np.testing.assert_allclose(probabilities, expected[:, task], atol=tolerance, rtol=0)


class Stream:
    """A data frame of a library that pyarrow does not know, with views of strings (as polars)."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def as_views(column):
    """The column in the types that polars hands over: views of lists."""
    one = column.combine_chunks()
    if not pa.types.is_list(one.type):
        return one
    return pa.ListViewArray.from_arrays(one.offsets[:-1], one.value_lengths(), one.values)


def test_columns_of_any_kind_give_the_same_probabilities(scorer, logs):
    table = rows_of(logs).select(scorer.columns)
    expected = scorer(table)
    assert list(expected) == ["click", "like"] and expected["click"].dtype == np.float32
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    views = pa.table({name: as_views(table[name]) for name in table.column_names})
    (batch,) = table.combine_chunks().to_batches()
    for columns in (frame, table.to_pydict(), Stream(views), batch):
        for name, found in scorer(columns).items():
            np.testing.assert_allclose(found, expected[name], atol=1e-7)
    assert all(len(one) == 0 for one in scorer(table.slice(0, 0)).values())


def test_a_model_is_served_in_the_number_format_that_its_machine_chose(scorer, logs, tmp_path):
    chosen = Scorer.load(trained(tmp_path, "dlrm.demo", logs, "--precision.dtype", "auto"))
    assert chosen.config.precision.dtype in ("fp32", "bf16")
    assert chosen(rows_of(logs))["click"].shape == (320,)
    auto = dataclasses.replace(chosen.config.precision, dtype="auto")
    config = dataclasses.replace(chosen.config, precision=auto)
    with pytest.raises(ValueError, match=r"step-3: precision\.dtype: expected one of"):
        Scorer(scorer.model, config, {}, "step-3")


def test_threads_share_a_scorer(scorer, logs):
    table = rows_of(logs)
    expected = scorer(table)["click"]
    before = {name: one.clone() for name, one in scorer.model.state_dict().items()}
    starts = [(7 * i) % 300 for i in range(48)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: scorer(table.slice(at, 20))["click"], starts))
    for at, one in zip(starts, found, strict=True):
        np.testing.assert_allclose(one, expected[at : at + 20], atol=1e-6)
    for name, one in scorer.model.state_dict().items():
        assert torch.equal(one, before[name]), name


def test_vectors_are_those_of_the_parts(scorer, logs):
    table = rows_of(logs)
    found = scorer.embed(table, ("representation", "item", "user"))
    assert [len(one) for one in found.values()] == [len(table)] * 3
    same = np.flatnonzero(table["item_id"].to_numpy() == table["item_id"][0].as_py())
    np.testing.assert_array_equal(found["item"][same], found["item"][same[:1]].repeat(len(same), 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda rows: rows.drop_columns(["item_id"]),
            "column 'item_id' (sparse feature 'item_id')",
        ),
        (lambda rows: {"user_id": [1], "item_id": [1, 2]}, "expected equally long lists"),
        (lambda rows: [1, 2], "expected an Arrow table, a data frame"),
        (
            lambda rows: rows.set_column(
                rows.column_names.index("item_id"), "item_id", rows["item_id"].cast(pa.string())
            ),
            "column 'item_id': expected number, as in the training log, got text",
        ),
        (
            lambda rows: rows.set_column(
                rows.column_names.index("price"), "price", pa.array([1.0] * 119 + [np.inf] * 201)
            ),
            "expected a finite 32-bit number, got inf, at row 119",
        ),
    ],
    ids=["missing", "uneven", "list", "text", "infinite"],
)
def test_rows_that_do_not_fit_are_refused_by_name(scorer, logs, change, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        scorer(change(rows_of(logs)))


def test_the_how_to_runs(run, logs, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run)
    (tmp_path / "logs").symlink_to(logs)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "howto" / "python.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(code, "python.md", "exec"), names)
    assert len(names["probabilities"]["click"]) == 320

# SPDX-License-Identifier: MIT
"""A feature that is the label is found in the first rows, and one that only helps is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embeddings.schema.schema import DenseFeature, Label, Schema, SparseFeature, Table
from models.batch import Batch
from trainer.telemetry.leaks import LeakWatch

SCHEMA = Schema(
    tables=(Table(name="id", num_embeddings=100_000, embedding_dim=4),),
    sparse=(SparseFeature(name="item", table="id"), SparseFeature(name="page", table="id")),
    dense=(DenseFeature(name="price"), DenseFeature(name="seconds")),
    labels=(Label(name="click"),),
)


def columns(rows=9_000, rate=0.05, seed=0):
    """Labels and features that tell something of them, as a log has them."""
    draw = np.random.default_rng(seed)
    item = draw.integers(0, 300, rows)
    labels = (draw.random(rows) < rate * (0.2 + 1.6 * (item % 7 == 0))).astype(np.float32)
    price = (draw.normal(size=rows) + 0.5 * labels).astype(np.float32)
    seconds = np.where(draw.random(rows) < 0.2, np.nan, price).astype(np.float32)
    return {
        "labels": labels,
        "item": item,
        "page": draw.integers(0, 50_000, rows),
        "price": price,
        "seconds": seconds,
    }


def watched(found, size=500, weights=None, **options):
    """Let a watch see the columns in batches, and return what it reports at the end."""
    watch = LeakWatch(SCHEMA, **options)

    def batches():
        for start in range(0, len(found["labels"]), size):
            part = {name: torch.tensor(one[start : start + size]) for name, one in found.items()}
            rows = len(part["labels"])
            weight = torch.ones(rows, 1) if weights is None else weights[start : start + size]
            yield Batch(
                sparse=KeyedJaggedTensor(
                    keys=["item", "page"],
                    values=torch.cat([part["item"], part["page"]]),
                    lengths=torch.ones(2 * rows, dtype=torch.int64),
                ),
                dense=torch.stack([part["price"], part["seconds"]], 1),
                labels=part["labels"][:, None],
                weights=weight,
                groups=torch.zeros(rows, dtype=torch.int64),
                actions=torch.zeros(0, dtype=torch.int64),
            )

    assert sum(1 for _ in watch.watch(batches())) == -(-len(found["labels"]) // size)
    return watch.report(7, last=True), watch


def test_features_of_an_honest_log_are_no_leak():
    assert watched(columns())[0] == []


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("price", lambda labels: labels, "dense feature 'price' (AUC 1.0000)"),
        ("price", lambda labels: 5 - 3 * labels, "dense feature 'price' (AUC 1.0000)"),
        ("seconds", lambda labels: np.where(labels > 0, 30, np.nan), "dense feature 'seconds'"),
        ("item", lambda labels: labels, "sparse feature 'item'"),
        ("page", lambda labels: np.where(labels > 0, 900, np.arange(len(labels)) % 40), "'page'"),
    ],
)
def test_a_feature_that_tells_the_label_is_named(name, values, said):
    found = columns()
    kind = np.int64 if name in ("item", "page") else np.float32
    with np.errstate(invalid="ignore"):
        found[name] = np.asarray(values(found["labels"])).astype(kind)
    (message,), watch = watched(found)
    assert message.startswith("ALERT feature_is_label at step 7: of ")
    assert said in message and message.count("(AUC") == 1
    assert watch.first_steps == {"feature_is_label": 7}
    assert watch.report(8, last=True) == [], "once is enough"


def test_too_few_rows_of_a_class_decide_nothing_and_the_end_of_a_short_run_decides():
    found = columns(rows=4_000)
    found["price"] = found["labels"]
    assert watched(found)[0], "a short run ends before there are rows enough"
    few = {name: one[:600] for name, one in found.items()}
    assert few["labels"].sum() < 50 and watched(few)[0] == []


def test_rows_without_weight_do_not_count():
    found = columns()
    honest = found["price"].copy()
    found["price"] = np.where(np.arange(9_000) < 4_500, found["labels"], honest)
    weights = torch.from_numpy((np.arange(9_000) >= 4_500).astype(np.float32))[:, None]
    assert watched(found, weights=weights)[0] == []


def test_a_rank_that_is_not_the_first_keeps_nothing():
    found = columns()
    found["price"] = found["labels"]
    assert watched(found, active=False)[0] == []

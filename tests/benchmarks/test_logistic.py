# SPDX-License-Identifier: MIT
"""The logistic regression that towers are measured by learns, and reads each test row once."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.metrics import roc_auc_score

from tests.benchmarks import logistic

SCHEMA = """
tables: [{name: a, num_embeddings: 100, embedding_dim: 8}]
sparse:
  - {name: a, table: a}
  - {name: tags, table: a, kind: bag, max_length: 3}
dense: [{name: x}]
labels: [{name: y}]
"""


def test_additive_effects_of_ids_lists_and_numbers_are_learnt(tmp_path, capsys):
    draw = np.random.default_rng(0)
    a, tag, x = draw.integers(0, 20, 5_000), draw.integers(0, 5, 5_000), draw.exponential(3, 5_000)
    logit = np.where(a < 10, 1.0, -1.0) + np.where(tag == 0, 2.0, -0.5) + np.where(x > 3, 1, -1)
    y = (draw.random(5_000) < 1 / (1 + np.exp(-logit))).astype(np.int8)
    tags = pa.array([[int(one), 7] for one in tag])
    x = pa.array(x, mask=draw.random(5_000) < 0.05)
    pq.write_table(pa.table({"a": a, "tags": tags, "x": x, "y": y}), tmp_path / "log.parquet")
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    words = ["--data.path", str(tmp_path), "--data.schema", str(tmp_path / "schema.yaml")]
    assert logistic.main(["dlrm.frappe", *words, "--epochs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 1_000
    ceiling = roc_auc_score(y[4_000:], logit[4_000:])
    assert ceiling - 0.04 < found["auc"] < ceiling + 0.01
    assert 0.85 < found["calibration"] < 1.15

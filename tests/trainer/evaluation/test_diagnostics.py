# SPDX-License-Identifier: MIT
"""What an evaluation measures beside its metrics, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models.diagnostics.rank import measure
from models.heads import HeadConfig
from models.ranking import ImpressionObjective, Predictions
from tests.support.processes import Processes
from tests.support.training import Recipe, Session, train, whole_tables
from trainer.distributed.parallelize import Parallel
from trainer.evaluation.diagnostics import Watch, diagnose_model, measure_tables
from trainer.runtime.runtime import Runtime


def _tables(runtime: Runtime) -> dict[str, dict[str, float]]:
    session = Session(runtime, Recipe(num_steps=0))
    return {record["path"]: record for record in measure_tables(session.parallel)}


@pytest.mark.dist
def test_a_sharded_table_has_the_spectrum_of_the_whole(processes: Processes) -> None:
    whole = whole_tables(processes.run(train, Recipe(num_steps=0)))
    for found in processes.run(_tables):
        assert sorted(found) == sorted(whole)
        for name, weight in whole.items():
            for key, value in measure(weight).items():
                assert found[name][key] == pytest.approx(value, rel=1e-6), (name, key)


class _Model(nn.Module):
    """A tower of one map and the objective behind it, without tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4, 6))
        self.objective = ImpressionObjective(HeadConfig(hidden_units=()).build(6, 1))


def _watched(tokens: torch.Tensor, labels: torch.Tensor) -> list[dict[str, Any]]:
    """Return the records of a model that has read (B, 3, 4) tokens with (B, 1) labels."""
    model = _Model().eval()
    with torch.no_grad(), Watch(model.tower) as watch:
        for start in range(0, len(tokens), 32):
            part = slice(start, start + 32)
            model.tower(tokens[part])
            rows = len(tokens[part])
            ones = torch.ones(rows, 1)
            watch.note(Predictions(ones, labels[part], ones, ones[:, 0], ones.sum(), rows))
    parallel = Parallel.__new__(Parallel)
    object.__setattr__(parallel, "model", model)
    object.__setattr__(parallel, "module", nn.Module())
    records = diagnose_model(parallel, watch, parallel.model)
    assert all(p.grad is None for p in model.parameters()), "weights are left alone"
    return records


def test_gradients_and_clusters_are_measured_without_touching_a_weight() -> None:
    torch.manual_seed(0)
    labels = (torch.arange(100) % 2)[:, None].float()
    records = {
        r["module"]: r for r in _watched(torch.randn(100, 3, 4) + 9 * labels[..., None], labels)
    }
    assert 0 < records["gradient"]["gradient_share1"] <= records["gradient"]["gradient_share4"]
    assert records["gradient"]["gradient_share4"] == pytest.approx(1.0)
    clusters = records["clusters"]
    assert clusters["rows"] == 100
    assert clusters["mutual_information"] == pytest.approx(clusters["label_entropy"])


def test_outputs_that_are_not_finite_are_left_out_and_end_nothing() -> None:
    tokens = torch.randn(40, 3, 4)
    tokens[3, 1, 1] = torch.nan
    kinds = {record["module"]: record for record in _watched(tokens, torch.zeros(40, 1))}
    assert "gradient" not in kinds and kinds["clusters"]["rows"] == 39

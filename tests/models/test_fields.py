# SPDX-License-Identifier: MIT
"""Projections of fields to tokens: the released perceptrons, chosen columns, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.fields import (
    FieldColumns,
    FieldDropout,
    FieldProjection,
    JointProjection,
    ProjectionConfig,
    SharedProjection,
)
from tests.support.derivation import Array, array, close, randomize, relu, rms_norm

DOUBLE = torch.float64


def perceptron(x: Array, mlp: nn.Sequential) -> Array:
    first, norm, _, _, last = mlp
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    assert isinstance(norm, nn.RMSNorm)
    hidden = array(first.weight) @ x + array(first.bias)
    hidden = relu(rms_norm(hidden, array(norm.weight), 1e-12))
    return array(last.weight) @ hidden + array(last.bias)


def test_the_shared_perceptron_maps_every_slice_alike_after_one_norm_over_all() -> None:
    projection = ProjectionConfig(kind="shared_mlp", hidden=7).build([4, 4, 4], 5).double()
    assert isinstance(projection, SharedProjection)
    randomize(projection, 0)
    x = torch.randn(3, 12, dtype=DOUBLE)
    for row, tokens in zip(array(x), projection(x), strict=True):
        normed = rms_norm(row, array(projection.norm.weight), 1e-12)
        slices = [perceptron(part, projection.mlp) for part in np.split(normed, 3)]
        assert close(tokens, np.stack(slices))


def test_the_joint_perceptron_makes_all_tokens_of_all_columns() -> None:
    projection = ProjectionConfig(kind="joint_mlp", hidden=7).build([4, 2, 6], 5).double()
    assert isinstance(projection, JointProjection)
    randomize(projection, 0)
    x = torch.randn(3, 12, dtype=DOUBLE)
    for row, tokens in zip(array(x), projection(x), strict=True):
        normed = rms_norm(row, array(projection.norm.weight), 1e-12)
        assert close(tokens, perceptron(normed, projection.mlp).reshape(3, 5))


def test_dropout_of_a_perceptron_acts_in_training_only() -> None:
    projection = ProjectionConfig(kind="joint_mlp", hidden=64, dropout=0.5).build([4], 5)
    x = torch.randn(3, 4)
    assert not torch.equal(projection(x), projection(x))
    projection.eval()
    assert torch.equal(projection(x), projection(x))


def test_the_first_columns_of_every_field_are_read_and_no_other() -> None:
    columns = FieldColumns([4, 3, 8], 0, 3)
    assert columns.widths == [3, 3, 3] and columns.padding == 0
    assert columns(torch.arange(15.0)[None]).tolist() == [[0, 1, 2, 4, 5, 6, 7, 8, 9]]
    whole = FieldColumns([4, 3, 8], 0, 0)
    x = torch.randn(2, 15)
    assert whole.widths == [4, 3, 8] and whole(x) is x


def test_slices_pad_the_last_one_with_zeros() -> None:
    columns = FieldColumns([4, 3], 3, 0)
    assert columns.widths == [3, 3, 3] and columns.padding == 2
    assert columns(torch.ones(1, 7)).tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0]]
    with pytest.raises(ValueError, match=r"num_tokens: 8 slices .* the fields' embeddings have 7"):
        FieldColumns([4, 3], 8, 0)
    assert FieldColumns([4, 3], 7, 0).widths == [1] * 7  # a column each is enough


def test_columns_that_are_not_read_have_no_gradient() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    FieldColumns([4, 4], 0, 3)(x).sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mlp"}, "kind must be one of own, shared_mlp, joint_mlp"),
        ({"hidden": 4}, "kind 'own' takes 0"),
        ({"dropout": 0.1}, "kind 'own' takes 0"),
        ({"kind": "joint_mlp"}, "takes hidden of at least 1"),
        ({"kind": "joint_mlp", "hidden": 4, "dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"field_dim": -1}, "field_dim not negative"),
    ],
)
def test_settings_without_effect_or_meaning_are_errors(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ProjectionConfig(**settings)


def test_one_perceptron_for_slices_of_several_widths_is_refused() -> None:
    with pytest.raises(ValueError, match=r"widths \[3, 4\]; set num_tokens"):
        ProjectionConfig(kind="shared_mlp", hidden=4).build([4, 3], 5)
    assert isinstance(ProjectionConfig().build([4, 3], 5), FieldProjection)


def test_a_dropped_field_is_zero_as_a_whole_and_nothing_is_rescaled() -> None:
    torch.manual_seed(0)
    dropout = FieldDropout(["a", "b", "c"], [4, 2, 3], 0.3, {"b": 0.6, "c": 0.0})
    pooled = torch.rand(20_000, 9) + 1
    dropped = dropout(pooled)
    kept = dropped != 0
    parts = kept.split([4, 2, 3], 1)
    assert all((part == part[:, :1]).all() for part in parts)
    assert (dropped == pooled * kept).all()
    shares = [1 - float(part[:, 0].float().mean()) for part in parts]
    assert shares == pytest.approx([0.3, 0.6, 0.0], abs=0.015)
    together = ~parts[0][:, 0] & ~parts[1][:, 0]
    assert float(together.float().mean()) == pytest.approx(0.18, abs=0.015)  # independently


def test_fields_are_dropped_in_training_alone_by_torchs_seed() -> None:
    dropout = FieldDropout(["a", "b"], [2, 2], 0.5, {})
    pooled = torch.ones(64, 4, requires_grad=True)
    torch.manual_seed(1)
    first = dropout(pooled)
    torch.manual_seed(1)
    assert torch.equal(dropout(pooled), first)
    first.sum().backward()
    assert pooled.grad is not None and torch.equal(pooled.grad, (first != 0).float())
    assert dropout.eval()(pooled) is pooled
    before = torch.get_rng_state()
    assert FieldDropout(["a"], [4], 0.0, {})(pooled) is pooled
    assert torch.equal(torch.get_rng_state(), before)

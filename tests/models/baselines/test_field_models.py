# SPDX-License-Identifier: MIT
"""LR, FM, DNN, Wide & Deep, DeepFM, DCN, xDeepFM and FinalMLP, derived a pair at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from embeddings.schema.schema import DenseFeature
from models.baselines.fields.dcn import DCNConfig
from models.baselines.fields.deepfm import DeepFMConfig
from models.baselines.fields.dnn import DNNConfig
from models.baselines.fields.finalmlp import FinalMLPConfig
from models.baselines.fields.fm import FMConfig
from models.baselines.fields.lr import LRConfig
from models.baselines.fields.wide_deep import WideDeepConfig
from models.baselines.fields.xdeepfm import XDeepFMConfig
from models.fields import ProjectionConfig
from models.heads import HeadConfig
from models.ranking import ModelConfig, RankingModel
from models.tokens import TokenizerConfig
from tests.support.derivation import Array, array, close, randomize, relu
from tests.support.tiny import SCHEMA, make_batch

B, T, D = 3, 4, 3
CONFIGS = {
    "lr": LRConfig(),
    "fm": FMConfig(),
    "dnn": DNNConfig(hidden_units=(5, 3)),
    "wide_deep": WideDeepConfig(hidden_units=(5, 3)),
    "deepfm": DeepFMConfig(hidden_units=(5, 3)),
    "dcn": DCNConfig(num_cross_layers=3, hidden_units=(5, 3)),
    "xdeepfm": XDeepFMConfig(cin_units=(3, 2), hidden_units=(5,)),
    "xdeepfm bias": XDeepFMConfig(cin_units=(2,), bias=True, hidden_units=(5,)),
    "finalmlp": FinalMLPConfig(
        hidden_units1=(5, 4), hidden_units2=(6,), num_heads=2, gate_units=(3,), gate1=(0, 2)
    ),
    "finalmlp plain": FinalMLPConfig(
        hidden_units1=(4,), hidden_units2=(3,), num_heads=1, gate_units=()
    ),
}


def deep(mlp: Any, x: Array) -> Array:
    for linear in mlp.linears:
        x = relu(array(linear.weight) @ x + array(linear.bias))
    return x


def machine(tokens: Array) -> float:
    pairs = [
        sum(tokens[i, d] * tokens[j, d] for d in range(1, D)) for i in range(T) for j in range(i)
    ]
    return float(sum(pairs) + sum(tokens[:, 0]))


def xdeepfm(tower: Any, tokens: Array) -> Array:
    zero = before = tokens[:, 1:]
    out = [tokens[:, 0].sum()]
    for layer in tower.cin:
        weight = array(layer.weight).reshape(-1, len(before), T)
        bias = array(layer.bias) if layer.bias is not None else np.zeros(len(weight))
        following = []
        for h in range(len(weight)):
            vector = np.full(D - 1, bias[h])
            for i in range(len(before)):
                for j in range(T):
                    vector = vector + weight[h, i, j] * before[i] * zero[j]
            following.append(vector)
        before = np.stack(following)
        out += [vector.sum() for vector in before]
    return np.concatenate([out, deep(tower.deep, zero.reshape(-1))])


def gated(gate: Any, tokens: Array) -> Array:
    flat = tokens.reshape(-1)
    if gate is None:
        return flat
    read = array(gate.learned)[0] if not gate.tokens else tokens[gate.tokens].reshape(-1)
    logits = array(gate.output.weight) @ deep(gate.hidden, read) + array(gate.output.bias)
    return 2 / (1 + np.exp(-logits)) * flat


def finalmlp(tower: Any, tokens: Array) -> Array:
    first = deep(tower.first, gated(tower.gate1, tokens))
    second = deep(tower.second, gated(tower.gate2, tokens))
    heads = len(tower.bilinear)
    parts = zip(np.split(first, heads), array(tower.bilinear), np.split(second, heads), strict=True)
    return np.concatenate([first, second, [sum(a @ w @ b for a, w, b in parts)]])


def dcn(tower: Any, tokens: Array) -> Array:
    first = crossed = tokens.reshape(-1)
    for weight, bias in zip(array(tower.weight), array(tower.bias), strict=True):
        crossed = np.outer(first, crossed) @ weight + bias + crossed
    return np.concatenate([crossed, deep(tower.deep, first)])


DERIVATIONS: dict[str, Callable[[Any, Array], Array]] = {
    "lr": lambda _, tokens: tokens.sum(0),
    "fm": lambda _, tokens: np.array([machine(tokens)]),
    "dnn": lambda tower, tokens: deep(tower.deep, tokens.reshape(-1)),
    "wide_deep": lambda tower, tokens: np.concatenate(
        [[tokens[:, 0].sum()], deep(tower.deep, tokens[:, 1:].reshape(-1))]
    ),
    "deepfm": lambda tower, tokens: np.concatenate(
        [[machine(tokens)], deep(tower.deep, tokens[:, 1:].reshape(-1))]
    ),
    "dcn": dcn,
    "xdeepfm": xdeepfm,
    "finalmlp": finalmlp,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tower_computes_its_equations(name: str) -> None:
    tower = CONFIGS[name].build(T, D).double()
    randomize(tower, 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(B, T, D, dtype=torch.float64, generator=generator)
    expected = np.stack([DERIVATIONS[name.split()[0]](tower, row) for row in array(tokens)])
    assert expected.shape == (B, tower.output_dim)
    assert close(tower(tokens), expected)


def test_without_projection_an_fm_reads_weights_and_vectors_from_the_rows_of_the_tables() -> None:
    schema = dataclasses.replace(
        SCHEMA,
        tables=tuple(dataclasses.replace(one, embedding_dim=8) for one in SCHEMA.tables),
        dense=(DenseFeature(name="price"), DenseFeature(name="age")),
    )
    config = ModelConfig(
        tower=FMConfig(),
        tokenizer=TokenizerConfig(
            token_dim=5,
            dense_dim=5,
            history_pooling=(),
            projection=ProjectionConfig(kind="none", field_dim=5),
        ),
        head=HeadConfig(hidden_units=()),
    )
    model = RankingModel(schema, config, seed=0)
    batch = make_batch(4, 0)
    fields = model.embeddings(batch.sparse).pooled.view(4, 3, 8)[:, :, :5]
    numbers = model.tokenizer.dense(batch.dense)
    rows = torch.cat([fields, numbers], 1)
    weights, vectors = rows[..., 0], rows[..., 1:]
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i))
    head = model.objective.head.logits
    logits = (weights.sum(1) + pairs) * head.weight[0, 0] + head.bias
    _, found = model(batch)
    assert torch.allclose(found.probabilities[:, 0], logits.sigmoid(), atol=1e-6)


def test_fields_that_are_no_tokens_as_they_are_need_a_projection() -> None:
    with pytest.raises(ValueError, match=r"needs token_dim = 8 columns, the fields have \[4, 8\]"):
        ProjectionConfig(kind="none").build([8, 4, 8], 8)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (DNNConfig, {"hidden_units": ()}, "at least one width"),
        (WideDeepConfig, {"hidden_units": ()}, "the tower 'lr'"),
        (DeepFMConfig, {"hidden_units": ()}, "the tower 'fm'"),
        (DCNConfig, {"num_cross_layers": 0}, "at least 1"),
        (XDeepFMConfig, {"cin_units": ()}, "at least one positive width"),
        (FinalMLPConfig, {"hidden_units1": (9,)}, "num_heads"),
        (FinalMLPConfig, {"gate_units": (), "gate1": (0,)}, "no effect without gate_units"),
    ],
)
def test_a_setting_that_cannot_be_built_is_an_error(
    config: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)


@pytest.mark.parametrize("config", [FMConfig, WideDeepConfig, DeepFMConfig, XDeepFMConfig])
def test_a_token_without_room_for_a_vector_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="token_dim to at least 2"):
        config().build(T, 1)


def test_a_gate_of_a_token_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens 0 to 3 here, got \(4,\)"):
        FinalMLPConfig(gate2=(4,)).build(T, D)

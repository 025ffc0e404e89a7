# SPDX-License-Identifier: MIT
"""DIN, SASRec and BERT4Rec, derived an event at a time in NumPy, and what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.baselines.sequences.bert4rec import BERT4RecConfig
from models.baselines.sequences.din import Dice, DINConfig
from models.baselines.sequences.sasrec import SASRecConfig
from models.stream import Stream
from tests.support.derivation import Array, array, close, gelu, layer_norm, randomize, relu, softmax
from tests.support.streams import example_of, stream_of

F, D = 2, 4
CONFIGS = {
    "din": DINConfig(attention_units=(5, 3), hidden_units=(6, 2), max_length=4, num_actions=3),
    "din softmax": DINConfig(softmax=True, attention_units=(5,), hidden_units=(6,), max_length=9),
    "din dice": DINConfig(activation="dice", attention_units=(5,), hidden_units=(6,), max_length=4),
    "sasrec": SASRecConfig(num_layers=2, max_length=4, num_actions=3),
    "bert4rec": BERT4RecConfig(num_layers=2, num_heads=2, max_length=4, num_actions=3),
}


def linear(layer: Any, x: Array) -> Array:
    return array(layer.weight) @ x + array(layer.bias)


def history(tower: Any, stream: Stream) -> list[Array]:
    """The newest events with the vectors of their actions and places."""
    kept, places = array(stream.events)[-tower.config.max_length :], tower.history.places
    rows = []
    for behind, event in zip(range(len(kept), 0, -1), kept, strict=True):
        row = event
        if places is not None:
            row = row + array(places.weight)[len(places.weight) - behind]
        if tower.history.actions is not None and stream.actions is not None:
            row = row + array(tower.history.actions.weight)[int(stream.actions[-behind])]
        rows.append(row)
    return rows


def activated(layers: Any, x: Array) -> Array:
    for number, one in enumerate(layers.linears):
        x = linear(one, x)
        if layers.dice:
            dice = layers.dice[number]
            scaled = (x - array(dice.mean)) / np.sqrt(array(dice.variance) + 1e-9)
            share = 1 / (1 + np.exp(-scaled))
            x = share * x + array(dice.alpha) * (1 - share) * x
        else:
            x = np.array(
                [
                    v if v > 0 else v * a
                    for v, a in zip(x, array(layers.slopes[number]), strict=False)
                ]
            )
    return x


def din(tower: Any, stream: Stream) -> Array:
    target, interest = array(stream.targets)[0, 0], np.zeros(D)
    events = history(tower, stream)
    weights = [
        linear(
            tower.weigh,
            activated(tower.unit, np.concatenate([target, e, target - e, target * e])),
        )[0]
        for e in events
    ]
    if tower.config.softmax and events:
        weights = list(softmax(np.array(weights)))
    for weight, event in zip(weights, events, strict=True):
        interest = interest + weight * event
    fields = array(stream.fields).reshape(-1)
    return activated(tower.deep, np.concatenate([fields, interest, target]))


def met(stream: Stream, state: Array) -> Array:
    target = array(stream.targets)[0, 0]
    return np.concatenate([array(stream.fields).reshape(-1), state, target, state * target])


def sasrec(tower: Any, stream: Stream) -> Array:
    rows = history(tower, stream)
    for block in tower.blocks:
        normed = [layer_norm(row, block.attention_norm) for row in rows]
        key = [array(block.key.weight) @ x for x in normed]
        value = [array(block.value.weight) @ x for x in normed]
        following = []
        for index, row in enumerate(rows):
            query = array(block.query.weight) @ normed[index]
            logits = np.array([query @ key[past] / np.sqrt(D) for past in range(index + 1)])
            attended = sum(w * v for w, v in zip(softmax(logits), value, strict=False))
            row = row + attended
            hidden = relu(linear(block.up, layer_norm(row, block.ffn_norm)))
            following.append(row + linear(block.down, hidden))
        rows = following
    return met(stream, layer_norm(rows[-1], tower.norm) if rows else np.zeros(D))


def bert4rec(tower: Any, stream: Stream) -> Array:
    rows = [*history(tower, stream), array(tower.mask)[0, 0]]
    heads = tower.config.num_heads
    for layer in tower.layers:
        key = [np.split(linear(layer.key, row), heads) for row in rows]
        value = [np.split(linear(layer.value, row), heads) for row in rows]
        following = []
        for row in rows:
            query = np.split(linear(layer.query, row), heads)
            parts = []
            for head in range(heads):
                logits = [query[head] @ one[head] / np.sqrt(D / heads) for one in key]
                weights = softmax(np.array(logits))
                parts.append(sum(w * one[head] for w, one in zip(weights, value, strict=True)))
            mixed = layer_norm(
                row + linear(layer.output, np.concatenate(parts)), layer.attention_norm
            )
            fed = linear(layer.down, gelu(linear(layer.up, mixed)))
            following.append(layer_norm(mixed + fed, layer.ffn_norm))
        rows = following
    return met(stream, gelu(linear(tower.project, rows[-1])))


DERIVATIONS = {"din": din, "sasrec": sasrec, "bert4rec": bert4rec}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tower_computes_its_equations_for_each_target_of_ragged_histories(name: str) -> None:
    tower = CONFIGS[name].build(F, D).double().eval()
    randomize(tower, 1)
    for module in tower.modules():
        if isinstance(module, Dice):
            module.mean.normal_(generator=torch.Generator().manual_seed(3))
            module.variance.uniform_(0.5, 2, generator=torch.Generator().manual_seed(4))
    stream = stream_of(
        [3, 0, 7, 1],
        num_fields=F,
        dim=D,
        num_targets=2,
        num_actions=CONFIGS[name].num_actions,
    )
    out = tower(stream)
    assert out.shape == (4, 2, tower.output_dim)
    for example in range(4):
        for target in range(2):
            one = example_of(stream, example, target)
            expected = DERIVATIONS[name.split()[0]](tower, one)
            assert close(out[example, target], expected), (example, target)


def test_dice_takes_moments_of_real_rows_and_remembers_them() -> None:
    dice = Dice(3).double()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
    present = torch.tensor([[True, True, False, True], [False, True, True, False]])
    out = dice(rows, present)
    norm = nn.BatchNorm1d(3, eps=1e-9, momentum=0.01, affine=False).double()
    expected = rows[present] * norm(rows[present]).sigmoid()
    assert torch.allclose(out[present], expected)
    assert torch.allclose(dice.mean, norm.running_mean)
    assert bool(dice(rows, torch.zeros_like(present)).isfinite().all())


@pytest.mark.parametrize("name", ["sasrec", "bert4rec"])
def test_the_sum_of_the_last_part_is_the_published_score(name: str) -> None:
    tower = CONFIGS[name].build(F, D).double().eval()
    stream = stream_of([3, 2], num_fields=F, dim=D, num_actions=3)
    state, target, product = tower(stream)[..., F * D :].split(D, dim=-1)
    assert torch.allclose(product.sum(-1), (state * target).sum(-1))


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (DINConfig, {"hidden_units": ()}, "need a width each"),
        (DINConfig, {"activation": "relu"}, "activation must be one of prelu, dice"),
        (SASRecConfig, {"num_layers": 0}, "must be positive"),
        (BERT4RecConfig, {"dropout": 1.0}, r"dropout in \[0, 1\)"),
    ],
)
def test_a_setting_that_cannot_be_built_is_an_error(
    config: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_heads_that_do_not_split_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of num_heads, got 4 and num_heads=3"):
        BERT4RecConfig(num_heads=3).build(F, D)

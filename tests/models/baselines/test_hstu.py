# SPDX-License-Identifier: MIT
"""HSTU: equal to a derivation a row at a time, its mask, and what it refuses."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.baselines.sequences.hstu import HSTU, HSTUConfig, HSTULayer
from models.stream import Stream
from tests.support.derivation import (
    Array,
    array,
    layer_norm,
    randomize,
    silu,
)
from tests.support.streams import check_targets, stream_of, streams


def seen_by(index: int, num_fields: int, size: int) -> list[int]:
    """Rows that row `index` of `[fields, events, target]` sees."""
    if index < num_fields:
        return list(range(size - 1))
    return list(range(index + 1))


def derived(stream: Stream, tower: HSTU) -> Array:
    """One example with one target, one row at a time: the target's output (D,)."""
    config, fields = tower.config, list(array(stream.fields)[0])
    events, places = array(stream.events), array(tower.history.places.weight)
    kept = min(len(events), config.max_length)
    history = []
    for behind in range(kept, 0, -1):
        event = events[len(events) - behind] + places[config.max_length - behind]
        if tower.history.actions is not None and stream.actions is not None:
            action = int(stream.actions[len(events) - behind])
            event = event + array(tower.history.actions.weight)[action]
        history.append(event)
    rows = [*fields, *history, array(stream.targets)[0, 0]]
    heads, length = config.num_heads, len(fields) + config.max_length + 1
    for module in tower.layers:
        layer = cast("HSTULayer", module)
        gate_query = [_map(layer.gate_query, layer_norm(row, layer.norm)) for row in rows]
        value_key = [_map(layer.value_key, layer_norm(row, layer.norm)) for row in rows]
        wide = heads * (config.value_dim or len(rows[0]) // heads)
        following = []
        for index, row in enumerate(rows):
            attended = np.zeros(wide)
            query = np.split(gate_query[index][wide:], heads)
            for past in seen_by(index, len(fields), len(rows)):
                value = np.split(value_key[past][:wide], heads)
                key = np.split(value_key[past][wide:], heads)
                parts = [
                    silu(q @ k / np.sqrt(len(q))) / length * v
                    for q, k, v in zip(query, key, value, strict=True)
                ]
                attended = attended + np.concatenate(parts)
            gate = silu(gate_query[index][:wide])
            gated = gate * layer_norm(attended, layer.attended_norm)
            joined = np.concatenate([gate, attended, gated])
            following.append(row + array(layer.output.weight) @ joined)
        rows = following
    return layer_norm(rows[-1], tower.norm)


def _map(linear: torch.nn.Linear, x: Array) -> Array:
    return array(linear.weight) @ x + array(linear.bias)


@st.composite
def cases(draw: st.DrawFn) -> tuple[HSTUConfig, Stream, int]:
    stream = draw(streams(num_fields=draw(st.integers(1, 3)), dim=4))
    config = HSTUConfig(
        num_layers=draw(st.integers(1, 3)),
        num_heads=draw(st.sampled_from([1, 2])),
        attention_dim=draw(st.sampled_from([0, 3])),
        value_dim=draw(st.sampled_from([0, 5])),
        max_length=draw(st.integers(1, 6)),
        num_actions=0 if stream.actions is None else 4,
    )
    return config, stream, draw(st.integers(0, 2**31))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_tower_equals_the_derivation(case: tuple[HSTUConfig, Stream, int]) -> None:
    config, stream, seed = case
    tower = config.build(*stream.fields.shape[1:]).double()
    randomize(tower, seed)
    check_targets(stream, tower, derived)


def tower_of(**settings: Any) -> HSTU:
    tower = HSTUConfig(**{"max_length": 6, "num_actions": 4} | settings).build(3, 8).double()
    randomize(tower, 0)
    return tower


def test_fields_see_the_history_events_the_past_and_targets_everything_but_targets() -> None:
    tower = tower_of()
    present = torch.tensor([[False, True, True], [True, True, True]])
    mask = tower._mask(present, 2)[0, 0].int().tolist()
    assert mask == [
        # fields, events (the first is padding), targets
        [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 1, 0],
        [1, 1, 1, 0, 1, 1, 0, 1],
    ]


def test_maps_start_as_one_xavier_uniform_matrix_without_bias() -> None:
    layer = HSTUConfig(num_heads=4, attention_dim=16, value_dim=32).build(3, 64).layers[0]
    assert isinstance(layer, HSTULayer)
    bound = (6 / (64 + 4 * (2 * 16 + 2 * 32))) ** 0.5
    for linear in (layer.gate_query, layer.value_key):
        assert linear.weight.shape == (4 * 48, 64)
        assert 0.98 * bound < float(linear.weight.detach().abs().max()) <= bound
        assert not linear.bias.any()
    assert layer.norm.eps == layer.attended_norm.eps == 1e-6
    assert layer.output.weight.shape == (64, 3 * 4 * 32)


def test_what_was_seen_more_often_weighs_more() -> None:
    # Without a softmax, two equal events attend to twice as much as one.
    tower = tower_of(num_layers=1, num_actions=0)
    torch.nn.init.zeros_(tower.history.places.weight)
    attended: list[torch.Tensor] = []
    layer = tower.layers[0]
    assert isinstance(layer, HSTULayer)
    layer.attended_norm.register_forward_pre_hook(
        lambda module, args: attended.append(args[0].detach()[0, 0])
    )
    stream = stream_of([1], num_actions=0)
    for count in (0, 1, 2):
        events = stream.events.expand(count, -1)
        tower(stream._replace(events=events, offsets=torch.tensor([0, count])))
    torch.testing.assert_close(attended[2] - attended[0], 2 * (attended[1] - attended[0]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"num_heads": 0}, "num_heads must be positive"),
        ({"value_dim": -1}, "value_dim must not be negative"),
    ],
)
def test_settings_without_meaning_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HSTUConfig(**values)


def test_heads_that_do_not_split_the_width_need_widths_of_their_own() -> None:
    with pytest.raises(ValueError, match="or set attention_dim and value_dim"):
        HSTUConfig(num_heads=3).build(3, 8)
    assert HSTUConfig(num_heads=3, attention_dim=4, value_dim=4).build(3, 8).output_dim == 8

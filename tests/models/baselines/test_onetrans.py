# SPDX-License-Identifier: MIT
"""OneTrans: equal to a derivation a token at a time, blind to padding, and what it refuses."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.attention.padding import PaddedHistory
from models.baselines.sequences.onetrans import OneTrans, OneTransConfig, OneTransLayer
from models.stream import Stream
from tests.support.derivation import (
    Array,
    array,
    gelu,
    randomize,
    rms_norm,
    softmax,
)
from tests.support.streams import check_targets, stream_of, streams

EPS = 1e-6


def events_of(stream: Stream, history: PaddedHistory) -> list[Array]:
    """The newest events of the one example of a stream, with actions and places."""
    events = array(stream.events)
    places = array(history.places.weight)[::-1]
    out = []
    for behind in range(min(len(events), history.max_length)):
        index = len(events) - 1 - behind
        event = events[index] + places[behind]
        if history.actions is not None and stream.actions is not None:
            event = event + array(history.actions.weight)[int(stream.actions[index])]
        out.insert(0, event)
    return out


def shared(layer: nn.Module | None, x: Array) -> Array:
    assert isinstance(layer, nn.Linear)
    return array(layer.weight) @ x + array(layer.bias)


def derived(stream: Stream, tower: OneTrans) -> Array:
    """One example with one target, one row at a time: the target's output (D,)."""
    config = tower.config
    fields = list(array(stream.fields)[0])
    rows = [*events_of(stream, tower.history), *fields, array(stream.targets)[0, 0]]
    # Whose weights a row uses: -1 for events, which share theirs.
    owner = [-1] * (len(rows) - len(fields) - 1) + list(range(len(fields) + 1))
    for number, module in enumerate(tower.layers):
        layer = cast("OneTransLayer", module)
        last = number + 1 == config.num_layers
        normed = [rms_norm(row, array(layer.attention_norm.weight), EPS) for row in rows]
        keys, values = [], []
        for row, own in zip(normed, owner, strict=True):
            both = (
                shared(layer.key_value, row)
                if own < 0
                else row @ array(layer.own_key_value.weight)[own]
            )
            keys.append(both[: len(row)])
            values.append(both[len(row) :])
        halved = number + 1 if config.pyramid == "halving" else 0
        events = owner.count(-1)
        going_on = [
            index
            for index, own in enumerate(owner)
            if (index == len(rows) - 1)
            or (not last and (own >= 0 or index >= events - (config.max_length >> halved)))
        ]
        following = []
        for index in going_on:
            own = 0 if last else owner[index]
            row = normed[index]
            query = (
                shared(layer.query, row) if own < 0 else row @ array(layer.own_query.weight)[own]
            )
            attended = []
            for head in np.split(np.arange(len(row)), config.num_heads):
                logits = [query[head] @ keys[past][head] for past in range(index + 1)]
                weights = softmax(np.array(logits) / np.sqrt(len(head)))
                attended.append(sum(w * values[past][head] for past, w in enumerate(weights)))
            row = rows[index] + shared(layer.output, np.concatenate(attended))
            hidden = rms_norm(row, array(layer.ffn_norm.weight), EPS)
            if own < 0:
                fed = shared(layer.down, gelu(shared(layer.up, hidden)))
            else:
                up, down = layer.own_ffn.up, layer.own_ffn.down
                hidden = gelu(hidden @ array(up.weight)[own] + array(up.bias)[own])
                fed = hidden @ array(down.weight)[own] + array(down.bias)[own]
            following.append(row + fed)
        rows, owner = following, [owner[index] for index in going_on]
    return rms_norm(rows[-1], array(tower.norm.weight), EPS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[OneTransConfig, Stream, int]:
    stream = draw(streams(num_fields=draw(st.integers(1, 3)), dim=4))
    config = OneTransConfig(
        num_layers=draw(st.integers(1, 3)),
        num_heads=draw(st.sampled_from([1, 2])),
        expansion=2.0,
        max_length=draw(st.integers(1, 6)),
        pyramid=draw(st.sampled_from(["halving", "none"])),
        num_actions=0 if stream.actions is None else 4,
    )
    return config, stream, draw(st.integers(0, 2**31))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_tower_equals_the_derivation(case: tuple[OneTransConfig, Stream, int]) -> None:
    config, stream, seed = case
    tower = config.build(*stream.fields.shape[1:]).double()
    randomize(tower, seed)
    check_targets(stream, tower, derived)


def tower_of(**settings: Any) -> OneTrans:
    defaults: dict[str, Any] = dict(max_length=6, num_actions=4, expansion=2)
    tower = OneTransConfig(**defaults | settings).build(3, 8).double()
    randomize(tower, 0)
    return tower


def test_the_pyramid_halves_the_events_and_the_last_layer_computes_targets_alone() -> None:
    tower, rows = tower_of(num_layers=4, max_length=8), []
    for layer in tower.layers:
        layer.register_forward_pre_hook(
            lambda module, args: rows.append((args[0].shape[1], args[1].shape[1]))
        )
    tower(stream_of([12, 3]))
    assert rows == [(8, 4), (4, 4), (2, 4), (1, 4)]
    assert tower.layers[3].query is None and tower.layers[3].up is None


def test_events_share_their_weights_and_each_field_has_its_own() -> None:
    tower, dim, fields = OneTransConfig(num_layers=2, expansion=2, max_length=6).build(3, 8), 8, 3
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in tower.layers]
    ffn = 2 * dim * 2 * dim + 2 * dim + dim
    first = 2 * dim + (fields + 2) * 3 * dim**2 + dim**2 + (fields + 2) * ffn
    last = 2 * dim + (fields + 2) * 2 * dim**2 + dim**2 + dim**2 + ffn
    assert sizes == [first, last]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"max_length": 0}, "max_length must be positive"),
        ({"expansion": 0.0}, "expansion must be positive"),
        ({"num_actions": -1}, "num_actions not negative"),
        ({"pyramid": "linear"}, "pyramid must be one of halving, none"),
    ],
)
def test_settings_without_meaning_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneTransConfig(**values)


def test_heads_that_do_not_split_the_width_are_errors() -> None:
    with pytest.raises(ValueError, match="multiple of num_heads"):
        OneTransConfig(num_heads=3).build(3, 8)

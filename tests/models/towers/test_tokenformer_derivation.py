# SPDX-License-Identifier: MIT
"""TokenFormer from the paper's equations, one row and one head at a time, in NumPy and float64.

The whole stream of one example is written out as a list of rows with their positions and kinds;
what a row sees is decided pair by pair. Packing, pruning, masks and the two passes of the tower
have no counterpart here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention.attention import bfts_masks, isolate_candidates
from models.stream import Stream
from models.towers.interaction import InteractionBlock, rotation_table
from models.towers.tokenformer import TokenFormer, TokenFormerConfig, UserOutputs
from tests.support.derivation import (
    Array,
    array,
    check_gradients,
    close,
    randomize,
    rms_norm,
    silu,
    softmax,
)
from tests.support.streams import example_of, stream_of, streams


class Row(NamedTuple):
    """kind: field, separator, item, action or target. position: of the rotation."""

    vector: Array
    position: int
    kind: str


def rows_of(stream: Stream, tower: TokenFormer) -> list[Row]:
    """The stream of one example with one target, equations 6 and 7."""
    config = tower.config
    separator = array(tower.separator)[0]
    rows = [Row(field, 0, "field") for field in array(stream.fields)[0]]
    rows.append(Row(separator, 0, "separator"))
    events = array(stream.events)
    first = max(0, len(events) - config.max_length)
    used = len(events) - first
    shift = config.max_length - used if config.right_align else 0
    for t in range(used):
        rows.append(Row(events[first + t], t + 1 + shift, "item"))
        if tower.actions is not None and stream.actions is not None:
            action = array(tower.actions)[int(stream.actions[first + t])]
            rows.append(Row(action, t + 1 + shift, "action"))
    target = array(stream.targets)[0, 0]
    if config.mode == "impression":
        rows.append(Row(separator, used + 1 + shift, "separator"))
        rows.append(Row(target, config.max_length + 1, "target"))
    else:
        rows.append(Row(target, used + 1 + shift, "target"))
    return rows


def sees(rows: list[Row], i: int, j: int, window: int | None, both_ways: bool) -> bool:
    """Whether row i sees row j: equations 12, 14, 15."""
    fields = rows[i].kind == "field" and rows[j].kind == "field"
    if j > i:
        return fields and both_ways and window is None
    if window is None:
        return True
    discarded = rows[j].kind == "field" and rows[i].kind != "field"
    return i - j < window and not discarded


def turned(x: Array, position: int, base: float) -> Array:
    """Rotary position: coordinates k and k + d/2 are one complex number."""
    half = len(x) // 2
    angle = position * base ** (-np.arange(half) / half)
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])


def derived(stream: Stream, tower: TokenFormer) -> list[Row]:
    """The rows of one example after the last layer."""
    config, rows = tower.config, rows_of(stream, tower)
    windows = [None] * config.num_full_layers + list(config.windows)
    for module, window in zip(tower.layers, windows, strict=True):
        block = cast("InteractionBlock", module)
        dim = len(rows[0].vector)
        heads = np.split(np.arange(dim), config.num_heads)
        w_key, w_value = np.split(array(block.key_value.weight), 2)
        w_query, w_gate = array(block.query_gate.weight)[:dim], array(block.query_gate.weight)[dim:]
        w_out = None if block.output is None else array(block.output.weight)
        w_swish, w_linear = np.split(array(block.ffn.lift.weight), 2)
        normed = [rms_norm(row.vector, array(block.attention_norm.weight), 1e-6) for row in rows]
        places, base = [row.position for row in rows], config.rope_base
        keys, values = [w_key @ x for x in normed], [w_value @ x for x in normed]
        keys = [[turned(k[h], t, base) for h in heads] for k, t in zip(keys, places, strict=True)]
        following = []
        for i, row in enumerate(rows):
            both = config.static_bidirectional
            seen = [j for j in range(len(rows)) if sees(rows, i, j, window, both)]
            attended, query = np.zeros(dim), w_query @ normed[i]
            for number, head in enumerate(heads):
                q = turned(query[head], row.position, base) / np.sqrt(len(head))
                weights = softmax(np.array([q @ keys[j][number] for j in seen]))
                for weight, j in zip(weights, seen, strict=True):
                    attended[head] += weight * values[j][head]
            if config.output_projection == "before_gate" and w_out is not None:
                attended = w_out @ attended
            if config.gate != "none":
                attended = attended / (1 + np.exp(-w_gate @ normed[i]))
            if config.output_projection == "after_gate" and w_out is not None:
                attended = w_out @ attended
            x = row.vector + attended
            hidden = rms_norm(x, array(block.ffn_norm.weight), 1e-6)
            fed = array(block.ffn.compress.weight) @ (silu(w_swish @ hidden) * (w_linear @ hidden))
            following.append(row._replace(vector=x + fed))
        rows = following
    return rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenFormerConfig, Stream, int]:
    stream = draw(streams(num_fields=draw(st.integers(1, 3)), dim=4))
    full = draw(st.integers(1, 2))
    windows = tuple(draw(st.lists(st.integers(2, 9), max_size=2)))
    config = TokenFormerConfig(
        mode=draw(st.sampled_from(["impression", "user_centric"])),
        num_layers=full + len(windows),
        num_full_layers=full,
        windows=windows,
        num_heads=draw(st.sampled_from([1, 2])),
        expansion=1.5,
        max_length=draw(st.integers(1, 6)),
        num_actions=0 if stream.actions is None else 4,
        static_bidirectional=draw(st.booleans()),
        gate=draw(st.sampled_from(["xavier", "none"])),
        output_projection=draw(st.sampled_from(["none", "before_gate", "after_gate"])),
        right_align=draw(st.booleans()),
    )
    return config, stream, draw(st.integers(0, 2**31))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_tower_equals_the_equations(case: tuple[TokenFormerConfig, Stream, int]) -> None:
    config, stream, seed = case
    tower = config.build(*stream.fields.shape[1:]).double()
    randomize(tower, seed)
    out = tower(stream)
    targets = out.targets if isinstance(out, UserOutputs) else out
    assert targets.shape == stream.targets.shape
    items: list[Array] = []
    for example in range(targets.shape[0]):
        rows: list[Row] = []
        for target in range(targets.shape[1]):
            rows = derived(example_of(stream, example, target), tower)
            assert close(targets[example, target], rows[-1].vector), (example, target)
        items += [row.vector for row in rows if row.kind == "item"]
    if isinstance(out, UserOutputs):
        assert close(out.items, np.array(items).reshape(-1, 4))


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [("impression", [2, 0, 4]), ("impression", [0, 0]), ("user_centric", [1, 0, 4])],
)
def test_gradients_of_inputs_and_weights_equal_finite_differences(
    mode: Any, lengths: list[int]
) -> None:
    stream = stream_of(lengths, num_fields=2, dim=4, num_targets=2, num_actions=2)
    config = TokenFormerConfig(
        mode=mode,
        num_layers=2,
        num_full_layers=1,
        windows=(3,),
        expansion=0.5,
        max_length=3,
        num_actions=2,
    )
    tower = config.build(2, 4).double()
    randomize(tower, 0)
    if mode == "user_centric":
        tower = Joined(tower)

    def call(fields: Tensor, events: Tensor, targets: Tensor) -> Any:
        return (stream._replace(fields=fields, events=events, targets=targets),)

    check_gradients(tower, call, stream.fields, stream.events, stream.targets)


class Joined(torch.nn.Module):
    """Both outputs of `user_centric` mode as one tensor."""

    def __init__(self, tower: TokenFormer) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, stream: Stream) -> Tensor:
        out = self.tower(stream)
        return torch.cat([out.items.flatten(), out.targets.flatten()])


def test_long_streams_through_chunks_equal_the_equations() -> None:
    # Long enough for the kernel that skips what windows hide.
    stream = stream_of([70, 0, 33], num_fields=2, dim=4, num_actions=4)
    config = TokenFormerConfig(
        mode="user_centric",
        num_layers=3,
        num_full_layers=1,
        windows=(9, 5),
        expansion=1.0,
        max_length=60,
        num_actions=4,
    )
    tower = config.build(2, 4).double()
    randomize(tower, 0)
    out = tower(stream)
    items: list[Array] = []
    for example in range(3):
        rows = derived(example_of(stream, example, 0), tower)
        assert close(out.targets[example, 0], rows[-1].vector)
        items += [row.vector for row in rows if row.kind == "item"]
    assert close(out.items, np.array(items))


def run_as_one(tower: TokenFormer, stream: Stream, isolated: bool) -> Tensor:
    """Outputs (V, D) of one example's targets, all appended to one dense stream."""
    num_targets = stream.targets.shape[1]
    context = rows_of(example_of(stream, 0, 0), tower)[:-1]
    vectors = [torch.from_numpy(row.vector) for row in context]
    x = torch.stack([*vectors, *stream.targets[0]])[None]
    last = tower.config.max_length + 1
    positions = torch.tensor([row.position for row in context] + [last] * num_targets)
    head_dim = x.shape[2] // tower.config.num_heads
    cos, sin = (p[positions][None, :, None] for p in rotation_table(last + 1, head_dim, 1e4, x))
    config = tower.config
    masks = bfts_masks(tower.num_fields, x.shape[1], config.num_full_layers, config.windows)
    for block, mask in zip(tower.layers, masks, strict=True):
        x = block(x, (cos, sin), isolate_candidates(mask, num_targets) if isolated else mask)
    return x[0, -num_targets:]


def test_candidates_of_a_plain_causal_stream_leak_and_those_of_an_isolated_one_do_not() -> None:
    # Full layers: a window would count the candidates before a candidate as its past.
    stream = stream_of([5], num_targets=4)
    tower = TokenFormerConfig(windows=(), num_layers=3, num_full_layers=3, num_actions=4).build(
        3, 8
    )
    tower = tower.double()
    randomize(tower, 0)
    alone = torch.cat([tower(example_of(stream, 0, v))[0] for v in range(4)])
    assert (tower(stream)[0] - alone).abs().max() < 1e-10
    assert (run_as_one(tower, stream, isolated=True) - alone).abs().max() < 1e-10
    assert (run_as_one(tower, stream, isolated=False) - alone).abs().max() > 0.1

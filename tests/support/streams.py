# SPDX-License-Identifier: MIT
"""Random streams for tests of towers that read a history."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from models.stream import Stream
from tests.support.derivation import Array, close

DOUBLE = torch.float64


def stream_of(
    lengths: list[int],
    *,
    num_fields: int = 3,
    dim: int = 8,
    num_targets: int = 1,
    num_actions: int = 4,
    seed: int = 0,
) -> Stream:
    """Return a stream of histories of these lengths; num_actions 0 for one without actions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=DOUBLE, generator=generator)

    total = sum(lengths)
    return Stream(
        fields=draw(len(lengths), num_fields, dim),
        events=draw(total, dim),
        offsets=torch.tensor([0, *itertools.accumulate(lengths)]),
        actions=torch.randint(0, num_actions, (total,), generator=generator)
        if num_actions
        else None,
        targets=draw(len(lengths), num_targets, dim),
    )


def example_of(stream: Stream, example: int, target: int) -> Stream:
    """Return one example of a stream with one of its targets."""
    first, last = stream.offsets[example : example + 2].tolist()
    return Stream(
        fields=stream.fields[example : example + 1],
        events=stream.events[first:last],
        offsets=torch.tensor([0, last - first]),
        actions=None if stream.actions is None else stream.actions[first:last],
        targets=stream.targets[example : example + 1, target : target + 1],
    )


@st.composite
def streams(draw: st.DrawFn, num_fields: int, dim: int) -> Stream:
    """Draw ragged streams: empty histories, longer ones than a tower takes, several targets."""
    return stream_of(
        draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)),
        num_fields=num_fields,
        dim=dim,
        num_targets=draw(st.integers(1, 3)),
        num_actions=draw(st.sampled_from([0, 4])),
        seed=draw(st.integers(0, 2**31)),
    )


def check_targets(
    stream: Stream, tower: nn.Module, derived: Callable[[Stream, Any], Array]
) -> None:
    """Compare each of a tower's target outputs with `derived` of that example and target alone."""
    out = tower(stream)
    assert out.shape == stream.targets.shape
    for example in range(out.shape[0]):
        for target in range(out.shape[1]):
            one = example_of(stream, example, target)
            assert close(out[example, target], derived(one, tower)), (example, target)

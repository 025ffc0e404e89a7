# SPDX-License-Identifier: MIT
"""What TokenFormer's sliding layers save: two full and two sliding layers against four full ones.

    python -m tests.benchmarks.tokenformer

A forward and backward of the tower, one thread, histories of `--length` events without actions and
of half as many with. `2F2S` has windows of 32 and 16 tokens; `masked` is the same tower with
the windows as a mask over all pairs, which it is checked to agree with.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from unittest import mock

import torch

from models.attention import attention
from models.stream import Stream
from models.towers.tokenformer import Mode, TokenFormer, TokenFormerConfig, UserOutputs
from tests.benchmarks.timing import Line, interleave, single_threaded

TARGET = 0.7
WINDOWS = (32, 16)
NUM_FIELDS, NUM_ACTIONS = 8, 4


def stream_of(counts: list[int], dim: int, actions: bool) -> Stream:
    """Return a random stream of histories of `counts` events."""
    total = sum(counts)
    return Stream(
        fields=torch.randn(len(counts), NUM_FIELDS, dim),
        events=torch.randn(total, dim),
        offsets=torch.tensor([0, *itertools.accumulate(counts)]),
        actions=torch.randint(0, NUM_ACTIONS, (total,)) if actions else None,
        targets=torch.randn(len(counts), 1, dim),
    )


def tower_of(mode: Mode, stream: Stream, max_length: int, windows: tuple[int, ...]) -> TokenFormer:
    """Return a tower of four layers, the last of them sliding through `windows`."""
    config = TokenFormerConfig(
        mode=mode,
        num_full_layers=4 - len(windows),
        windows=windows,
        max_length=max_length,
        num_actions=0 if stream.actions is None else NUM_ACTIONS,
    )
    torch.manual_seed(0)
    return config.build(NUM_FIELDS, stream.fields.shape[2])


def outputs(tower: TokenFormer, stream: Stream) -> torch.Tensor:
    """Return all outputs of a tower in one vector."""
    out = tower(stream)
    parts = (out.items, out.targets) if isinstance(out, UserOutputs) else (out,)
    return torch.cat([part.flatten() for part in parts])


def step(tower: TokenFormer, stream: Stream) -> None:
    """Run forward and backward."""
    tower.zero_grad(set_to_none=True)
    outputs(tower, stream).sum().backward()


def masked(call: Callable[[], object]) -> None:
    """Run `call` with every window as a mask."""
    with mock.patch.object(attention, "kernel_for", lambda *_: "padded"):
        call()


def measure(name: str, mode: Mode, stream: Stream, max_length: int, rounds: int) -> list[Line]:
    """Return the lines of one mode and stream."""
    full = tower_of(mode, stream, max_length, ())
    sliding = tower_of(mode, stream, max_length, WINDOWS)
    kept: list[torch.Tensor] = []
    masked(lambda: kept.append(outputs(sliding, stream)))
    torch.testing.assert_close(outputs(sliding, stream), kept[0], rtol=1e-4, atol=1e-4)
    times = interleave(
        {
            "4F": lambda: step(full, stream),
            "2F2S": lambda: step(sliding, stream),
            "masked": lambda: masked(lambda: step(sliding, stream)),
        },
        rounds=rounds,
    )
    label = f"{mode}, {name}"
    held = mode == "impression" and max_length <= 512
    return [
        Line(
            name=f"{label}: 2F2S / 4F ({times.median('4F') * 1e3:.0f} ms)",
            ratio=times.ratio("2F2S", "4F"),
            bound="at most" if held else None,
            target=TARGET if held else None,
        ),
        Line(name=f"{label}: 2F2S / masked", ratio=times.ratio("2F2S", "masked")),
    ]


def main() -> None:
    """Print two lines a mode and stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=512, help="tokens of a history")
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--modes", nargs="+", default=["impression", "user_centric"])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    single_threaded()
    for dim, mode, actions in itertools.product(given.dims, given.modes, (False, True)):
        most = given.length // (2 if actions else 1)
        ragged = [most * (1 + i) // given.examples for i in range(given.examples)]
        kinds = {"": [most] * given.examples} | ({} if actions else {" ragged": ragged})
        for kind, counts in kinds.items():
            stream = stream_of(counts, dim, actions)
            name = f"{given.length}{kind} tokens{' with actions' if actions else ''}, D {dim}"
            for line in measure(name, mode, stream, most, given.rounds):
                print(line, flush=True)


if __name__ == "__main__":
    main()

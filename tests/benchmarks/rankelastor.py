# SPDX-License-Identifier: MIT
"""How much faster a RankElastor block is than the same block as a loop over tokens.

    python -m tests.benchmarks.rankelastor

Forward and backward, one thread, both variants at sizes of the paper and of the release, several
batch sizes. `tokens` maps every token by modules of its own, mixing included (token t of M is W's
t-th rows times vec(X)); `feed-forwards` loops over the feed-forwards alone, as the release does.
Both are given the block's weights and checked to return what it returns.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers import PerTokenGLU, PerTokenLinear, PerTokenRMSNorm
from models.towers.rankelastor import PaperBlock, RankElastorConfig, ReleasedBlock
from tests.benchmarks.timing import Line, interleave, single_threaded

TARGET = 5.0
BATCHES = (1, 4, 16, 64, 256, 1024)
Block = PaperBlock | ReleasedBlock


class TokenUnit(nn.Module):
    """One token's gated unit, from the weights of all."""

    def __init__(self, glu: PerTokenGLU, token: int) -> None:
        super().__init__()
        lift, bias = glu.lift.weight[token], glu.lift.bias
        biases = None if bias is None else bias[token].split(glu.hidden)
        self.lifts = nn.ModuleList(
            _linear(weight, None if biases is None else biases[index])
            for index, weight in enumerate(lift.split(glu.hidden, dim=1))
        )
        self.compress = _of_token(glu.compress, token)
        self.residual = _of_token(glu.residual, token)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.gelu(self.lifts[0](x))
        if len(self.lifts) == 3:
            gate = gate + self.lifts[2](x)
        return self.compress(gate * self.lifts[1](x)) + self.residual(x)


class TokenLoop(nn.Module):
    """A block as a loop over its tokens; whole_mixing: mix them at once all the same."""

    def __init__(self, block: Block, num_tokens: int, whole_mixing: bool) -> None:
        super().__init__()
        self.norm, self.mixing_norm = block.norm, block.mixing.norm
        self.mixing = block.mixing if whole_mixing else None
        bias = block.mixing.bias
        biases = [None] * num_tokens if bias is None else bias.chunk(num_tokens)
        self.mixers = nn.ModuleList(
            _linear(weight.T, own)
            for weight, own in zip(block.mixing.weight.chunk(num_tokens), biases, strict=True)
        )
        self.released = isinstance(block, ReleasedBlock)
        layers = list(block.ffn.layers) if isinstance(block, ReleasedBlock) else [block.ffn]
        self.units = nn.ModuleList(
            nn.Sequential(*(_layer_of_token(layer, token) for layer in layers))
            for token in range(num_tokens)
        )

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        out = []
        if self.mixing is not None:
            rows = self.norm(self.mixing(tokens_BTD)).unbind(1)
        else:
            flat = self.mixing_norm(tokens_BTD.flatten(1))
            rows = [
                self.norm(tokens_BTD[:, token] + mixer(flat))
                for token, mixer in enumerate(self.mixers)
            ]
        for row, unit in zip(rows, self.units, strict=True):
            out.append(unit(row) + row if self.released else unit(row))
        return torch.stack(out, dim=1)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(*weight.shape, bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def _of_token(layer: PerTokenLinear, token: int) -> nn.Linear:
    return _linear(layer.weight[token], None if layer.bias is None else layer.bias[token])


def _layer_of_token(layer: nn.Module, token: int) -> nn.Module:
    if isinstance(layer, PerTokenGLU):
        return TokenUnit(layer, token)
    if isinstance(layer, PerTokenLinear):
        return _of_token(layer, token)
    assert isinstance(layer, PerTokenRMSNorm)
    norm = nn.RMSNorm(layer.gain.shape[-1], eps=1e-12)
    with torch.no_grad():
        norm.weight.copy_(layer.gain[token, 0])
    return norm


def measure(name: str, block: Block, num_tokens: int, dim: int, batch: int) -> list[Line]:
    """Return the lines of one block and batch size."""
    tokens = torch.randn(batch, num_tokens, dim, requires_grad=True)
    gradient = torch.randn(batch, num_tokens, dim)
    loops = {
        "tokens": TokenLoop(block, num_tokens, whole_mixing=False),
        "feed-forwards": TokenLoop(block, num_tokens, whole_mixing=True),
    }
    for loop in loops.values():
        torch.testing.assert_close(loop(tokens), block(tokens), rtol=1e-4, atol=1e-4)

    def step(module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        tokens.grad = None
        module(tokens).backward(gradient)

    modules: dict[str, nn.Module] = {"block": block, **loops}
    times = interleave({k: lambda m=m: step(m) for k, m in modules.items()}, rounds=9)
    milliseconds = times.median("block") * 1e3
    label = f"{name}, T {num_tokens}, D {dim}, batch {batch} ({milliseconds:.2f} ms)"
    return [
        Line(
            name=f"{label}: loop over {loop}",
            ratio=times.ratio(loop, "block"),
            bound="at least" if loop == "tokens" else None,
            target=TARGET if loop == "tokens" else None,
        )
        for loop in loops
    ]


def main() -> None:
    """Print a line a block, batch size and loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    batches = parser.parse_args().batches
    single_threaded()
    torch.manual_seed(0)
    released = RankElastorConfig(variant="code", hidden_units=(64, 64))
    for batch in batches:
        paper = PaperBlock(RankElastorConfig(), 15, 26)
        for line in measure("paper", paper, 15, 26, batch):
            print(line, flush=True)
        for line in measure("code", ReleasedBlock(released, 26, 30), 26, 30, batch):
            print(line, flush=True)


if __name__ == "__main__":
    main()
